"""Muon over gloo ranks: sharded matrices are orthogonalised whole, once, and every world gives the same update."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support.pool import run_on_ranks
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
FUSED = {"qkv": (24, 4)}  # the fused matrices have different learning rates, and shards end inside of them
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
        group("fused", FUSED, split_sizes=(13, 8, 3), adjust_lr="spectral_norm"),
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
    ("mesh_shape", "dim"),
    [((2,), 0), ((4,), 0), ((2, 2), 0), ((2,), 1), ((4,), 1), ((2, 2), 1), ((2, 1), 0), ((4, 1), 0)],
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
    assert largest_difference(run_on_ranks(run_with, 2, options)[0], expected) < 1e-6


def run_with(options: dict) -> dict[str, Tensor]:
    return sharded_run((dist.get_world_size(),), 0, **options)


def test_the_same_world_gives_the_same_bits():
    first, again = (run_on_ranks(run_with, 4, {"compute_dtype": "bfloat16"}) for _ in range(2))
    assert largest_difference(first[0], again[0]) == 0.0
    assert largest_difference(first[0], train(None, compute_dtype="bfloat16")) < 0.05


def count_matrices(mesh_shape: tuple[int, ...]) -> tuple[int, float]:
    """Returns how many matrices this rank orthogonalised in a step, and their cost."""
    counted, cost, real = 0, 0, newton_schulz.orthogonalize

    def counting(matrices: Tensor, *args) -> Tensor:
        nonlocal counted, cost
        counted += len(matrices)
        cost += len(matrices) * newton_schulz.multiplications(tuple(matrices.shape[1:]), 5)
        return real(matrices, *args)

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    shapes = [(16, 16)] * 9 + [(32, 16)] * 6 + [(16, 48)] * 3
    parameters = [nn.Parameter(place(torch.randn(shape), mesh)) for shape in shapes]
    optimizer = Muon(parameters, compute_dtype="float32")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    muon.orthogonalize = counting
    try:
        optimizer.step()
    finally:
        muon.orthogonalize = real
    return counted, cost


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_each_matrix_is_orthogonalised_once_and_the_work_is_balanced(mesh_shape):
    counts, costs = zip(*run_on_ranks(count_matrices, 4, mesh_shape), strict=True)
    assert sum(counts) == 18
    assert max(costs) < 1.2 * sum(costs) / 4


def missing_gradients() -> dict[str, tuple[float, float]]:
    """A gradient on one rank only, one on no rank; returns how far parameter and momentum moved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    parameters = {name: nn.Parameter(place(torch.ones(8, 8), mesh)) for name in ("all", "rank1", "none", "aux")}
    muons = [parameters[name] for name in ("all", "rank1", "none")]
    optimizer = Muon(
        [{"params": muons}, {"params": [parameters["aux"]], "algorithm": "adamw"}],
        lr=0.1,
        weight_decay=0.5,
        compute_dtype="float32",
    )
    full = values("g", (8, 8), 1)
    parameters["all"].grad = place(full, mesh)
    on_one = place(full, mesh), place(full, mesh)
    if rank == 1:
        parameters["rank1"].grad, parameters["aux"].grad = on_one
    optimizer.step()
    moved = {name: (whole(p) - 1).abs().sum().item() for name, p in parameters.items()}
    return {
        n: (moved[n], sum(whole(m).abs().sum().item() for m in optimizer.state[parameters[n]].values())) for n in moved
    }


def test_ranks_agree_on_missing_gradients():
    """Where one rank has a gradient the others take zeros; where none has, nothing moves; nobody waits for ever."""
    results = run_on_ranks(missing_gradients, 2)
    assert results[0] == results[1]
    moved = results[0]
    assert moved["none"] == (0.0, 0.0)
    assert all(min(moved[name]) > 0 for name in ("all", "rank1", "aux"))
    gradient = values("g", (8, 8), 1)
    gradient[:4] = 0  # rank 0's rows
    expected, momentum = muon_reference(torch.ones(8, 8), gradient, torch.zeros(8, 8), lr=0.1, weight_decay=0.5)
    assert moved["rank1"][0] == pytest.approx((expected - 1).abs().sum().item(), rel=1e-5)
    assert moved["rank1"][1] == pytest.approx(momentum.abs().sum().item(), rel=1e-5)


def decayed() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    parameters = [nn.Parameter(place(torch.ones(shape), mesh)) for shape in ((5, 8), (3, 4, 8))]
    optimizer = Muon(parameters, lr=1e-2, weight_decay=10)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [value for p in parameters for value in whole(p).flatten().tolist()]


def test_decay_is_visible_with_zero_gradients():
    """G6: w *= 1 - lr wd."""
    for result in run_on_ranks(decayed, 2):
        assert torch.equal(torch.tensor(result), torch.full((len(result),), 1 - 1e-2 * 10))


def step_on_rank_0() -> int:
    parameter = nn.Parameter(torch.ones(8, 8))
    optimizer = Muon([parameter])
    parameter.grad = torch.ones(8, 8)
    if dist.get_rank() == 0:
        optimizer.step()
    dist.barrier()
    return optimizer.param_groups[0]["step"]


def test_plain_tensors_need_no_other_rank():
    assert run_on_ranks(step_on_rank_0, 2) == [1, 0]


def refuse() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parameter = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
    try:
        Muon([nn.Parameter(parameter)])
    except TrainingError as error:
        return str(error)
    return ""


def test_a_matrix_cut_over_two_mesh_dimensions_is_refused():
    for message in run_on_ranks(refuse, 4):
        assert "[8, 8]" in message and "adamw" in message


class Small(nn.Module):
    """G4's model: the optimizer's halves are told apart by what a parameter is, not by its name or rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.odd = nn.Linear(8, 5, bias=False)
        self.back = nn.Linear(5, 8, bias=False)
        self.output = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.back(self.odd(self.hidden(self.wte(ids)).tanh())))

    def optimizer(self, **options) -> Muon:
        named = dict(self.named_parameters())
        matrices = ["hidden.weight", "odd.weight", "back.weight"]
        rest = [name for name in named if name not in matrices]
        groups = [
            {"name": "muon", "params": [named[n] for n in matrices], "param_names": matrices},
            {
                "name": "adamw",
                "params": [named[n] for n in rest],
                "param_names": rest,
                "algorithm": "adamw",
                "lr": 0.01,
            },
        ]
        return Muon(groups, lr=0.02, weight_decay=0.1, **({"compute_dtype": "float32"} | options))


def train_fsdp(
    mesh_shape: tuple[int, ...], steps: range, load: str | None = None, save: str | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Steps `steps` of one run; every rank has the same batch, so that worlds differ in nothing but rounding."""
    model = Small()
    if mesh_shape:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = model.optimizer()
    owner = OptimizerState(optimizer)
    if load:
        state = owner.state_dict()
        flat = tensors(model, state)
        dcp.load(flat, checkpoint_id=load, no_dist=not mesh_shape)
        groups = json.loads((Path(load) / "groups.json").read_text())
        owner.load_state_dict({"state": state["state"], "groups": groups})
    for step in steps:
        ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), (ids.flatten() + 1) % 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    if save:
        state = owner.state_dict()
        dcp.save(tensors(model, state), checkpoint_id=save, no_dist=not mesh_shape)
        if not mesh_shape or dist.get_rank() == 0:
            (Path(save) / "groups.json").write_text(json.dumps(state["groups"]))
    return {n: whole(p).detach() for n, p in model.named_parameters()}, [g["step"] for g in optimizer.param_groups]


def tensors(model: nn.Module, state: dict) -> dict[str, Tensor]:
    moments = {f"optimizer.{n}.{key}": t for n, entries in state["state"].items() for key, t in entries.items()}
    return moments | {f"model.{n}": p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)])
def test_fsdp_trains_like_one_process(mesh_shape):
    expected, _ = train_fsdp((), range(4))
    for result, counters in run_on_ranks(train_fsdp, torch.Size(mesh_shape).numel(), mesh_shape, range(4)):
        assert largest_difference(result, expected) < 1e-6
        assert counters == [4, 4]


@pytest.mark.parametrize("mesh_shape", [(2,), (), (4,), (2, 2)])
def test_a_checkpoint_of_two_ranks_goes_on_in_another_world(mesh_shape, tmp_path):
    """State lies like the parameters, so it is saved and cut anew like them; at 2 ranks the rest is the same bits."""
    path = str(tmp_path / "step")
    straight, _ = run_on_ranks(train_fsdp, 2, (2,), range(5))[0]
    run_on_ranks(train_fsdp, 2, (2,), range(3), None, path)
    if mesh_shape:
        ranks = torch.Size(mesh_shape).numel()
        resumed, counters = run_on_ranks(train_fsdp, ranks, mesh_shape, range(3, 5), path)[0]
    else:
        resumed, counters = train_fsdp((), range(3, 5), path)
    assert counters == [5, 5]
    assert largest_difference(resumed, straight) <= (0.0 if mesh_shape == (2,) else 1e-6)


def test_owners_are_balanced_and_ties_go_to_the_lowest():
    loads = [0.0, 0.0, 0.0]
    assert assign_owners([1, 5, 2, 2, 4], loads) == [1, 0, 2, 2, 1]
    assert loads == [5, 5, 4]
    assert assign_owners([3, 3], loads) == [2, 0]  # the earlier loads count
    assert loads == [8, 5, 7]


def piece_sizes(length: int) -> tuple[list[int], int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    tensor = distribute_tensor(torch.zeros(length, 4), mesh, [Shard(0)])
    layout = layout_of(tensor)
    assert layout is not None
    return layout.piece_sizes(length), len(tensor.to_local())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 7, 9, 16])
def test_piece_sizes_are_dtensors(length):
    results = run_on_ranks(piece_sizes, 4, length)
    assert [local for _, local in results] == results[0][0]
