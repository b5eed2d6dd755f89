"""Run directories as users have them: shared by mistake, moved, copied, linked, with odd names, under a strict umask."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from support import runs
from support.runs import checkpoint, differences, metrics, samples, sft
from trainer.checkpoint.discovery import Status, discover
from trainer.core import lock
from trainer.errors import CheckpointError, DataError, LaunchError

FLAGS = ["--max-steps", "6", "--ckpt.interval", "2", "--val.interval", "0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    sft(run_dir, *FLAGS)
    return run_dir


def half(run_dir: Path) -> Path:
    sft(run_dir, *FLAGS, "--stop-step", "4")
    return run_dir


def same(run_dir: Path, whole: Path) -> None:
    assert differences(checkpoint(run_dir, 6), checkpoint(whole, 6)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)


def test_a_second_process_in_the_same_directory_is_refused(tmp_path, monkeypatch):
    """Two runs in one directory would mix their rows and checkpoints; the first one goes on as if nothing had been."""
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    run_dir = tmp_path / "run"
    flags = ["--max-steps", "100000", "--val.interval", "0", "--ckpt.interval", "2", "--ckpt.keep-last", "1"]
    process = runs.start("sft", *runs.DEBUG, *flags, "--output-dir", str(run_dir))
    try:
        runs.wait_for_step(run_dir, 3, process)
        for more in (["--resume"], ["--resume.if-exists"], ["--overwrite"]):
            with pytest.raises(
                LaunchError, match=rf"in use by process {process.pid} on .* choose another --output-dir"
            ):
                sft(run_dir, *FLAGS, *more)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    newest = max(c.step or 0 for c in discover(run_dir / "checkpoints") if c.status is Status.COMMITTED)
    sft(run_dir, *flags, "--stop-step", str(newest + 2), "--resume")  # the dead one is in nobody's way


def test_a_moved_and_a_copied_run_go_on(tmp_path, whole):
    first = half(tmp_path / "first")
    copied = Path(shutil.copytree(first, tmp_path / "copied"))
    (tmp_path / "somewhere").mkdir()
    moved = first.rename(tmp_path / "somewhere" / "else")
    for run_dir in (moved, copied):
        sft(run_dir, *FLAGS, "--resume")
        same(run_dir, whole)


def test_checkpoints_that_lie_on_another_disk_are_the_runs_own(tmp_path, whole):
    """checkpoints/ and the run itself may be links: then, too, an older step supersedes, and nothing is a fork."""
    run_dir, disk = half(tmp_path / "run"), tmp_path / "disk"
    shutil.move(run_dir / "checkpoints", disk)
    (run_dir / "checkpoints").symlink_to(disk)
    (tmp_path / "link").symlink_to(run_dir)
    sft(tmp_path / "link", *FLAGS, "--resume.dir", str(disk / "step_00000002"))
    assert sorted(path.name for path in (disk / "superseded").iterdir()) == ["step_00000004"]
    candidates = discover(disk)
    assert [(c.step, c.status) for c in candidates] == [(step, Status.COMMITTED) for step in (2, 4, 6)]
    assert all(c.manifest is not None and c.manifest.parent is None for c in candidates)
    same(run_dir, whole)


@pytest.mark.parametrize("name", ["with space", "ünï cödé 漢字", "a'b\"c$(touch x)", "-dash", "new\nline", "a=b,c#d"])
def test_odd_names(name, tmp_path, whole):
    run_dir = half(tmp_path / name)
    sft(run_dir, *FLAGS, "--resume.dir", str(run_dir))
    same(run_dir, whole)


def test_a_strict_umask(tmp_path, whole):
    before = os.umask(0o077)
    try:
        run_dir = half(tmp_path / "run")
        sft(run_dir, *FLAGS, "--resume")
    finally:
        os.umask(before)
    same(run_dir, whole)
    for path in run_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_places_that_hold_no_checkpoint(tmp_path, whole):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "step_00000004").mkdir()
    places = ["empty", "file", "loop", "nothing", "half/step_00000004"]
    for place in [*places, "/", "/dev/null", str(whole / "logs"), str(checkpoint(whole, 6) / "manifest.json")]:
        with pytest.raises((CheckpointError, LaunchError), match="."):
            sft(tmp_path / "run", *FLAGS, "--resume.dir", str(tmp_path / place))
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_damaged_identity_is_named(tmp_path):
    run_dir = half(tmp_path / "run")
    for text in ("", "{", "[]", '{"run_id": 3}', "{}"):
        (run_dir / "run.json").write_text(text)
        with pytest.raises(LaunchError, match=r"run\.json is damaged"):
            sft(run_dir, *FLAGS, "--resume")
    (run_dir / "run.json").unlink()
    sft(run_dir, *FLAGS, "--resume")


@pytest.mark.parametrize("name", ["config.toml", "weights"])
def test_what_no_run_has_written_is_never_replaced(name, tmp_path):
    """Such as --output-dir . where one's own config.toml, or a folder of weights, lies."""
    own = tmp_path / name / "own.txt" if name == "weights" else tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    with pytest.raises(LaunchError, match=f"holds {name}, which no run has written.*choose another --output-dir"):
        sft(tmp_path, *FLAGS)
    assert own.read_text() == "mine" and not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("inside", ["", "fork"])
@pytest.mark.parametrize("flags", [(), ("--resume",), ("--resume.if-exists",), ("--overwrite",)])
def test_a_checkpoint_is_no_place_for_a_run(inside, flags, tmp_path, whole):
    """Such as --output-dir run/checkpoints/step_00000005 --resume.if-exists: retention would remove the run with it."""
    shutil.copytree(whole, tmp_path / "run")
    step_dir = checkpoint(tmp_path / "run", 4)
    before = sorted(step_dir.rglob("*"))
    with pytest.raises(LaunchError, match=r"lies in a checkpoint, .*--resume\.step \d+, or --resume\.dir"):
        sft(step_dir / inside, *FLAGS, *flags)
    assert sorted(step_dir.rglob("*")) == before


def test_a_run_that_failed_before_its_first_step_can_be_started_again(tmp_path, whole):
    with pytest.raises(DataError):
        sft(tmp_path / "run", *FLAGS, "--data.sources.0.path", str(tmp_path / "gone.jsonl"))
    assert (tmp_path / "run" / "config.toml").exists()
    sft(tmp_path / "run", *FLAGS)
    same(tmp_path / "run", whole)
