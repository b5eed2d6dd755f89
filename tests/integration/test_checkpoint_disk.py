"""Disks that are full, read-only or slow to say so: real file systems, real runs, one clear error each."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts import warm
from support.faults import SHORT, install
from support.runs import DEBUG, checkpoint, differences, metrics

MIB = 1 << 20


@contextmanager
def mounted(place: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own in memory; skips the test where that is not permitted."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def sft(run_dir: Path, logs: Path, *flags: str, prepare=None) -> tuple[int, str]:
    """Runs the short debug config; returns its exit code and what it printed."""
    logs.mkdir(exist_ok=True)
    run = warm.start(["sft", *DEBUG, "--output-dir", str(run_dir), *SHORT, *flags], logs, prepare=prepare)
    (code,) = run.wait()
    output = run.output()
    assert "Traceback" not in output, output
    return code, output


def one_error(output: str) -> str:
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1, output
    return errors[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    assert sft(place / "run", place / "logs")[0] == 0
    return place / "run"


def test_e15_a_disk_without_room_is_found_before_the_first_step(tmp_path):
    with mounted(tmp_path / "disk", 1 * MIB) as disk:
        code, output = sft(disk / "run", tmp_path / "logs")
        error = one_error(output)
        assert code == 1
        assert "a checkpoint needs" in error and "MiB" in error and "free" in error
        assert not (disk / "run/metrics.jsonl").exists()  # not one step was trained
        assert not list((disk / "run" / "checkpoints").iterdir())


def test_e15_a_disk_that_was_filled_meanwhile_is_found_before_the_first_resumed_step(tmp_path, whole):
    with mounted(tmp_path / "disk", 24 * MIB) as disk:
        assert sft(disk / "run", tmp_path / "logs", "--stop-step", "2")[0] == 0
        fill(disk / "filler")
        rows = (disk / "run/metrics.jsonl").read_bytes()
        code, output = sft(disk / "run", tmp_path / "logs", "--resume")
        assert code == 1
        assert "a checkpoint needs" in one_error(output)
        assert (disk / "run/metrics.jsonl").read_bytes() == rows
        assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step_00000002"]
        (disk / "filler").unlink()
        assert sft(disk / "run", tmp_path / "logs", "--resume")[0] == 0
        assert differences(checkpoint(whole, 4), checkpoint(disk / "run", 4)) == ""
        fill(disk / "filler")  # a complete run writes nothing more
        assert sft(disk / "run", tmp_path / "logs", "--resume")[0] == 0


def fill(path: Path) -> None:
    """Takes all the space that is left, but for a few blocks for rows and logs."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB // 4))
        except OSError:
            file.truncate(file.tell() - MIB // 2)


def fill_up(rank: int) -> None:
    """From the second save on, the disk is full by the time that the shard is written: the check came too early."""
    saves = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal saves
        if operation == "create" and path.name.startswith("rank_"):
            saves += 1
            if saves == 2:
                with open(path.parents[3] / "filler", "wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(bytes(MIB // 4))
                    except OSError:
                        pass

    install(hook)


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_e15_a_disk_that_fills_up_in_the_middle_of_a_save(tmp_path, whole, background):
    flags = ["--ckpt.async"] if background else []
    with mounted(tmp_path / "disk", 24 * MIB) as disk:
        code, output = sft(disk / "run", tmp_path / "logs", *flags, prepare=fill_up)
        error = one_error(output)
        assert code == 1
        assert "No space left on device" in error and "step" in error
        left = sorted(path.name for path in (disk / "run/checkpoints").iterdir())
        assert left == ["step_00000001"]  # nothing half-written that could be selected
        assert differences(checkpoint(disk / "run", 1), checkpoint(disk / "run", 1)) == ""
        (disk / "filler").unlink()
        assert sft(disk / "run", tmp_path / "logs", *flags, "--resume")[0] == 0
        assert differences(checkpoint(whole, 4), checkpoint(disk / "run", 4)) == ""
        assert metrics(disk / "run") == metrics(whole)


def go_read_only(rank: int) -> None:
    """The checkpoints become read-only when the second save begins, as on a disk that reports errors."""
    saves = 0

    def hook(operation: str, path: Path) -> None:
        nonlocal saves
        if operation == "mkdir" and ".tmp-" in path.name:
            saves += 1
            if saves == 2:
                # The file system as a whole stays writable because metrics.jsonl is open; a mount over a part need not.
                subprocess.run(["mount", "--bind", str(path.parent), str(path.parent)], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", str(path.parent)], check=True)

    install(hook)


def test_a_directory_that_becomes_read_only(tmp_path, whole):
    with mounted(tmp_path / "disk", 64 * MIB) as disk:
        code, output = sft(disk / "run", tmp_path / "logs", prepare=go_read_only)
        subprocess.run(["umount", "-l", str(disk / "run/checkpoints")], check=True)
        error = one_error(output)
        assert code == 1
        assert "Read-only file system" in error and "step 2" in error
        assert sorted(path.name for path in (disk / "run/checkpoints").iterdir()) == ["step_00000001"]
        assert sft(disk / "run", tmp_path / "logs", "--resume")[0] == 0
        assert differences(checkpoint(whole, 4), checkpoint(disk / "run", 4)) == ""


def test_a_read_only_output_directory_is_refused_at_start(tmp_path):
    with mounted(tmp_path / "disk", 8 * MIB) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, output = sft(disk / "run", tmp_path / "logs")
        assert code == 1
        error = one_error(output)
        assert "cannot make the run directory" in error and "Read-only file system" in error


def test_a_resume_from_a_read_only_run_into_another_directory(tmp_path, whole):
    """A fork never writes to its source."""
    with mounted(tmp_path / "disk", 64 * MIB) as disk:
        assert sft(disk / "run", tmp_path / "logs", "--stop-step", "2")[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, output = sft(tmp_path / "fork", tmp_path / "logs", "--resume.dir", str(disk / "run"))
        assert code == 0, output
    assert differences(checkpoint(whole, 4), checkpoint(tmp_path / "fork", 4)) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT and fallocate are Linux's")
def test_a_large_file_on_a_small_disk_fails_before_its_first_byte(tmp_path):
    from trainer.core.files import DurableFile, file_hook

    operations = []
    with (
        mounted(tmp_path / "disk", 8 * MIB) as disk,
        file_hook(lambda operation, path: operations.append(operation)),
        pytest.raises(OSError, match="No space left on device"),
        DurableFile(disk / "a", 64 * MIB),
    ):
        pass
    assert operations == ["create", "allocate"]
