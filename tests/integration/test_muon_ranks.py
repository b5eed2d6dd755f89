"""Muon over gloo ranks: sharded matrices are orthogonalised whole, once, and every world gives the same update."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.pool import run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.errors import TrainingError
from trainer.optim import muon, newton_schulz
from trainer.optim.exchange import assign_owners, layout_of
from trainer.optim.muon import Muon
from trainer.optim.muon_reference import muon_reference
from trainer.optim.state import OptimizerState

# Over 4 ranks these are cut into even pieces, uneven ones (5, 7, 10 rows), and pieces of which some are empty (3 rows).
SHAPES = {
    "square": (8, 8),
    "twin": (8, 8),
    "tall": (32, 12),
    "wide": (12, 32),
    "rows5": (5, 16),
    "rows3": (3, 8),
    "rows7": (7, 24),
    "rows10": (10, 4),
    "experts": (6, 4, 8),
    "one": (1, 8),
}
ADAMW = {"embedding": (16, 8), "norm": (8,), "scalar": (1,)}
FUSED = {"qkv": (16, 8)}
STEPS = 3


def values(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    seed = step * 1000 + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def place(tensor: Tensor, mesh: DeviceMesh | None, dim: int = 0) -> Tensor:
    if mesh is None:
        return tensor
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(min(dim, tensor.ndim - 1))]
    return distribute_tensor(tensor, mesh, placements)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(mesh: DeviceMesh | None, dim: int = 0, **options) -> tuple[dict[str, nn.Parameter], Muon]:
    parameters = {
        name: nn.Parameter(place(values(name, shape, 0), mesh, dim)) for name, shape in (SHAPES | FUSED | ADAMW).items()
    }

    def group(name: str, names: dict, **entries) -> dict:
        return {"name": name, "params": [parameters[n] for n in names], "param_names": list(names), **entries}

    groups = [
        group("muon", SHAPES),
        group("fused", FUSED, split_sizes=(8, 5, 3), adjust_lr="spectral_norm"),
        group("adamw", ADAMW, algorithm="adamw", lr=0.01),
    ]
    options = {"compute_dtype": "float32", "weight_decay": 0.1} | options
    return parameters, Muon(groups, lr=0.05, **options)


def train(mesh: DeviceMesh | None, dim: int = 0, **options) -> dict[str, Tensor]:
    """Returns the whole parameters and momenta after a few steps."""
    parameters, optimizer = build(mesh, dim, **options)
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = place(values(name, tuple(parameter.shape), step), mesh, dim)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 3
    momenta = {n: optimizer.state[parameters[n]]["momentum_buffer"] for n in SHAPES}
    for name, momentum in momenta.items():
        assert getattr(momentum, "placements", None) == getattr(parameters[name], "placements", None)
    return {n: whole(p).detach() for n, p in parameters.items()} | {f"{n}.m": whole(m) for n, m in momenta.items()}


def sharded_run(mesh_shape: tuple[int, ...], dim: int = 0, **options) -> dict[str, Tensor]:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    return train(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names), dim, **options)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize(
    ("mesh_shape", "dim"), [((2,), 0), ((4,), 0), ((2, 2), 0), ((2,), 1), ((4,), 1), ((2, 2), 1), ((2, 1), 0), ((4, 1), 0)]
)
def test_world_size_does_not_change_the_update(mesh_shape, dim):
    """G4 and HSDP; shards of rows and of columns, uneven and empty ones."""
    ranks = torch.Size(mesh_shape).numel()
    expected = train(None)
    results = run_on_ranks(sharded_run, ranks, mesh_shape, dim)
    for result in results:
        assert largest_difference(result, expected) < 1e-6
        assert largest_difference(result, results[0]) == 0.0


@pytest.mark.parametrize("options", [{"nesterov": False}, {"ns_coefficients": "polar_express", "adjust_lr": "none"}])
def test_options_reach_sharded_matrices(options):
    expected = train(None, **options)
    assert largest_difference(expected, train(None)) > 1e-3
    assert largest_difference(run_on_ranks(sharded_run, 2, (2,), 0, **{})[0], train(None)) < 1e-6
    assert largest_difference(run_on_ranks(run_with, 2, options)[0], expected) < 1e-6


def run_with(options: dict) -> dict[str, Tensor]:
    return sharded_run((dist.get_world_size(),), 0, **options)


def test_the_same_world_gives_the_same_bits():
    first, again = (run_on_ranks(run_with, 4, {"compute_dtype": "bfloat16"}) for _ in range(2))
    assert largest_difference(first[0], again[0]) == 0.0
    assert largest_difference(first[0], train(None, compute_dtype="bfloat16")) < 0.05
