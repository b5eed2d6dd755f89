"""Checkpoints of several ranks: any world size and mesh reads what another wrote, and ranks fail or agree together."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from support.checkpoints import Run, Table, fails_at, flip_bit, steps_of, whole
from support.pool import run_on_ranks


def _mesh(shape: tuple[int, ...]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _run(run_dir: Path, resume: dict | None, steps: int, mesh: tuple[int, ...] | None, seed: int = 0, **ckpt):
    """A sharded run on this rank: resumed, trained, saved. Returns its whole state."""
    run = Run(run_dir, mesh=None if mesh is None else _mesh(mesh), seed=seed, **ckpt)
    if resume is not None:
        run.resume(**resume)
    run.train(steps)
    run.save()
    return whole(run.app.state_dict())


def run_at(
    world_size: int, run_dir: Path, *, resume=None, steps: int = 0, mesh=None, seed: int = 0
) -> dict[str, bytes]:
    """`_run` at a world size: plain tensors in this process, FSDP2 on ranks."""
    if world_size == 1:
        return _run(run_dir, resume, steps, None, seed)
    states = run_on_ranks(_run, world_size, run_dir, resume, steps, mesh or (world_size,), seed)
    assert all(state == states[0] for state in states)
    return states[0]


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 4, 2), (4, 1)])
def test_state_is_bit_equal_at_every_world_size(tmp_path, worlds):
    first, *others = worlds
    state = run_at(first, tmp_path / "0", steps=3)
    for number, world in enumerate(others):
        fork = {"dir": str(tmp_path / str(number))}
        assert run_at(world, tmp_path / str(number + 1), resume=fork, seed=7) == state


def test_what_two_ranks_wrote_is_identical_by_value_to_what_one_wrote(tmp_path, capsys):
    from trainer.cli.ckpt import main

    run_at(1, tmp_path / "a", steps=3)
    run_at(2, tmp_path / "b", resume={"dir": str(tmp_path / "a")})
    assert len(list((tmp_path / "b/checkpoints/step_00000003").glob("rank_*"))) == 2
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.endswith("identical\n")


@pytest.mark.parametrize("world", [2, 4])
def test_a_stopped_and_resumed_sharded_run_is_the_one_that_never_stopped(tmp_path, world):
    """4 ranks share 10 rows as 3, 3, 3, 1 and 3 rows as 1, 1, 1, 0."""
    expected = run_at(world, tmp_path / "whole", steps=5)
    run_at(world, tmp_path / "parts", steps=2)
    assert run_at(world, tmp_path / "parts", resume={}, steps=3, seed=7) == expected


def test_replicas_are_written_once(tmp_path):
    from trainer.checkpoint.layout import read_layout

    state = run_at(4, tmp_path / "hsdp", steps=2, mesh=(2, 2))
    directory = tmp_path / "hsdp/checkpoints/step_00000002"
    layout = read_layout(directory)
    for name, tensor in layout.items():
        assert sum(chunk.size_bytes for chunk in tensor.chunks) == tensor.size_bytes, name
    assert len(layout["model.0.weight"].chunks) == 2
    written = {chunk.file for tensor in layout.values() for chunk in tensor.chunks}
    assert len(written) > 2  # the replicas share the work
    assert run_at(1, tmp_path / "plain", resume={"dir": str(directory)}) == state
    assert run_at(4, tmp_path / "again", resume={"dir": str(directory)}, mesh=(4,)) == state


def _columns(directory: Path, write: bool):
    """Tensors sharded by columns, by rows and by both, some unevenly or with nothing on a rank."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from trainer.checkpoint.layout import read_layout
    from trainer.checkpoint.storage import load_tensors, save_tensors

    mesh = _mesh((2, 2))
    torch.manual_seed(0)
    placements = {
        "o.columns": ((6, 5), torch.float32, (Replicate(), Shard(1))),
        "o.both": ((7, 6), torch.bfloat16, (Shard(0), Shard(1))),
        "o.twice": ((9, 2), torch.int64, (Shard(0), Shard(0))),
        "o.few": ((1, 4), torch.uint8, (Shard(0), Replicate())),
        "o.empty": ((0, 4), torch.float32, (Shard(0), Replicate())),
        "o.deep": ((3, 4, 5), torch.float32, (Shard(1), Shard(2))),
    }
    full = {name: (torch.randn(shape) * 50).abs().to(dtype) for name, (shape, dtype, _) in placements.items()}
    if write:
        state = {name: distribute_tensor(tensor, mesh, placements[name][2]) for name, tensor in full.items()}
        save_tensors(directory, state)
        torch.distributed.barrier()
    layout = read_layout(directory)
    # read back plain, and under other placements than written
    plain = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    load_tensors(directory, layout, plain)
    other = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, (Shard(tensor.dim() - 1), Shard(0)))
        for name, tensor in full.items()
    }
    load_tensors(directory, layout, other)
    assert all(isinstance(tensor, DTensor) for tensor in other.values())
    expected = whole(full)
    return whole(plain) == expected, whole(other) == expected


def test_any_placement_reads_any_other(tmp_path):
    assert run_on_ranks(_columns, 4, tmp_path, True) == [(True, True)] * 4
    shards = sorted(path.name for path in tmp_path.glob("rank_*"))
    assert shards == [f"rank_{rank:05d}.safetensors" for rank in range(4)]


# -- agreement ---------------------------------------------------------------------------------------------------------


def _choose_blind(run_dir: Path, hidden: str):
    """Rank 1's view of the file system lags behind: it does not see the newest checkpoint."""
    import torch.distributed as dist

    from trainer.config.train import ResumeConfig

    real_scandir, real_exists = os.scandir, Path.exists
    if dist.get_rank() == 1:
        os.scandir = lambda path=".": iter([e for e in real_scandir(path) if e.name != hidden])
        Path.exists = lambda self, **kw: hidden not in str(self) and real_exists(self, **kw)
    try:
        run = Run(run_dir, mesh=_mesh((2,)))
        checkpoint = run.manager.choose(ResumeConfig())
        run.manager.load(checkpoint)
        return checkpoint.path.name, whole(run.app.state_dict())
    finally:
        os.scandir, Path.exists = real_scandir, real_exists


def test_e12_rank_0_decides_what_is_resumed(tmp_path):
    run_at(2, tmp_path, steps=2)
    newest = run_at(2, tmp_path, resume={}, steps=2)
    assert steps_of(tmp_path) == [2, 4]
    answers = run_on_ranks(_choose_blind, 2, tmp_path, "step_00000004", timeout=60)
    assert answers == [("step_00000004", newest)] * 2


def test_e12_where_there_is_nothing_all_ranks_say_so(tmp_path):
    answers = run_on_ranks(_resume, 2, tmp_path, {}, timeout=60)
    assert answers[0] == answers[1] and answers[0].startswith("CheckpointError: no checkpoint to resume from")
    assert run_on_ranks(_resume, 2, tmp_path, {"if_exists": True}, timeout=60) == [None, None]


def _resume(run_dir: Path, resume: dict):
    from trainer.errors import TrainerError

    run = Run(run_dir, mesh=_mesh((2,)))
    try:
        return run.resume(**resume)
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00001.safetensors", "metadata.json"])
def test_damage_in_any_file_is_found_by_all_ranks(tmp_path, file):
    run_at(2, tmp_path, steps=2)
    run_at(2, tmp_path, resume={}, steps=2)
    newest = tmp_path / "checkpoints/step_00000004"
    flip_bit(newest / file, (newest / file).stat().st_size - 3)
    for answer in run_on_ranks(_resume, 2, tmp_path, {"step": 4}):
        assert answer.startswith("CorruptCheckpoint") and file in answer
    assert run_on_ranks(_resume, 2, tmp_path, {}) == [2, 2]


def _failing_save(run_dir: Path, failing_rank: int, k: int):
    import torch.distributed as dist

    from trainer.core.files import file_hook
    from trainer.errors import TrainerError

    run = Run(run_dir, mesh=_mesh((2,)))
    run.resume()
    run.train()
    mine = dist.get_rank() == failing_rank
    try:
        with file_hook(fails_at(k if mine else -2, OSError(28, "No space left on device"))):
            run.save()
        return "saved"
    except TrainerError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("rank", "k"), [(1, 0), (1, 2), (0, 5), (0, 12)])
def test_a_failure_on_any_rank_fails_all_and_commits_nothing(tmp_path, rank, k):
    run_at(2, tmp_path, steps=2)
    answers = run_on_ranks(_failing_save, 2, tmp_path, rank, k)
    assert all(answer.startswith("CheckpointError") and "No space left on device" in answer for answer in answers)
    if k < 12:
        assert all(f"rank {rank}" in answer for answer in answers)
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000002"]
    assert run_on_ranks(_failing_save, 2, tmp_path, rank, 10**6) == ["saved"] * 2
    assert steps_of(tmp_path) == [2, 3]


def _differing_save(run_dir: Path, kind: str):
    import torch
    import torch.distributed as dist

    from trainer.errors import TrainerError

    run = Run(run_dir, mesh=_mesh((2,)))
    rank = dist.get_rank()
    if kind == "leaf":
        run.app.owners["data"] = Table(cursor={"row": 10 + rank})
    elif kind == "shape":
        run.app.owners["data"] = Table(seen=torch.zeros(2 + rank))
    else:
        run.app.owners["data"] = Table(**({"a": 1, "b": 2} if rank else {"b": 2, "a": 1}))
    try:
        run.save()
    except TrainerError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("leaf", "first at data.cursor.row: rank 0 10, rank 1 11"),
        ("shape", "first at data.seen: ((2,), 'F32'), there ((3,), 'F32')"),
        ("order", "different orders"),
    ],
)
def test_state_that_differs_between_ranks_is_not_lost_in_silence(tmp_path, kind, text):
    for answer in run_on_ranks(_differing_save, 2, tmp_path, kind):
        assert text in answer
    assert steps_of(tmp_path) == []


def _killed_save(run_dir: Path, ranks: tuple[int, ...], k: int):
    import torch.distributed as dist

    from trainer.core.files import file_hook

    run = Run(run_dir, mesh=_mesh((2,)))
    run.resume()
    run.train()
    count = -1

    def kill(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == k:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() in ranks:
        with file_hook(kill):
            run.save()
    else:
        run.save()


@pytest.mark.parametrize(("ranks", "k"), [((1,), 2), ((0,), 6), ((0, 1), 3)])
def test_ranks_killed_in_the_middle_of_a_save_lose_nothing(tmp_path, ranks, k):
    expected = run_at(2, tmp_path / "whole", steps=4)
    run_at(2, tmp_path / "run", steps=2)
    with pytest.raises(RuntimeError, match="the process died") as failure:
        run_on_ranks(_killed_save, 2, tmp_path / "run", ranks, k)
    if len(ranks) == 1:  # the other one knows why
        assert "CheckpointError" in str(failure.value) and "lost each other" in str(failure.value)
    left = [name for name in os.listdir(tmp_path / "run/checkpoints") if name != "step_00000002"]
    assert [".tmp-" in name for name in left] == ([True] if 0 in ranks else [])  # a rank 0 that lives clears up
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert run_at(2, tmp_path / "run", resume={}, steps=2) == expected
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["step_00000002", "step_00000004"]
    assert run_at(1, tmp_path / "copy", resume={})  # one process cleans up after two
    assert os.listdir(tmp_path / "copy/checkpoints") == ["step_00000002"]


# -- in the background -------------------------------------------------------------------------------------------------


def _background(run_dir: Path, failing_rank: int | None):
    """Trains with collectives of its own while a save is written, and polls at each step, as the loop does."""
    import torch
    import torch.distributed as dist

    from trainer.core.files import file_hook
    from trainer.errors import CheckpointError

    run = Run(run_dir, mesh=_mesh((2,)), **{"async": True})
    mine = dist.get_rank() == failing_rank
    states, outcome = {}, None
    with file_hook(fails_at(2 if mine else -2, OSError(28, "No space left on device"))):
        try:
            with run.manager:
                for _ in range(4):
                    run.train()
                    states[run.step] = whole(run.app.state_dict())
                    run.manager.poll()
                    run.save()
                    for _ in range(20):  # these meet the writer's collectives in any order
                        dist.all_reduce(torch.ones(3))
        except CheckpointError as error:
            outcome = str(error)
    return states, outcome


def test_a_save_in_the_background_on_two_ranks(tmp_path):
    (states, outcome), other = run_on_ranks(_background, 2, tmp_path, None)
    assert (states, outcome) == other and outcome is None
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    for step in (1, 4):
        reader = Run(tmp_path / "reader", seed=7)
        reader.resume(dir=str(tmp_path / f"checkpoints/step_{step:08d}"))
        assert whole(reader.app.state_dict()) == states[step]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_the_background_ends_all_ranks_at_the_same_step(tmp_path, rank):
    (states, outcome), (other_states, other_outcome) = run_on_ranks(_background, 2, tmp_path, rank)
    assert outcome is not None and "save of step 1 in the background failed" in outcome and "No space left" in outcome
    assert other_outcome == outcome
    assert states.keys() == other_states.keys()
    assert steps_of(tmp_path) == [] and os.listdir(tmp_path / "checkpoints") == []
