"""`ckpt.async`: the bytes of the call, one save at a time, nothing lost and nothing silent."""

import os
import threading
from contextlib import contextmanager

import pytest
import torch

from support.checkpoints import Run, Table, fails_at, steps_of, whole
from trainer.checkpoint.discovery import Status, discover
from trainer.checkpoint.layout import read_layout
from trainer.checkpoint.manifest import check_bytes
from trainer.checkpoint.staging import Stager
from trainer.checkpoint.storage import load_tensors, write_shard
from trainer.checkpoint.store import CheckpointStore
from trainer.core.files import file_hook
from trainer.core.log import logger
from trainer.errors import CheckpointError, TrainerError

NO_SPACE = OSError(28, "No space left on device")


def run_at(run_dir, step: int, **ckpt) -> Run:
    run = Run(run_dir, **{"async": True, **ckpt})
    run.train(step)
    return run


@contextmanager
def held_writes(at: int = 0):
    """Holds the k-th file operation until `release` is set (at the latest when the block ends)."""
    release, reached = threading.Event(), threading.Event()
    count = -1

    def hook(operation, path):
        nonlocal count
        count += 1
        if count == at:
            reached.set()
            assert release.wait(60)

    with file_hook(hook):
        try:
            yield release, reached
        finally:
            release.set()


def saved(run_dir, step: int) -> dict[str, bytes]:
    """The bits of a saved step, read by another run, of other weights."""
    reader = Run(run_dir / "reader", seed=5)
    reader.resume(dir=str(run_dir / "checkpoints" / f"step_{step:08d}"))
    return whole(reader.app.state_dict())


# -- the bytes ---------------------------------------------------------------------------------------------------------


def test_e3_bytes_are_those_of_the_call_though_the_next_step_runs_before_the_write(tmp_path):
    """Weights, moments and AdamW's step all lie on the host here, where a live reference would be cheapest."""
    run, at_call = run_at(tmp_path, 0), {}
    for step in (3, 4, 6):
        run.train(step - run.step)
        at_call[step] = whole(run.app.state_dict())
        with held_writes() as (_, reached):
            run.save()
            assert reached.wait(60)
            run.train()
            assert whole(run.app.state_dict()) != at_call[step]
            assert steps_of(tmp_path) == [s for s in at_call if s < step]
        run.manager.wait()
    for step, bits in at_call.items():
        assert saved(tmp_path, step) == bits
    assert at_call[3] != at_call[4] != at_call[6]
    assert Run(tmp_path, seed=5).resume() == 6


def test_e3_adamw_step_is_that_of_the_weights(tmp_path):
    run = run_at(tmp_path, 3)
    with held_writes():
        run.save()
        run.train(2)
    run.manager.wait()
    reader = Run(tmp_path, seed=5)
    assert reader.resume() == 3
    assert reader.optimizer.inner.state[reader.module[0].weight]["step"].item() == 3
    assert reader.optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


def test_manifest_describes_the_run_as_of_the_call(tmp_path):
    from trainer.checkpoint.manifest import read_manifest

    run, position = run_at(tmp_path, 1), {"row": 1}
    run.manager.describe = lambda: {"data": position}
    with held_writes():
        path = run.save()
        position["row"] = 2
    run.manager.wait()
    assert read_manifest(path).run == {"data": {"row": 1}}


def test_no_copy_shares_memory_with_live_tensors():
    state = {
        "o.host": torch.ones(7),
        "o.transposed": torch.ones(4, 6).t(),
        "o.scalar": torch.tensor(1.0),
        "o.parameter": torch.nn.Parameter(torch.ones(5, 2)),
        "o.empty": torch.ones(0, 3),
    }
    shard = Stager(copy=True).stage(state)
    assert shard.block is not None and not shard.tensors
    for tensor in state.values():
        tensor.detach().zero_()
    data = shard.block[shard.plan.room_bytes :].view("float32")
    assert len(data) == 7 + 24 + 1 + 10 and (data == 1).all()


def test_host_memory_is_used_again(tmp_path):
    stager, places = Stager(copy=True), set()
    for step in range(4):
        state = {"o.w": torch.full((1000,), float(step)), "json": torch.zeros(10 + step, dtype=torch.uint8)}
        shard = stager.stage(state)
        assert shard.block is not None
        places.add(shard.block.ctypes.data)
        (tmp_path / str(step)).mkdir()
        write_shard(tmp_path / str(step), shard)
        target = {"o.w": torch.zeros(1000)}
        load_tensors(tmp_path / str(step), read_layout(tmp_path / str(step)), target)
        assert target["o.w"].unique().tolist() == [step]
    assert len(places) == 1


@pytest.mark.parametrize("copy", [True, False])
def test_a_plan_is_made_again_when_the_state_has_changed(tmp_path, copy):
    stager = Stager(copy=copy)
    states = [
        {"o.w": torch.randn(40, 30)},
        {"o.w": torch.randn(40, 30), "o.b": torch.randn(3)},  # another tensor
        {"o.w": torch.randn(40, 31), "o.b": torch.randn(3)},  # another shape, and more memory
        {"o.w": torch.randn(40, 31).double(), "o.b": torch.randn(3)},  # another dtype
        {"o.b": torch.randn(3), "o.w": torch.randn(40, 31).double()},  # another order
    ]
    plans = []
    for number, state in enumerate(states):
        directory = tmp_path / str(number)
        directory.mkdir()
        shard = stager.stage(state)
        plans.append(shard.plan)
        write_shard(directory, shard)
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load_tensors(directory, read_layout(directory), target)
        assert whole(target) == whole(state)
    assert stager.stage(states[-1]).plan == plans[-1]


def test_block_is_the_file(tmp_path):
    """Header and all, so that it can be written from where it lies."""
    shard = Stager(copy=True).stage({"o.w": torch.randn(10), "json": torch.zeros(3, dtype=torch.uint8)})
    write_shard(tmp_path, shard)
    assert shard.block is not None
    assert (tmp_path / "rank_00000.safetensors").read_bytes() == shard.block.tobytes()


# -- one at a time, and nothing in silence -----------------------------------------------------------------------------


def test_save_returns_before_the_write_and_the_next_one_waits(tmp_path):
    run = run_at(tmp_path, 1)
    with held_writes() as (release, reached):
        run.save()
        assert reached.wait(60)
        run.manager.poll()  # never waits
        assert steps_of(tmp_path) == []
        run.train()
        second = threading.Thread(target=run.save)
        second.start()
        second.join(0.3)
        assert second.is_alive() and steps_of(tmp_path) == []
        release.set()
        second.join(60)
    assert steps_of(tmp_path)[0] == 1
    run.manager.wait()
    assert steps_of(tmp_path) == [1, 2]


def test_the_same_step_is_not_written_twice(tmp_path):
    run = run_at(tmp_path, 1)
    with held_writes() as (_, reached):
        path = run.save()
        assert reached.wait(60)
        assert run.save() == path  # does not wait: it is on its way
    run.manager.wait()
    with file_hook(lambda operation, path: pytest.fail(f"{operation} {path}")):
        run.save()
        run.manager.wait()
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("k", [0, 5, 12])
@pytest.mark.parametrize("asked_by", ["poll", "save", "wait", "close"])
def test_e4_a_failed_write_is_raised_once_and_names_the_step(tmp_path, asked_by, k):
    run = run_at(tmp_path, 1, keep_last=1)
    run.save()
    run.manager.wait()
    before = whole(run.app.state_dict())
    run.train()
    with file_hook(fails_at(k, NO_SPACE)):
        run.save()
        writer = run.manager._writer
        assert writer is not None and writer._thread is not None
        writer._thread.join()
    run.train()
    with pytest.raises(CheckpointError, match=r"save of step 2 in the background failed: .*No space left on device"):
        run.save() if asked_by == "save" else getattr(run.manager, asked_by)()
    run.manager.wait()  # told once
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]
    assert saved(tmp_path, 1) == before
    run.save()  # and the next one works
    run.manager.wait()
    assert steps_of(tmp_path) == [3]


def test_e4_a_failed_last_save_fails_the_run(tmp_path):
    run = run_at(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step 1"), file_hook(fails_at(4, NO_SPACE)), run.manager:
        run.save()


def test_e4_the_error_that_ended_the_training_is_not_masked(tmp_path):
    run, lines = run_at(tmp_path, 1), []
    sink = logger.add(lines.append, level="ERROR", format="{message}")
    try:
        with pytest.raises(ZeroDivisionError), file_hook(fails_at(4, NO_SPACE)), run.manager:
            run.save()
            1 / 0  # noqa: B018
    finally:
        logger.remove(sink)
    assert len(lines) == 1 and "step 1" in lines[0] and "No space left" in lines[0]


def test_the_last_save_is_awaited_also_when_training_fails(tmp_path):
    run = run_at(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), held_writes() as (release, _), run.manager:
        run.save()
        threading.Timer(0.2, release.set).start()
        1 / 0  # noqa: B018
    assert steps_of(tmp_path) == [1]


def test_a_fault_of_the_code_is_not_taken_for_a_disk(tmp_path):
    run = run_at(tmp_path, 1)

    def broken(operation, path):
        raise ZeroDivisionError("a bug")

    with file_hook(broken):
        run.save()
        with pytest.raises((ZeroDivisionError, CheckpointError), match="a bug"):
            run.manager.wait()


def test_the_state_is_checked_before_anything_is_copied(tmp_path):
    run = run_at(tmp_path, 3)
    with pytest.raises(CheckpointError, match="counter stands at 3"):
        run.manager.save(2)
    run.app.owners["data"] = Table(value={1, 2})
    with pytest.raises(TrainerError, match=r"data\.value"):
        run.save()


# -- retention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("outcome", ["written", "fails"])
def test_e1_with_keep_last_1_a_whole_checkpoint_is_there_at_every_instant(tmp_path, background, outcome):
    """The old one goes only after the new one is committed, and stays if the new one fails."""
    run = run_at(tmp_path, 1, keep_last=1, **{"async": background})
    run.save()
    run.manager.wait()
    newest = []

    def check(operation, path):
        usable = [c for c in discover(tmp_path / "checkpoints") if c.status is Status.COMMITTED]
        assert usable, (operation, path)
        assert usable[-1].manifest is not None
        check_bytes(usable[-1].path, usable[-1].manifest, usable[-1].manifest.files)
        newest.append(usable[-1].step)
        if outcome == "fails" and operation == "rename":
            raise NO_SPACE

    run.train()
    with file_hook(check):
        try:
            run.save()
            run.manager.wait()
        except CheckpointError:
            assert outcome == "fails"
    assert newest[0] == 1 and len(newest) > 8
    assert steps_of(tmp_path) == ([2] if outcome == "written" else [1])
    assert Run(tmp_path, seed=5).resume() == (2 if outcome == "written" else 1)


# -- several runs in one process ---------------------------------------------------------------------------------------


def test_e18_a_second_run_in_the_process_is_not_completed_by_the_first_ones_write(tmp_path):
    """Run 1 fails while its save is on the way; run 2 begins at once, in the same directory."""
    first = run_at(tmp_path, 2)
    with held_writes(at=4) as (release, reached):
        first.save()
        assert reached.wait(60)
        second = run_at(tmp_path, 1)
        assert steps_of(tmp_path) == []  # nothing of either run
        assert CheckpointStore(tmp_path / "checkpoints").tidy() == []  # and what the first one writes is left alone
        second.save()
        second.manager.wait()
        assert steps_of(tmp_path) == [1]  # its own data, and no completion state but its own
        assert saved(tmp_path, 1) == whole(second.app.state_dict())
        release.set()
        first.manager.wait()
    assert steps_of(tmp_path) == [1, 2]
    assert saved(tmp_path, 2) == whole(first.app.state_dict())
