"""The three modes give the same bits: weights, optimizer state, groups and gradient norms, step by step."""

import pytest
import torch
from torch import nn

from support.offload import FACTORIES, Run, momentum
from trainer.core.transfer import HostArena
from trainer.errors import CheckpointMismatch, TrainingError
from trainer.models.state import ModelState
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.native import SWITCH

WAYS = [
    pytest.param("optimizer", {}, id="optimizer"),
    pytest.param("optimizer", {"transfer": "copy", "chunk_bytes": 300}, id="optimizer-copy"),
    pytest.param("full", {}, id="full"),
    pytest.param("full", {"transfer": "copy", "chunk_bytes": 300}, id="full-copy"),
]


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", FACTORIES)
@pytest.mark.parametrize(("mode", "options"), WAYS)
def test_same_bits_as_without_offload(mode, options, optimizer, accumulate, max_norm):
    offloaded = Run(mode, optimizer, accumulate=accumulate, max_norm=max_norm, **options)
    reference = Run("none", optimizer, accumulate=accumulate, max_norm=max_norm)
    start = reference.bits()
    assert offloaded.bits() == start
    for step in range(4):
        skip = step == 2  # its gradients are thrown away, as after a non-finite norm
        assert offloaded.train(skip=skip) == reference.train(skip=skip)
        assert offloaded.bits() == reference.bits(), f"step {step + 1}"
        after = {name: value.detach().clone() for name, value in reference.model.named_parameters()}
        for name, value in offloaded.model.named_parameters():
            assert torch.equal(value, after[name]), name
    assert reference.bits() != start


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("transfer", ["auto", "copy"])
def test_bf16_weights_on_the_device_are_the_rounded_masters(transfer, accumulate):
    """Gradients arrive in bf16 and are summed in float32, as if float32 weights had been cast where they are used."""
    kwargs = {"dtype": torch.bfloat16, "accumulate": accumulate, "max_norm": 0.5}
    offloaded, reference = Run("full", transfer=transfer, chunk_bytes=300, **kwargs), Run("none", **kwargs)
    for _ in range(4):
        assert offloaded.train() == reference.train()
        assert offloaded.bits() == reference.bits()
        for name, parameter in offloaded.model.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, offloaded.optimizer.masters.masters[name].bfloat16())
    assert offloaded.model.seen.dtype == torch.float32


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("float32", [[], ["first.weight", "last.weight"]])
def test_weights_can_stay_float32(float32, transfer):
    kwargs = {"dtype": torch.bfloat16, "max_norm": 0.5}
    run, reference = Run("full", float32=float32, transfer=transfer, **kwargs), Run("none", **kwargs)
    run.train(3), reference.train(3)
    found = {name for name, p in run.model.named_parameters() if p.dtype == torch.float32}
    assert found == set(float32)
    assert run.bits() == reference.bits()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(nn.functional.linear(x.bfloat16(), self.a.weight.bfloat16()))
        return nn.functional.linear(x, self.b.weight.bfloat16()).float()


def test_a_tied_weights_gradient_is_summed_in_float32():
    def train(mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = Tied()
        groups = [{"name": "all", "params": [model.a.weight], "param_names": ["a.weight"]}]
        built = build_offload(mode, momentum, groups, model, ModelState(model), compute_dtype=torch.bfloat16)
        assert model.a.weight is model.b.weight
        for seed in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            built.optimizer.step()
            built.optimizer.zero_grad()
        return built.weights.state_dict()["a.weight"].detach()

    assert torch.equal(train("none"), train("full"))


# --- what is where --------------------------------------------------------------------------------------------------


def test_on_cpu_no_mode_copies_what_is_there_already():
    run = Run("full")
    for name, parameter in run.model.named_parameters():
        assert run.optimizer.masters.masters[name].data_ptr() == parameter.data_ptr()
    assert Run("optimizer").optimizer.device_bytes == 0


def test_state_lies_packed_in_memory_that_is_reported():
    run = Run("optimizer", "adamw")
    state = sorted((t.data_ptr(), t.numel() * 4) for s in run.optimizer.state.values() for t in s.values())
    assert all(start % HostArena.ALIGNMENT_BYTES == 0 for start, _ in state)
    assert all(start + size <= following for (start, size), (following, _) in zip(state, state[1:], strict=False))
    assert sum(size for _, size in state) <= run.built.host_bytes < 4 * sum(size for _, size in state) + 2**14
    assert Run("none").built.host_bytes == 0


def test_host_memory_does_not_grow_with_steps():
    for mode in ("optimizer", "full"):
        run = Run(mode, transfer="copy", accumulate=3, max_norm=0.5)
        before = run.built.host_bytes
        run.train(3)
        assert run.built.host_bytes == before


def test_device_gradients_are_gone_once_backward_is_over():
    run = Run("full", transfer="copy")
    run.backward()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert len(run.optimizer.gradients()) == 6


def test_clipping_is_seen_by_whoever_reads_gradients_through_the_optimizer():
    run, reference = Run("full", max_norm=0.5), Run("none", max_norm=0.5)
    run.backward(), reference.backward()
    run.clip(), reference.clip()
    wanted = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    found = run.optimizer.gradients()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    run.optimizer.step(), reference.optimizer.step()
    run.step = reference.step = 1
    assert run.bits() == reference.bits()


def test_a_skipped_steps_clipping_is_forgotten():
    run, reference = Run("full", max_norm=0.01), Run("none", max_norm=0.01)
    for either in (run, reference):
        either.backward()
        either.clip()
        either.optimizer.zero_grad()
        either.backward()
        either.optimizer.step()  # without clipping
        either.step = 1
    assert run.bits() == reference.bits()


def backward_again(run: Run) -> None:
    run.backward()
    run.optimizer.step()


def step_again(run: Run) -> None:
    run.optimizer.step()


def clip_again(run: Run) -> None:
    run.clip()
    run.optimizer.step()


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("more", [backward_again, step_again, clip_again])
def test_gradients_that_are_not_thrown_away_stay_clipped(more, native, monkeypatch):
    """The factor is applied as a step reads the gradients; what is added to them or done with them later must see it."""
    monkeypatch.setenv(SWITCH, native)
    run, reference = Run("full", max_norm=0.5), Run("none", max_norm=0.5)
    for either in (run, reference):
        either.backward()
        assert either.clip().item() > 0.5
        either.optimizer.step()
        more(either)
        either.step = 1
    assert run.bits() == reference.bits()


@pytest.mark.parametrize("transfer", ["direct", "copy"])
def test_a_gradient_that_comes_first_after_the_clipping_is_not_clipped(transfer):
    run, reference = Run("full", max_norm=0.01, transfer=transfer), Run("none", max_norm=0.01)
    for either in (run, reference):
        either.backward()
        either.clip()
        either.model.spare.sum().backward()  # it had none
    wanted = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    found = run.optimizer.gradients()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- weights from elsewhere -----------------------------------------------------------------------------------------


def test_weights_changed_behind_the_optimizers_back_are_an_error():
    run = Run("full", dtype=torch.bfloat16)
    run.train()
    with torch.no_grad():
        run.model.first.weight.copy_(run.model.first.weight.clone())  # the same values: fine
    run.train()
    with torch.no_grad():
        run.model.first.weight.mul_(2)
    with pytest.raises(TrainingError, match="'first.weight' were changed outside"):
        run.train()
    run.optimizer.zero_grad()
    run.optimizer.load_master_weights()
    run.train()


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_new_weights_must_fit(mode):
    run = Run(mode)
    before = run.bits()
    with pytest.raises(CheckpointMismatch, match="other: not a parameter"):
        run.optimizer.load_master_weights({"first.bias": torch.zeros(10), "other": torch.zeros(1)})
    with pytest.raises(CheckpointMismatch, match=r"first.bias: shape \[9\], here \[10\]"):
        run.optimizer.load_master_weights({"first.bias": torch.zeros(9)})
    assert run.bits() == before


def test_masters_in_the_model_are_exact_and_leave_no_trace():
    run = Run("full", dtype=torch.bfloat16)
    run.train(2)
    parameters = dict(run.model.named_parameters())
    with run.built.weights.in_model(run.model):
        for name, parameter in run.model.named_parameters():
            assert parameter is run.optimizer.masters.masters[name] and parameter.dtype == torch.float32
    assert all(parameter is parameters[name] for name, parameter in run.model.named_parameters())
