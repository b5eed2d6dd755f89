"""One process at a time in a directory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.core import lock
from trainer.core.lock import DirectoryLock

HOLD = """
import sys, time
from pathlib import Path
from trainer.core.lock import DirectoryLock
held = DirectoryLock()
assert held.acquire(Path(sys.argv[1])) is None
print("held", flush=True)
time.sleep(float(sys.argv[2]))
held.release()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)


def holder(directory: Path, seconds: float = 600) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named_and_a_dead_one_holds_nothing(tmp_path):
    process = holder(tmp_path)
    try:
        assert DirectoryLock().acquire(tmp_path) == f"process {process.pid} on {os.uname().nodename}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / ".lock").exists()
    held = DirectoryLock()
    assert held.acquire(tmp_path) is None
    held.release()
    assert not (tmp_path / ".lock").exists()
    held.release()


def test_one_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_SECONDS", 60.0)
    process = holder(tmp_path, 0.5)
    held = DirectoryLock()
    assert held.acquire(tmp_path) is None
    assert process.wait() == 0
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()  # not removed by the one before
    held.release()


def test_a_forked_process_does_not_hold_on(tmp_path):
    """As a loader process that outlives its killed parent for a moment would with flock."""
    ready, go = os.pipe()
    parent = os.fork()
    if parent == 0:
        assert DirectoryLock().acquire(tmp_path) is None
        if os.fork() == 0:
            os.write(go, b"x")
            signal.pause()
        signal.pause()
    os.read(ready, 1)
    child = next(int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        held = DirectoryLock()
        assert held.acquire(tmp_path) is None
        held.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_goes_with_its_directory_and_on_to_the_new_one(tmp_path):
    run_dir, aside = tmp_path / "run", tmp_path / "run.old-1"
    run_dir.mkdir()
    held = DirectoryLock()
    assert held.acquire(run_dir) is None
    run_dir.rename(aside)
    held.moved(aside)
    run_dir.mkdir()
    assert held.acquire(run_dir) is None
    assert not (aside / ".lock").exists() and (run_dir / ".lock").exists()
    held.release()
    assert list(run_dir.iterdir()) == []


def test_a_directory_that_was_replaced_is_not_the_locked_one(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    held = DirectoryLock()
    assert held.acquire(run_dir) is None
    run_dir.rename(tmp_path / "elsewhere")
    run_dir.mkdir()
    (run_dir / ".lock").write_text("of another process")
    held.release()
    assert (run_dir / ".lock").exists()


def test_a_symlink_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        DirectoryLock().acquire(tmp_path)
    assert (tmp_path / "precious").read_text() == "text"
