"""Offload on a GPU: page-locked memory, queues of their own, bounded device memory, and the same bits."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from support.offload import MODES, Run, adamw, groups_of, momentum, muon
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.train import CkptConfig, ResumeConfig
from trainer.models.state import ModelState
from trainer.optim.offload.base import OffloadOptimizer, named_parameters
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.state import CPUOffloadOptimizer

pytestmark = pytest.mark.gpu

MIB = 2**20


def run_of(mode: str, optimizer: str = "adamw", **kwargs: Any) -> Run:
    if mode != "none":
        kwargs = {"chunk_bytes": 300} | kwargs
    return Run(mode, optimizer, device="cuda", **kwargs)


class Wide(nn.Module):
    """16 matrices of 4 MiB in float32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.linear(x.to(self.dtype), layer.weight.to(self.dtype))
        return x.float()


def wide(mode: str, dtype: torch.dtype = torch.float32, factory: Any = adamw, **kwargs: Any) -> tuple[Wide, Any]:
    torch.manual_seed(0)
    model = Wide(dtype).cuda()
    return model, build_offload(
        mode,  # type: ignore[arg-type]
        factory,
        groups_of(model),
        model,
        ModelState(model),
        compute_dtype=dtype,
        **kwargs,
    )


def backward(model: Wide, seed: int = 0) -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(seed)).cuda()
    model(x).square().mean().backward()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_host_memory_is_page_locked(mode):
    run = run_of(mode)
    state = [tensor for entries in run.optimizer.state.values() for tensor in entries.values()]
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in state if tensor.numel())
    if mode == "full":
        assert all(master.is_pinned() for master in run.optimizer.masters.masters.values())
        run.backward()
        assert all(gradient.is_pinned() for gradient in run.optimizer.gradients().values())
    assert all(parameter.device.type == "cuda" for parameter in run.model.parameters())


def test_device_memory_grows_by_the_buffer_and_not_by_the_state():
    """64 MiB of weights have 128 MiB of state; six matrices' worth of it is on the device at a time."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    model, built = wide("optimizer", chunk_bytes=16 * MIB)
    assert isinstance(built.optimizer, OffloadOptimizer)
    assert torch.cuda.max_memory_allocated() - start < 64 * MIB + built.optimizer.device_bytes + 8 * MIB
    assert built.optimizer.device_bytes <= 3 * 16 * MIB + MIB
    for seed in range(3):
        backward(model, seed)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        built.optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 8 * MIB
        built.optimizer.zero_grad()


def test_full_holds_half_the_weights_and_few_gradients():
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    model, built = wide("full", torch.bfloat16)
    assert torch.cuda.memory_allocated() - start < 33 * MIB
    backward(model)
    built.optimizer.step()
    built.optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward(model, 1)
    built.optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 24 * MIB  # all 16 gradients would be 32
    assert torch.cuda.memory_allocated() - before < MIB


def test_copies_have_queues_of_their_own():
    run = run_of("optimizer")
    stream = run.optimizer._stream
    lanes = {stream._into._stream, stream._out_of._stream, torch.accelerator.current_stream()}
    assert len(lanes) == 3


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "sign_sgd", "muon", "group_step", "lazy"])
def test_state_on_the_host_has_the_same_bits(optimizer, max_norm):
    run = run_of("optimizer", optimizer, accumulate=3, max_norm=max_norm)
    reference = run_of("none", optimizer, accumulate=3, max_norm=max_norm)
    for step in range(4):
        assert run.train(skip=step == 2) == reference.train(skip=step == 2)
        assert run.bits() == reference.bits(), f"step {step + 1}"


@pytest.mark.parametrize("factory", [adamw, muon], ids=["adamw", "muon"])
def test_state_on_the_host_has_the_same_bits_at_size(factory):
    """Chunks that are large enough for copies and steps to overlap."""
    (model, built), (reference, plain) = (
        wide("optimizer", factory=factory, chunk_bytes=9 * MIB),
        wide("none", factory=factory),
    )
    for seed in range(20):
        backward(model, seed), backward(reference, seed)
        built.optimizer.step(), plain.optimizer.step()
        built.optimizer.zero_grad(), plain.optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    states = [{n: o.state[p] for n, p in named_parameters(o).items()} for o in (built.optimizer, plain.optimizer)]
    for name, entries in states[1].items():
        for key, tensor in entries.items():
            assert torch.equal(states[0][name][key], tensor.cpu()), (name, key)


def test_state_is_complete_right_after_a_step():
    model, built = wide("optimizer", chunk_bytes=9 * MIB)
    for seed in range(20):
        backward(model, seed)
        built.optimizer.step()
        found = {
            n: {k: t.clone() for k, t in built.optimizer.state[p].items()}
            for n, p in named_parameters(built.optimizer).items()
        }
        torch.cuda.synchronize()
        for name, parameter in named_parameters(built.optimizer).items():
            for key, tensor in built.optimizer.state[parameter].items():
                assert torch.equal(found[name][key], tensor), (seed, name, key)
        built.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_sums_the_gradients_that_the_device_made(dtype):
    (model, built), (reference, _) = wide("full", dtype), wide("none", dtype)
    for seed in range(3):  # three micro-steps
        backward(model, seed), backward(reference, seed)
    found = built.optimizer.gradients()
    for name, parameter in reference.named_parameters():
        assert torch.equal(found[name], parameter.grad.cpu()), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factory", [adamw, muon], ids=["adamw", "muon"])
def test_full_weights_follow_the_masters(factory, dtype):
    (model, built), (reference, plain) = wide("full", dtype, factory, chunk_bytes=9 * MIB), wide("none", dtype, factory)
    for seed in range(10):
        backward(model, seed), backward(reference, seed)
        norms = built.optimizer.clip_gradients(0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-2 if seed else 1e-6)
        built.optimizer.step(), plain.optimizer.step()
        built.optimizer.zero_grad(), plain.optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            master = built.optimizer.masters.masters[name]
            assert parameter.dtype == dtype and torch.equal(parameter.cpu(), master.to(dtype)), (seed, name)
    for (name, master), other in zip(built.weights.state_dict().items(), reference.parameters(), strict=True):
        assert torch.allclose(master, other.cpu(), atol=2e-2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factory", [adamw, momentum], ids=["adamw", "momentum"])
def test_an_update_in_the_backward_pass_has_the_same_bits(factory, dtype):
    (model, built), (reference, plain) = (wide("full", dtype, factory, chunk_bytes=9 * MIB) for _ in range(2))
    for seed in range(10):
        assert built.optimizer.begin_update()
        backward(model, seed), backward(reference, seed)
        assert len(built.optimizer._early.begun) == len(built.optimizer._chunks) > 4
        norms = built.optimizer.clip_gradients(None), plain.optimizer.clip_gradients(None)
        assert torch.equal(*norms)
        built.optimizer.step(), plain.optimizer.step()
        built.optimizer.zero_grad(), plain.optimizer.zero_grad()
        for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(weight, other), (seed, name)
            assert torch.equal(built.weights.state_dict()[name], plain.weights.state_dict()[name]), (seed, name)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", MODES)
@pytest.mark.parametrize("resumed", MODES)
def test_checkpoints_move_between_modes(tmp_path, saved, resumed):
    first = run_of(saved, "momentum")
    first.train(3)
    CheckpointManager(tmp_path, CkptConfig(), first.app, describe=lambda: {"config": {}}).save(3)
    run = run_of(resumed, "momentum", seed=9)
    checkpoints = CheckpointManager(tmp_path, CkptConfig(), run.app, describe=lambda: {"config": {}})
    checkpoint = checkpoints.choose(ResumeConfig())
    assert checkpoint is not None
    checkpoints.load(checkpoint)
    assert run.bits() == first.bits()
    device = "cuda" if resumed == "none" else "cpu"
    assert all(t.device.type == device for state in run.optimizer.state.values() for t in state.values())
    weights = copy.deepcopy({name: p.detach().cpu() for name, p in run.model.named_parameters()})
    for name, parameter in first.model.named_parameters():
        assert torch.equal(weights[name], parameter.cpu()), name


def test_wrapping_an_optimizer_frees_its_device_memory():
    parameters = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(8)]
    inner = adamw([{"name": "all", "params": parameters, "param_names": [str(i) for i in range(8)]}])
    before = torch.cuda.memory_allocated()
    optimizer = CPUOffloadOptimizer(inner, chunk_bytes=9 * MIB)
    assert torch.cuda.memory_allocated() - before == pytest.approx(optimizer.device_bytes - 64 * MIB, abs=MIB)
