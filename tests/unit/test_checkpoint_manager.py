"""CheckpointManager: what is saved, kept, chosen and set aside."""

import fcntl
import os
import shutil

import pytest

from support.checkpoints import Run, fails_at, flip_bit, in_killed_process, steps_of, whole
from trainer.checkpoint.discovery import Status, discover, inspect_step
from trainer.checkpoint.manifest import check_bytes, read_manifest
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tables import read_tables
from trainer.config.train import ResumeConfig
from trainer.core import files
from trainer.core.files import file_hook
from trainer.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, IncompleteCheckpoint


def run_with(run_dir, *steps: int, **ckpt) -> Run:
    """A run that has saved `steps`."""
    run = Run(run_dir, **ckpt)
    for step in steps:
        run.train(step - run.step)
        run.save()
    return run


def step_dir(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


def state_at(step: int, tmp_path) -> dict[str, bytes]:
    """The state of the run that never stopped."""
    run = Run(tmp_path / "never")
    run.train(step)
    return whole(run.app.state_dict())


# -- save --------------------------------------------------------------------------------------------------------------


def test_name_and_contents_agree(tmp_path):
    run = run_with(tmp_path, 3)
    path = step_dir(tmp_path, 3)
    layout, leaves = read_tables(path)
    assert read_manifest(path).step == leaves["progress"]["step"] == 3
    assert leaves["progress"]["tokens"] == 3 * 48
    state = run.optimizer.inner.state[run.module[0].weight]
    assert state["step"].item() == 3
    assert set(layout) == set(run.app.state_dict())
    assert os.listdir(path.parent) == ["step_00000003"]
    assert sorted(os.listdir(path)) == ["manifest.json", "metadata.json", "rank_00000.safetensors"]


def test_a_save_under_another_number_than_the_counter_is_refused(tmp_path):
    run = Run(tmp_path)
    run.train(3)
    with pytest.raises(CheckpointError, match="asked to save step 2, but the run's own counter stands at 3"):
        run.manager.save(2)
    assert steps_of(tmp_path) == []


def test_saving_changes_nothing(tmp_path):
    run = Run(tmp_path / "a")
    run.save()  # before the first step, too
    run.train(2)
    before = whole(run.app.state_dict())
    run.save()
    assert whole(run.app.state_dict()) == before == state_at(2, tmp_path)


def test_due(tmp_path):
    manager = Run(tmp_path, interval=4, at_end=True).manager
    assert [step for step in range(16) if manager.due(step, 15)] == [4, 8, 12, 15]
    manager = Run(tmp_path, interval=4, at_end=False).manager
    assert [step for step in range(17) if manager.due(step, 15)] == [4, 8, 12, 16]
    assert not any(Run(tmp_path, at_end=False).manager.due(step, 15) for step in range(16))


def test_the_same_step_is_not_written_twice(tmp_path):
    run = run_with(tmp_path, 4)
    with file_hook(lambda operation, path: pytest.fail(f"{operation} {path}")):
        assert run.save() == step_dir(tmp_path, 4)
    again = Run(tmp_path)
    again.resume()
    with file_hook(lambda operation, path: pytest.fail(f"{operation} {path}")):
        assert again.save() == step_dir(tmp_path, 4)


@pytest.mark.parametrize(
    ("settings", "left"), [({"keep_last": 1, "keep_every": 2}, [2, 4, 5]), ({"keep_last": 2}, [4, 5])]
)
def test_e8_retention(tmp_path, settings, left):
    run_with(tmp_path, 1, 2, 3, 4, 5, interval=1, **settings)
    assert steps_of(tmp_path) == left
    assert len(os.listdir(tmp_path / "checkpoints")) == len(left)


def test_the_best_are_kept_by_what_the_manifest_says(tmp_path):
    """Over a resume, too: nothing about the best is remembered anywhere else."""
    losses = {1: 0.4, 2: 0.2, 3: 0.3, 4: float("nan"), 5: 0.5, 6: 0.6}
    for steps in ((1, 2, 3), (4, 5, 6)):
        run = Run(tmp_path, keep_last=1, keep_best=1)
        run.resume(if_exists=True)
        for step in steps:
            run.train()
            run.manager.save(step, metrics={"val_loss": losses[step]})
    assert steps_of(tmp_path) == [2, 6]
    assert read_manifest(step_dir(tmp_path, 2)).metrics == {"val_loss": 0.2}


def test_the_best_stays_the_best_when_it_is_written_anew_after_a_resume(tmp_path):
    """As by a signal in the first cycle after it, which saves the step once more with the gradients so far."""
    run = run_with(tmp_path, keep_last=1, keep_best=1)
    run.train()
    run.manager.save(1, metrics={"val_loss": 0.2})
    again = Run(tmp_path, keep_last=1, keep_best=1)
    again.resume()
    again.manager.save(1, micro_step=2, pending={"micro_step": 2})
    assert read_manifest(step_dir(tmp_path, 1)).micro_step == 2
    for step, loss in ((2, 0.4), (3, 0.3)):
        again.train()
        again.manager.save(step, metrics={"val_loss": loss})
    assert steps_of(tmp_path) == [1, 3]
    assert read_manifest(step_dir(tmp_path, 1)).metrics == {"val_loss": 0.2}


def test_a_state_marked_as_not_resumable_is_kept_and_never_chosen(tmp_path):
    run = run_with(tmp_path, 4, keep_last=1)
    run.train(1)
    run.manager.save(5, resumable=False, reason="weights are not finite")
    assert steps_of(tmp_path) == [4]
    assert inspect_step(step_dir(tmp_path, 5)).reason == "weights are not finite"
    assert Run(tmp_path).resume() == 4
    assert inspect_step(tmp_path / "checkpoints" / "superseded" / "step_00000005").status is Status.NOT_RESUMABLE


def test_unusable_states_do_not_displace_the_only_usable_one(tmp_path):
    """4 and 8 are good and 12 is not; resumed with keep_last = 1, interrupted after the next prune, resumed again."""
    run_with(tmp_path, 4, 8)
    run = Run(tmp_path)
    run.resume()
    run.train(4)
    run.manager.save(12, resumable=False, reason="in the middle of a cycle")
    again = Run(tmp_path, keep_last=1)
    assert again.resume() == 8
    again.train(5)
    with pytest.raises(CheckpointError), file_hook(fails_at(3, OSError(5, "Input/output error"))):
        again.save()
    assert Run(tmp_path).resume() == 8
    again.save()
    assert steps_of(tmp_path) == [13]
    assert Run(tmp_path).resume() == 13


def test_at_every_instant_a_checkpoint_is_whole(tmp_path):
    """keep_last = 1: at each file operation of each save and prune, some committed checkpoint has all its bytes."""
    run = run_with(tmp_path, 1, keep_last=1)
    seen = set()

    def check(operation, path):
        usable = [c for c in discover(tmp_path / "checkpoints") if c.status is Status.COMMITTED]
        assert usable, (operation, path)
        newest = usable[-1]
        check_bytes(newest.path, newest.manifest, newest.manifest.files)
        seen.add((operation, path.name))

    with file_hook(check):
        for _ in range(2):
            run.train()
            run.save()
    assert ("unlink", "manifest.json") in seen  # the old one was removed meanwhile
    assert steps_of(tmp_path) == [3]


def test_everything_is_on_disk_before_the_rename_and_the_rename_before_the_return(tmp_path, monkeypatch):
    run = run_with(tmp_path, 1)
    run.train()
    calls = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd):
        calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split(".tmp-")[0])
        real_fsync(fd)

    def rename(source, target):
        calls.append(f"rename {os.path.basename(target)}")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    run.save()
    assert calls == [
        "sync checkpoints",  # the temporary directory's name
        "sync rank_00000.safetensors",
        "sync metadata.json",
        "sync step_00000002",
        "sync manifest.json",
        "sync step_00000002",
        "rename step_00000002",
        "sync checkpoints",
    ]


def test_free_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    run = run_with(tmp_path, 1)
    run.train()
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"needs 8\.\d+ MiB, but .* has 1000 bytes free"):
        run.save()
    with pytest.raises(CheckpointError, match="has 1000 bytes free"):
        run.manager.check_space()
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


def test_something_foreign_in_the_way_is_not_replaced(tmp_path):
    run = Run(tmp_path)
    run.train(2)
    step_dir(tmp_path, 2).mkdir(parents=True)
    (step_dir(tmp_path, 2) / "precious.txt").touch()
    with pytest.raises(CheckpointError, match="will not be replaced"):
        run.save()
    assert (step_dir(tmp_path, 2) / "precious.txt").exists()


def test_a_description_that_is_no_json_is_refused_by_reason(tmp_path):
    run = Run(tmp_path)
    run.manager.describe = lambda: {"path": object()}
    with pytest.raises(CheckpointError, match=r"cannot be written to manifest\.json.*object"):
        run.save()
    assert os.listdir(tmp_path / "checkpoints") == []


# -- resume ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path):
    run_with(tmp_path / "run", 3)
    for step in (4, 6):
        again = Run(tmp_path / "run", seed=9)  # other initial weights
        again.resume()
        again.train(step - again.step)
        again.save()
    assert whole(again.app.state_dict()) == state_at(6, tmp_path)


@pytest.mark.parametrize("verify", ["size", "checksum"])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "manifest"])
def test_newest_falls_back_past_a_damaged_one_and_explicit_does_not(tmp_path, damage, verify):
    run_with(tmp_path, 4, 8)
    shard = step_dir(tmp_path, 8) / "rank_00000.safetensors"
    match damage:
        case "missing":
            shard.unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "flipped":
            flip_bit(shard, shard.stat().st_size - 5)
        case "manifest":
            flip_bit(shard.with_name("manifest.json"), 30)
    if (damage, verify) == ("flipped", "size"):
        return  # what checksums are for
    damaged = "manifest.json" if damage == "manifest" else "rank_00000.safetensors"
    for resume in ({"step": 8}, {"dir": str(step_dir(tmp_path, 8))}):
        with pytest.raises(CorruptCheckpoint, match=damaged):
            Run(tmp_path, verify=verify).resume(**resume)
    run = Run(tmp_path, verify=verify)
    assert run.resume() == 4
    assert whole(run.app.state_dict()) == state_at(4, tmp_path)
    assert (tmp_path / "checkpoints" / "superseded" / "step_00000008").is_dir()
    run.train(4)
    run.save()  # the step of the damaged one, anew
    assert steps_of(tmp_path) == [4, 8]
    assert Run(tmp_path).resume() == 8


def test_each_rejection_is_logged(tmp_path):
    from trainer.core.log import logger

    run_with(tmp_path, 4, 8, 12)
    (step_dir(tmp_path, 12) / "metadata.json").unlink()
    flip_bit(step_dir(tmp_path, 8) / "metadata.json", 40)
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    try:
        assert Run(tmp_path).resume() == 4
    finally:
        logger.remove(sink)
    assert "step_00000012" in lines[0] and "metadata.json" in lines[0] and "missing" in lines[0]
    assert "step_00000008" in lines[1] and "checksum" in lines[1]


def test_nothing_usable_lists_every_candidate(tmp_path):
    run_with(tmp_path, 4, 8)
    for step in (4, 8):
        (step_dir(tmp_path, step) / "metadata.json").unlink()
    for resume in ({}, {"if_exists": True}):  # committed checkpoints were lost: that is no fresh start
        with pytest.raises(CheckpointError, match="no checkpoint to resume from") as failure:
            Run(tmp_path).resume(**resume)
        assert "step_00000004: corrupt" in str(failure.value)
        assert "step_00000008: corrupt" in str(failure.value)


def test_if_exists_starts_fresh_where_nothing_was_committed(tmp_path):
    assert Run(tmp_path / "none").resume(if_exists=True) is None
    with pytest.raises(CheckpointError, match="--resume.if-exists"):
        Run(tmp_path / "none").resume()
    run = Run(tmp_path / "run")
    run.train()
    with pytest.raises(CheckpointError), file_hook(fails_at(6, OSError(5, "Input/output error"))):
        run.save()
    (tmp_path / "run" / "checkpoints" / "step_00000001.tmp-0123abcd").mkdir()
    assert Run(tmp_path / "run").resume(if_exists=True) is None
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_step_directory_without_its_manifest_is_no_fresh_start_and_is_not_removed(tmp_path):
    """Somebody copied a run without its JSON files: the shards may be all that is left of it."""
    run_with(tmp_path, 4)
    (step_dir(tmp_path, 4) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000004: incomplete: .* has no manifest\.json"):
        Run(tmp_path).resume(if_exists=True)
    assert (step_dir(tmp_path, 4) / "rank_00000.safetensors").exists()


def test_a_step_that_is_not_there_is_an_error_with_those_that_are(tmp_path):
    run_with(tmp_path, 4, 8)
    for resume in ({"step": 6}, {"step": 6, "if_exists": True}):
        with pytest.raises(CheckpointError, match="no checkpoint of step 6; resumable steps: 4, 8"):
            Run(tmp_path).resume(**resume)
    with pytest.raises(CheckpointError, match="is step 4, not 8"):
        Run(tmp_path).resume(dir=str(step_dir(tmp_path, 4)), step=8)


def test_an_incomplete_step_given_by_path_is_an_error(tmp_path):
    run_with(tmp_path / "other", 4, 8)
    (step_dir(tmp_path / "other", 8) / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"no manifest\.json"):
        Run(tmp_path / "mine").resume(dir=str(step_dir(tmp_path / "other", 8)))


def test_an_older_step_sets_newer_ones_aside(tmp_path):
    run_with(tmp_path, 4, 8, 12)
    run = Run(tmp_path)
    assert run.resume(step=4) == 4
    aside = tmp_path / "checkpoints" / "superseded"
    assert steps_of(tmp_path) == [4]
    assert sorted(os.listdir(aside)) == ["step_00000008", "step_00000012"]
    run.train(4)
    run.save()
    assert Run(tmp_path).resume() == 8  # the new one
    assert Run(tmp_path).resume(step=4) == 4
    assert sorted(os.listdir(aside)) == ["step_00000008", "step_00000008.2", "step_00000012"]
    again = Run(tmp_path)
    assert again.resume(dir=str(aside / "step_00000012")) == 12  # still there for who asks
    assert whole(again.app.state_dict()) == state_at(12, tmp_path)
    assert again.manager._parent is None


def test_a_checkpoint_that_does_not_load_sets_nothing_aside(tmp_path):
    run_with(tmp_path, 4, 8)
    run = Run(tmp_path)
    del run.app.owners["progress"]
    with pytest.raises(CheckpointMismatch):
        run.manager.load(run.manager.choose(ResumeConfig(step=4)))
    assert steps_of(tmp_path) == [4, 8]


def snapshot(directory):
    return {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in sorted(directory.rglob("*"))
    }


@pytest.mark.parametrize("by", ["run", "step", "number"])
def test_a_fork_records_its_parent_and_never_touches_it(tmp_path, by):
    source = tmp_path / "source"
    run_with(source, 4, 8)
    (source / "checkpoints" / "step_00000009.tmp-0123abcd").mkdir()  # not ours to clear up
    before = snapshot(source)
    resume = {
        "run": {"dir": str(source)},
        "step": {"dir": str(step_dir(source, 8))},
        "number": {"dir": str(source), "step": 4},
    }[by]
    fork = Run(tmp_path / "fork", keep_last=1)
    step = 4 if by == "number" else 8
    assert fork.resume(**resume) == step
    fork.save()  # a checkpoint of its own, though nothing was trained
    fork.train(2)
    fork.save()
    assert steps_of(tmp_path / "fork") == [step + 2]
    checksum = read_manifest(step_dir(source, step)).checksum
    expected = {"path": str(step_dir(source, step)), "step": step, "checksum": checksum}
    assert read_manifest(step_dir(tmp_path / "fork", step + 2)).parent == expected
    resumed = Run(tmp_path / "fork")
    resumed.resume()
    resumed.train()
    assert read_manifest(resumed.save()).parent == expected  # a resume of the fork keeps its origin
    assert snapshot(source) == before


def test_a_run_inside_the_output_directory_is_another_run(tmp_path):
    run_with(tmp_path / "inner", 4, 8)
    run = Run(tmp_path)
    assert run.resume(dir=str(tmp_path / "inner"), step=4) == 4
    assert run.manager._parent is not None
    assert steps_of(tmp_path / "inner") == [4, 8]


# -- what a crash leaves behind ----------------------------------------------------------------------------------------


def test_leftovers_are_cleared_but_not_those_of_a_save_that_runs(tmp_path):
    run_with(tmp_path, 4, 8)
    checkpoints = tmp_path / "checkpoints"
    (step_dir(tmp_path, 8) / "manifest.json").unlink()  # nothing of ours does that: not ours to judge
    for name in (
        "step_00000009.tmp-00000001",
        "step_00000009.tmp-00000002",
        "step_00000004.replaced-00000003",
        "step_00000002.removed-00000004",
    ):
        shutil.copytree(step_dir(tmp_path, 4), checkpoints / name)
    (checkpoints / "mine.txt").touch()
    with open(checkpoints / "step_00000009.tmp-00000002" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(CheckpointStore(checkpoints).tidy()) == 3
        assert sorted(os.listdir(checkpoints)) == [
            "mine.txt",
            "step_00000004",
            "step_00000008",
            "step_00000009.tmp-00000002",
        ]
    assert len(CheckpointStore(checkpoints).tidy()) == 1
    assert sorted(os.listdir(checkpoints)) == ["mine.txt", "step_00000004", "step_00000008"]


def test_the_lock_of_a_save_is_held_until_it_is_committed(tmp_path):
    run = run_with(tmp_path, 1)
    run.train()
    temporaries = []

    def look(operation, path):
        for entry in (tmp_path / "checkpoints").glob("*.tmp-*"):
            if (entry / ".lock").exists():
                temporaries.append(operation)
                CheckpointStore(tmp_path / "checkpoints").tidy()
                assert entry.exists()

    with file_hook(look):
        run.save()
    assert "rename" in temporaries
    assert steps_of(tmp_path) == [1, 2]


def test_a_replaced_checkpoint_is_put_back(tmp_path):
    run_with(tmp_path, 4, 8)
    step_dir(tmp_path, 8).rename(tmp_path / "checkpoints" / "step_00000008.replaced-0123abcd")
    assert Run(tmp_path).resume() == 8
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00000004", "step_00000008"]


@pytest.mark.parametrize("newer", ["00000001", "ffffffff"])
def test_of_two_replaced_checkpoints_the_newer_one_is_put_back(tmp_path, newer):
    """The older one's removal had failed before the step was written once more, and that was interrupted too."""
    run_with(tmp_path, 4, 8)
    older = step_dir(tmp_path, 8)
    both = {token: older.with_name(f"{older.name}.replaced-{token}") for token in (newer, "88888888")}
    for directory in both.values():
        shutil.copytree(older, directory)
    shutil.rmtree(older)
    os.utime(both["88888888"] / "manifest.json", ns=(0, 10**18))
    inode = (both[newer] / "manifest.json").stat().st_ino
    assert Run(tmp_path).resume() == 8
    assert (step_dir(tmp_path, 8) / "manifest.json").stat().st_ino == inode
    assert Run(tmp_path).resume() == 8
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00000004", "step_00000008"]


def test_the_older_of_two_replaced_checkpoints_does_not_come_back_in_the_place_of_the_one_set_aside(tmp_path):
    """With the newer one put back and then set aside, nothing stands at its step any more."""
    run_with(tmp_path, 4, 8)
    newer = step_dir(tmp_path, 8)
    for token in ("00000001", "ffffffff"):
        shutil.copytree(newer, newer.with_name(f"{newer.name}.replaced-{token}"))
    shutil.rmtree(newer)
    assert Run(tmp_path).resume(step=4) == 4
    assert Run(tmp_path).resume() == 4
    assert steps_of(tmp_path) == [4]


def again_from(template, run_dir) -> Run:
    """A run at step 6 whose directory holds what `template` has: step 4, and perhaps another step 6."""
    shutil.copytree(template, run_dir)
    run = Run(run_dir)
    run.train(6)
    return run


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_e16_a_save_interrupted_at_any_operation_loses_nothing(tmp_path, overwrite, how):
    """Also where the step exists already with other contents: never a mixture, and never neither."""
    template = tmp_path / "template"
    before = Run(template, seed=1)
    before.train(4)
    before.save()
    if overwrite:
        before.train(2)
        before.save()
    old, new = whole(before.app.state_dict()), state_at(6, tmp_path)
    operations = []
    with file_hook(lambda operation, path: operations.append(operation)):
        again_from(template, tmp_path / "clean").save()
    assert {"create", "write", "fsync", "mkdir", "rename", "unlink"} <= set(operations)

    found = []
    for k in range(len(operations)):
        run_dir = tmp_path / str(k)
        run = again_from(template, run_dir)
        committed = False
        if how == "is killed":
            assert in_killed_process(lambda run=run: run.save(), k)
        else:
            with file_hook(fails_at(k, OSError(28, "No space left on device"))):
                try:
                    run.save()
                    committed = True
                except CheckpointError as error:
                    assert "No space left on device" in str(error)
        resumed = Run(run_dir)
        assert resumed.resume() in (4, 6)
        found.append(whole(resumed.app.state_dict()))
        assert found[-1] == new if committed else found[-1] in (old, new)
        names = os.listdir(run_dir / "checkpoints")
        assert all("." not in name for name in names), names
        shutil.rmtree(run_dir)
    commit = operations.index("rename") + overwrite  # where there is an old one, it is moved aside first
    assert found[:commit] == [old] * commit
    assert found[-1] == new
    assert not in_killed_process(lambda: again_from(template, tmp_path / "last").save(), len(operations))


def test_a_prune_that_is_killed_at_any_operation_loses_nothing(tmp_path):
    run_with(tmp_path / "template", 1, 2)

    def prune(run_dir):
        Run(run_dir, keep_last=1).manager._apply_retention()

    for k in range(100):
        run_dir = shutil.copytree(tmp_path / "template", tmp_path / str(k))
        killed = in_killed_process(lambda run_dir=run_dir: prune(run_dir), k)
        again = Run(run_dir, keep_last=1)
        assert again.resume() == 2
        again.train()
        again.save()
        assert os.listdir(run_dir / "checkpoints") == ["step_00000003"]
        if not killed:
            break
    assert k >= 6  # rename, sync, manifest, sync, two files, directory
