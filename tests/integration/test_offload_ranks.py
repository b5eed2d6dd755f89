"""Offload modes over sharded parameters: the same bits as without offload, and as one process where that is possible."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from support.offload import MODES, Run
from support.pool import run_on_ranks
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.train import CkptConfig, ResumeConfig
from trainer.optim.schedule import Schedule

COPY = {"transfer": "copy", "chunk_bytes": 300}
SCHEDULE = Schedule("linear", 20, warmup_steps=4)


def make(mode: str, optimizer: str, *, replicate: int = 0, sharded: bool = True, **kwargs: Any) -> Run:
    mesh = None
    if sharded:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        size = dist.get_world_size()
        shape = (replicate, size // replicate) if replicate else (size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options = {} if mode == "none" else COPY
    return Run(mode, optimizer, mesh=mesh, schedule=SCHEDULE, **options, **kwargs)


def manager(run: Run, folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, CkptConfig(), run.app, describe=lambda: {"config": {}})


def load(run: Run, folder: Path) -> Run:
    checkpoints = manager(run, folder)
    checkpoint = checkpoints.choose(ResumeConfig())
    assert checkpoint is not None
    checkpoints.load(checkpoint)
    return run


# --- on the ranks ---------------------------------------------------------------------------------------------------


def equal_bits(optimizer: str, dtype: torch.dtype, accumulate: int, replicate: int) -> list[float]:
    """Trains all modes side by side; returns the gradient norms."""
    kwargs = {"dtype": dtype, "accumulate": accumulate, "max_norm": 0.5, "replicate": replicate}
    runs = {mode: make(mode, optimizer, **kwargs) for mode in MODES}
    norms = []
    for step in range(4):
        found = {mode: run.train(skip=step == 2) for mode, run in runs.items()}
        assert found["optimizer"] == found["full"] == found["none"]
        norms += found["none"]
        bits = {mode: run.bits() for mode, run in runs.items()}
        assert bits["optimizer"] == bits["none"], f"step {step + 1}"
        assert bits["full"] == bits["none"], f"step {step + 1}"
    full = runs["full"].optimizer
    for name, parameter in runs["full"].model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(full.masters.masters[name], DTensor)
        assert parameter.dtype == dtype
        assert torch.equal(parameter.to_local(), full.masters.masters[name].to_local().to(dtype)), name
        assert parameter.grad is None
    plans = [
        [dict(chunk.members) for chunk in run.optimizer._chunks] for run in runs.values() if run is not runs["none"]
    ]
    import torch.distributed as dist

    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, plans)
    assert all(each == plans for each in everyones) and len(plans[0]) > 1
    return norms


def early_bits(optimizer: str, dtype: torch.dtype, replicate: int) -> None:
    """Updates that begin in the backward pass, beside FSDP's own reductions."""
    kwargs = {"dtype": dtype, "accumulate": 2, "replicate": replicate}
    early, reference = make("full", optimizer, early=True, **kwargs), make("none", optimizer, **kwargs)
    begun = []
    for step in range(4):
        early.backward()
        begun.append(early.optimizer._early.begun)
        early.clip(), early.optimizer.step(), early.optimizer.zero_grad()
        early.step += 1
        early.schedule.apply(early.step)
        reference.train()
        assert early.bits() == reference.bits(), f"step {step + 1}"
        for name, parameter in early.model.named_parameters():
            master = early.optimizer.masters.masters[name].to_local()
            assert torch.equal(parameter.to_local(), master.to(dtype)), name
    assert all(len(chunks) >= 2 for chunks in begun)


def save_all(folder: str) -> dict[str, dict]:
    found = {}
    for mode in MODES:
        run = make(mode, "adamw", accumulate=2, max_norm=0.5)
        run.train(3)
        manager(run, Path(folder) / mode).save(run.step)
        found[mode] = run.bits()
    return found


def continue_all(folder: str) -> None:
    for saved, resumed in itertools.product(MODES, MODES):
        reference = make(saved, "adamw", accumulate=2, max_norm=0.5)
        reference.train(3)
        run = load(make(resumed, "adamw", seed=9, accumulate=2, max_norm=0.5), Path(folder) / saved)
        assert run.bits() == reference.bits(), (saved, resumed)
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.007500000025] * 2
        assert run.train(2) == reference.train(2)
        assert run.bits() == reference.bits(), (saved, resumed)


def load_everywhere(folder: str) -> dict[str, dict]:
    return {mode: load(make(mode, "adamw", seed=9, accumulate=2, max_norm=0.5), Path(folder)).bits() for mode in MODES}


def save_layout(folder: str, optimizer: str, replicate: int) -> dict[str, tuple[dict, dict]]:
    """Saves at step 3 under every mode; returns what was saved, and what two more steps made of it."""
    found = {}
    for mode in MODES:
        run = make(mode, optimizer, replicate=replicate, accumulate=3, max_norm=0.5)
        run.train(3)
        manager(run, Path(folder) / mode).save(run.step)
        saved = run.bits()
        run.train(2)
        found[mode] = saved, numbers(run)
    return found


def load_layout(
    folder: str, optimizer: str, replicate: int, sharded: bool = True
) -> dict[str, tuple[dict, list, dict]]:
    """Resumes each mode's checkpoint under another mode; returns what was loaded, the groups' lr, and two steps more."""
    found = {}
    for saved, resumed in zip(MODES, MODES[1:] + MODES[:1], strict=True):
        run = make(resumed, optimizer, sharded=sharded, replicate=replicate, seed=9, accumulate=3, max_norm=0.5)
        load(run, Path(folder) / saved)
        bits, lrs = run.bits(), [group["lr"] for group in run.optimizer.param_groups]
        run.train(2)
        found[saved] = bits, lrs, numbers(run)
    return found


def numbers(run: Run) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, in float64; and its other leaves."""
    state = run.app.state_dict()
    state.pop("json")
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.detach().double() for name, tensor in whole.items()} | {"leaves": run.app.leaves()}


def load_whole_weights() -> None:
    """A weights-only load from tensors that every rank has whole."""
    source = Run("none", seed=3)
    weights = {name: parameter.detach().clone() for name, parameter in source.model.named_parameters()}
    run = make("full", "adamw", dtype=torch.bfloat16)
    run.optimizer.load_master_weights(weights)
    run.schedule.apply = lambda step: None  # type: ignore[method-assign]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.train()
    found = run.built.weights.state_dict()
    for name, parameter in run.model.named_parameters():
        assert torch.equal(found[name].full_tensor(), weights[name]), name
        assert torch.equal(parameter.full_tensor(), weights[name].bfloat16()), name


def allocation_fails_on_one_rank() -> str:
    import torch.distributed as dist

    from trainer.core import device as devices
    from trainer.errors import LaunchError, TrainerError

    plain = devices.host_buffer
    if dist.get_rank() == 1:

        def fail(size_bytes: int, device: torch.device) -> torch.Tensor:
            raise LaunchError("no memory here")

        devices.host_buffer = fail
    try:
        make("optimizer", "adamw")
    except TrainerError as error:
        return str(error)
    finally:
        devices.host_buffer = plain
    return "built"


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "muon", "group_step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_have_the_same_bits_in_all_modes(optimizer, dtype):
    """Shards are uneven (3 rows) and empty (1 row). Norms over host shards are reduced over the CPU's process group."""
    norms = run_on_ranks(equal_bits, 2, optimizer, dtype, 3, 0)
    assert norms[0] == norms[1]
    if dtype == torch.float32:
        reference = Run("none", optimizer, schedule=SCHEDULE, max_norm=0.5)
        alone = [reference.train(skip=step == 2)[0] for step in range(4)]
        assert norms[0] == pytest.approx(alone, rel=1e-6)


def test_replicas_have_the_same_bits_in_all_modes():
    """HSDP: two replicas of one shard each."""
    run_on_ranks(equal_bits, 2, "adamw", torch.float32, 1, 2)


@pytest.mark.parametrize("replicate", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_that_begin_in_the_backward_pass_have_the_same_bits(dtype, replicate):
    for optimizer in ("adamw", "momentum"):
        run_on_ranks(early_bits, 2, optimizer, dtype, replicate)


def test_checkpoints_of_two_ranks_resume_in_every_mode(tmp_path):
    found = run_on_ranks(save_all, 2, str(tmp_path))[0]
    assert found["optimizer"] == found["none"] and found["full"] == found["none"]
    run_on_ranks(continue_all, 2, str(tmp_path))
    for saved, resumed in itertools.product(MODES, MODES):  # and in one process, where the parameters are plain
        run = load(make(resumed, "adamw", sharded=False, seed=9, accumulate=2, max_norm=0.5), tmp_path / saved)
        assert run.bits() == found[saved], (saved, resumed)


@pytest.mark.parametrize(("replicate", "optimizer"), [(0, "muon"), (2, "adamw")], ids=["fsdp", "hsdp"])
def test_checkpoints_of_two_ranks_resume_on_other_layouts(tmp_path, replicate, optimizer):
    """FSDP and HSDP, from 2 ranks to 1, 2 and 4, each mode's checkpoint under the next mode. What is loaded is equal in
    every bit; so is what follows in the same layout. In others, lr, counters and groups are equal and the rest is as near
    as sums in another order are."""
    wanted = run_on_ranks(save_layout, 2, str(tmp_path), optimizer, replicate)[0]
    found = {(1, 0): load_layout(str(tmp_path), optimizer, 0, False)}
    for ranks, replicas in ((2, 0), (2, 2), (4, 0), (4, 2)):
        found[ranks, replicas] = run_on_ranks(load_layout, ranks, str(tmp_path), optimizer, replicas)[0]
    for layout, modes in found.items():
        for mode, (bits, lrs, after) in modes.items():
            saved, expected = wanted[mode]
            assert bits == saved, (layout, mode)
            assert lrs == [peak * SCHEDULE.factor(3) for peak in ({"adamw": 0.01, "muon": 0.02}[optimizer],) * 2]
            assert after.pop("leaves") == expected["leaves"], (layout, mode)
            bound = 0.0 if layout == (2, replicate) else 1e-5
            for name, tensor in after.items():
                assert (tensor - expected[name]).abs().max().item() <= bound, (layout, mode, name)


@pytest.mark.parametrize("saved", MODES)
def test_checkpoints_of_one_process_resume_on_two_ranks(tmp_path, saved):
    run = make(saved, "adamw", sharded=False, accumulate=2, max_norm=0.5)
    run.train(3)
    manager(run, tmp_path).save(run.step)
    found = run_on_ranks(load_everywhere, 2, str(tmp_path))[0]
    assert all(found[mode] == run.bits() for mode in MODES)


def test_whole_weights_are_cut_into_the_masters():
    run_on_ranks(load_whole_weights, 2)


def test_no_rank_goes_on_when_another_has_no_memory():
    texts = run_on_ranks(allocation_fails_on_one_rank, 2)
    assert texts[1] == "no memory here"
    assert "allocating host memory for model.offload = 'optimizer' failed on rank 1" in texts[0]
