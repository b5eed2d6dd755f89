"""States that must not be gone on from: not finite, or in the middle of a cycle without its gradients."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from support.checkpoints import Run, in_killed_process, steps_of, whole
from trainer.checkpoint.dcp import DTYPE_NAMES, tensor_bytes
from trainer.checkpoint.discovery import Status, discover
from trainer.checkpoint.finite import all_finite
from trainer.checkpoint.staging import Stager
from trainer.checkpoint.storage import write_shard
from trainer.cli.ckpt import main as ckpt
from trainer.errors import CheckpointError


def states(run_dir: Path) -> dict[int | None, Status]:
    return {candidate.step: candidate.status for candidate in discover(run_dir / "checkpoints")}


def poison(run: Run, value: float = float("nan")) -> None:
    with torch.no_grad():
        run.module[0].weight[3, 2] = value  # pyright: ignore[reportArgumentType, reportIndexIssue]


def unsafe(run: Run, kind: str) -> None:
    if kind == "not finite":
        poison(run)
        run.save()
    elif kind == "mid-cycle":
        run.manager.save(run.step, micro_step=2)
    else:  # of another trainer, which wrote into the same directory in the middle of a cycle
        legacy = run.manager.store.directory / f"step_{run.step:08d}"
        legacy.mkdir()
        (legacy / "optimizer.pt").touch()
        state = {"global_step": run.step, "micro_step": 2, "gradient_accumulation_steps": 4}
        (legacy / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_with_weights_that_are_not_finite_is_never_resumable(value, background, tmp_path):
    run = Run(tmp_path, keep_last=1, **{"async": background})
    run.train(2)
    run.save()
    run.train()
    poison(run, value)
    run.save()
    poison(run, 1.0)  # what counts is what was written
    run.manager.close()
    assert states(tmp_path) == {2: Status.COMMITTED, 3: Status.NOT_RESUMABLE}
    assert discover(tmp_path / "checkpoints")[1].reason == "model.0.weight has a value that is not finite"
    assert Run(tmp_path).resume() == 2


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_value_that_is_written_is_looked_at(dtype, copy, tmp_path):
    """Of tensors that end and begin within the pieces they are written in."""
    size = (9 << 20) // dtype.itemsize
    weights = torch.ones(size, dtype=dtype)
    state = {"model.a": torch.ones(3), "model.b": weights, "model.c": torch.ones(5, dtype=torch.bfloat16)}
    state |= {"optimizer.a": torch.tensor([float("nan")]), "model.e": torch.ones(0), "model.i": torch.ones(2).int()}
    assert looked_at(state, copy, tmp_path / "sound") is None
    for place in (0, size // 2, size - 5, size - 1):
        weights[place] = float("-inf")
        assert looked_at(state, copy, tmp_path / str(place)) == "model.b"
        weights[place] = 1.0


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_a_number_is_what_torch_says(dtype):
    """Over all bit patterns of the small dtypes, and those beside the edges of the large ones."""
    bits = 8 * dtype.itemsize
    exponent = 1 << (bits - 1)
    edges = {int(torch.tensor(x, dtype=dtype).view(_INTEGERS[bits]).item()) for x in (0.0, 1.0, float("nan"))}
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(_INTEGERS[bits]).item()
    edges |= {int(largest) + k for k in (-1, 0, 1, 2)}
    patterns = range(-exponent, exponent) if bits <= 16 else [*edges, *(e - exponent for e in edges), -1]
    for pattern in patterns:
        value = torch.tensor([pattern], dtype=_INTEGERS[bits]).view(dtype)
        assert all_finite(DTYPE_NAMES[dtype], tensor_bytes(value)) == math.isfinite(value.item()), pattern


_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def looked_at(state: dict[str, torch.Tensor], copy: bool, directory: Path) -> str | None:
    directory.mkdir()
    stager = Stager(copy=copy)
    try:
        return write_shard(directory, stager.stage(state), finite="model").not_finite
    finally:
        stager.close()


@pytest.mark.parametrize("kind", ["not finite", "mid-cycle", "legacy"])
def test_e6_resumed_from_8_beside_an_unsafe_12(kind, tmp_path):
    """4 and 8 are safe, 12 is not, keep_last = 1: resumed, killed at any moment of the next save and prune, resumed."""
    reference = Run(tmp_path / "reference")
    reference.train(12)
    first = Run(tmp_path / "run")
    for _ in range(3):
        first.train(4)
        unsafe(first, kind) if first.step == 12 else first.save()
    assert [states(tmp_path / "run")[step] is Status.COMMITTED for step in (4, 8, 12)] == [True, True, False]

    second = Run(tmp_path / "run", keep_last=1)
    assert second.resume() == 8
    second.train(4)
    snapshot = shutil.copytree(tmp_path / "run", tmp_path / "snapshot")
    interrupted, moment = True, 0
    while interrupted:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(snapshot, tmp_path / "run")
        interrupted = in_killed_process(second.save, moment)
        third = Run(tmp_path / "run", keep_last=1)
        assert third.resume() in (8, 12)
        third.train(12 - third.step)
        assert whole(third.app.state_dict()) == whole(reference.app.state_dict())
        moment += 1
    assert moment > 10
    assert steps_of(tmp_path / "run") == [12]


def test_a_mid_cycle_state_is_refused_by_name_before_anything_is_loaded(tmp_path, capsys):
    run = Run(tmp_path)
    run.train(4)
    run.manager.save(4, micro_step=3)
    fresh = Run(tmp_path, seed=1)
    before = whole(fresh.app.state_dict())
    for resume in ({}, {"step": 4}, {"dir": str(tmp_path / "checkpoints" / "step_00000004")}):
        with pytest.raises(CheckpointError, match=r"step_00000004.*micro-step 3 of a cycle, without the gradients"):
            fresh.resume(**resume)
    assert whole(fresh.app.state_dict()) == before
    assert ckpt(["ls", str(tmp_path)]) == 0
    assert "mid-cycle" in capsys.readouterr().out
    run.manager.save(4, micro_step=3, pending={"micro_step": 3})
    assert states(tmp_path) == {4: Status.COMMITTED}


def test_a_step_is_written_again_when_there_is_more_in_it(tmp_path):
    run = Run(tmp_path)
    run.train(2)
    path = run.save()

    def written() -> int:
        return (path / "manifest.json").stat().st_mtime_ns  # not the inode: a new directory may get an old one's number

    created = [written()]
    for micro_step, pending in ((0, None), (1, {"micro_step": 1}), (1, {"micro_step": 1}), (0, None)):
        run.manager.save(2, micro_step=micro_step, pending=pending)
        created.append(written())
    # as it is; with a cycle's gradients; as that is; the boundary's state alone is in it already
    assert [a == b for a, b in zip(created, created[1:], strict=False)] == [True, False, True, True]
    run.manager.save(2, pending={"row": 2})
    run.manager.save(2)
    assert created[-1] != written()
    assert discover(tmp_path / "checkpoints")[0].checkpoint().manifest.pending is None
