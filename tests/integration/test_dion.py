"""microsoft/dion's Muon in the place of ours: the same groups, state and checkpoints, nearly the same updates.

Skipped where dion cannot be imported. Its functions run as they are written: compiling them would take minutes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.offload import MODES, Run
from support.pool import run_on_ranks
from support.runs import checkpoint, differences, metrics, sft
from trainer.optim.muon import Muon

pytest.importorskip("dion", reason="microsoft/dion is not installed (uv sync --extra dion)")

SHAPES = {"square": (8, 8), "twin": (8, 8), "tall": (32, 12), "wide": (12, 32), "experts": (4, 6, 8), "one": (1, 8)}
ADAMW = {"embedding": (16, 8), "norm": (8,), "scalar": (1,)}
FUSED = {"qkv": (24, 4)}
STEPS = 4


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def values(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + sum(map(ord, name))))


def build(cls: type[Muon], place: Callable[[Tensor], Tensor] = lambda tensor: tensor, **options: Any) -> Any:
    parameters = {n: nn.Parameter(place(values(n, s, 0))) for n, s in (SHAPES | FUSED | ADAMW).items()}

    def group(name: str, names: dict, **entries: Any) -> dict[str, Any]:
        return {"name": name, "params": [parameters[n] for n in names], "param_names": list(names), **entries}

    groups = [
        group("muon", SHAPES),
        group("fused", FUSED, split_sizes=(12, 6, 6)),
        group("adamw", ADAMW, algorithm="adamw", lr=0.01),
    ]
    return parameters, cls(groups, lr=0.05, **({"weight_decay": 0.1, "compute_dtype": "float32"} | options))


def train(
    cls: type[Muon], place: Callable[[Tensor], Tensor] = lambda tensor: tensor, **options: Any
) -> dict[str, Tensor]:
    """Returns whole parameters and state after a few steps, in the second of which some have no gradient."""
    parameters, optimizer = build(cls, place, **options)
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            is_missing = step == 2 and name in ("twin", "norm", "experts")
            parameter.grad = None if is_missing else place(values(name, tuple(parameter.shape), step))
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 3
    found = {n: whole(p).detach() for n, p in parameters.items()}
    return found | {f"{n}.{k}": whole(t) for n, p in parameters.items() for k, t in optimizer.state[p].items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def dion_muon() -> type[Muon]:
    from trainer.optim.dion import DionMuon

    return DionMuon


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Returns the largest difference between two results, as a share of how far the parameter or state has come."""
    assert a.keys() == b.keys()
    start = {n: values(n, s, 0) for n, s in (SHAPES | FUSED | ADAMW).items()}
    return max(((a[n] - b[n]).norm() / (b[n] - start.get(n, torch.zeros_like(b[n]))).norm()).item() for n in a)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "adjust_lr": "none"},
        {"adjust_lr": "spectral_norm", "ns_steps": 6},
        {"ns_coefficients": "polar_express", "ns_steps": 7},
    ],
    ids=str,
)
def test_the_update_is_ours_up_to_bfloat16(options):
    """ "spectral_norm" is never below 1 for wide matrices, whichever of the two steps."""
    assert moved(train(dion_muon(), **options), train(Muon, **options)) < 0.02
    assert moved(train(dion_muon(), **options), train(Muon, **options | {"momentum": 0.5})) > 0.1


def test_its_own_polar_express_is_near_ours():
    options = {"ns_coefficients": "polar_express"}
    assert 1e-4 < moved(train(dion_muon(), **options), train(Muon, **options)) < 0.15


def sharded(shape: tuple[int, ...], **options: Any) -> dict[str, Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.compiler.set_stance("force_eager")

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])

    return train(dion_muon(), place, **options)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (2, 1)])
def test_shards_and_replicas(shape):
    """FSDP and HSDP, uneven and empty shards, gradients that are missing; every rank ends with the same bits."""
    expected = train(dion_muon())
    for result in (results := run_on_ranks(sharded, torch.Size(shape).numel(), shape)):
        assert moved(result, expected) < 0.01
        assert all(torch.equal(result[name], results[0][name]) for name in result)


def gradient_on_one_rank() -> dict[str, float]:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.compiler.set_stance("force_eager")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = dion_muon()(parameters, lr=0.1)
    gradient = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        parameters[0].grad = gradient
    optimizer.step()
    assert (parameters[0].grad is None) == (dist.get_rank() == 0)
    return {str(i): (p.full_tensor() - 1).abs().sum().item() for i, p in enumerate(parameters)}


def test_ranks_agree_on_missing_gradients():
    results = run_on_ranks(gradient_on_one_rank, 2)
    assert results[0] == results[1]
    assert results[0]["0"] > 0 == results[0]["1"]


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_offload_modes_have_the_same_bits(max_norm):
    from support.offload import dion

    copy = {"transfer": "copy", "chunk_bytes": 300}
    runs = {mode: Run(mode, dion, max_norm=max_norm, **({} if mode == "none" else copy)) for mode in MODES}
    ours = Run("none", "muon", max_norm=max_norm)
    for _ in range(3):
        for run in (*runs.values(), ours):
            run.train()
        bits = {mode: run.bits() for mode, run in runs.items()}
        assert bits["optimizer"] == bits["none"]
        assert bits["full"] == bits["none"]
    assert ours.bits() != bits["none"] and ours.bits()["leaves"] == bits["none"]["leaves"]


def flags(implementation: str, mode: str = "none") -> list[str]:
    return [
        *("--optim.type", "muon", "--optim.lr", "0.1", "--optim.adamw-lr", "0.02", "--val.interval", "0"),
        *("--ckpt.interval", "0", "--no-ckpt.export-weights", "--model.offload", mode, "--max-steps", "6"),
        *("--optim.implementation", implementation),
    ]


@pytest.mark.parametrize(("first", "then"), [("dion", "dion"), ("own", "dion"), ("dion", "own")])
def test_a_checkpoint_of_one_resumes_under_the_other(first, then, tmp_path):
    whole_run, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole_run, *flags(first))
    sft(run_dir, *flags(first), "--stop-step", "3")
    sft(run_dir, *flags(then, "full"), "--resume")
    expected, found = metrics(whole_run), metrics(run_dir)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert [row["lr"] for row in found] == [row["lr"] for row in expected]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=5e-3)
    same = differences(checkpoint(whole_run, 6), checkpoint(run_dir, 6)) == ""
    assert same == (first == then)
    lost = tmp_path / "lost"  # what a lost momentum and counter would look like
    sft(lost, *flags(then), "--resume.dir", str(checkpoint(run_dir, 3)), "--ckpt.skip-optimizer")
    assert metrics(lost)[-1]["loss"] != pytest.approx(expected[-1]["loss"], rel=2e-2)
