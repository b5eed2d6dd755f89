"""Gradients of half a cycle, taken out of one optimizer and put into a fresh one: the other half ends in the same bits."""

import pytest
import torch

from support.offload import Run
from trainer.optim.gradients import HoldsGradients, all_gradients, gradients, set_gradients

WAYS = [
    pytest.param("none", {}, id="none"),
    pytest.param("optimizer", {}, id="optimizer"),
    pytest.param("optimizer", {"transfer": "copy", "chunk_bytes": 300}, id="optimizer-copy"),
    pytest.param("full", {}, id="full"),
    pytest.param("full", {"transfer": "copy", "chunk_bytes": 300}, id="full-copy"),
]


def backward(run: Run, first: int, last: int) -> None:
    for x, y in list(run.micro_batches())[first:last]:
        ((run.model(x) - y).square().sum() / 12).backward()


def finish(run: Run):
    backward(run, 2, 4)
    norm = run.clip().item()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm, run.bits()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, options", WAYS)
def test_a_cycle_ends_in_the_same_bits(mode, options, dtype):
    kwargs = {"accumulate": 4, "max_norm": 0.5, "dtype": dtype, **options}
    whole, resumed, without = (Run(mode, **kwargs) for _ in range(3))
    backward(whole, 0, 2)
    taken = {name: gradient.clone() for name, gradient in gradients(whole.optimizer).items()}
    set_gradients(resumed.optimizer, taken)
    expected = finish(whole)
    assert finish(resumed) == expected
    assert finish(without) != expected


def test_from_one_mode_to_another():
    none, full = Run("none", accumulate=4), Run("full", accumulate=4, transfer="copy")
    backward(none, 0, 2)
    set_gradients(full.optimizer, {name: gradient.clone() for name, gradient in gradients(none.optimizer).items()})
    assert finish(full) == finish(none)


@pytest.mark.parametrize("mode, options", WAYS)
def test_what_is_not_named_has_no_gradient(mode, options):
    """AdamW leaves a parameter without a gradient alone; zeros would let its moments decay."""
    run = Run(mode, accumulate=4, **options)
    backward(run, 0, 2)
    found, absent = all_gradients(run.optimizer)
    assert absent == ["spare"]
    assert not found["spare"].any()
    set_gradients(run.optimizer, {"first.bias": torch.ones(10)})
    assert {name: g.tolist() for name, g in gradients(run.optimizer).items()} == {"first.bias": [1.0] * 10}
    set_gradients(run.optimizer, {})
    assert gradients(run.optimizer) == {}


def test_offloading_optimizers_hold_their_own():
    assert isinstance(Run("full").optimizer, HoldsGradients)
    assert not isinstance(Run("none").optimizer, HoldsGradients)
