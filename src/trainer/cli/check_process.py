"""A training run in real processes, watched from outside and ended by a real signal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from trainer.config.kinds import kind_of
from trainer.errors import TrainerError

POLL_SECONDS = 0.001  # short beside any step, so that a signal comes in the step it is meant for

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class RunFailed(TrainerError):
    """A run that was started for a check ended otherwise than it should have."""

    exit_code = 2


class TrainingProcess:
    """``trainer sft|rl ARGV`` on `nproc` processes (torchrun where there is more than one); output goes to `log`.

    A context manager: leaving the block ends every process that is left.
    """

    def __init__(self, argv: Sequence[str], run_dir: Path, log: Path, nproc: int):
        self.run_dir, self.log, self.nproc = run_dir, log, nproc
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
        self.command = [sys.executable, *launcher, "-m", "trainer", kind_of(argv), *argv]
        self.started = time.monotonic()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env={name: value for name, value in os.environ.items() if name not in _LAUNCHER},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def wait(self, progress: Callable[[int], None], timeout_seconds: float | None = None) -> int:
        """Waits for the end and returns the exit code (negative: the signal); `progress` gets each new step.

        Raises:
            RunFailed: it is still running after `timeout_seconds`; it has been killed then.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.process.poll() is None:
            progress(self.last_step())
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
                raise RunFailed(
                    f"the run did not end within {timeout_seconds:.0f} seconds; its output is in {self.log}"
                )
            time.sleep(0.05)
        progress(self.last_step())
        return self.process.returncode

    def finish(self, progress: Callable[[int], None]) -> None:
        """Waits for a run that must succeed.

        Raises:
            RunFailed: it did not; the message has the end of its output.
        """
        code = self.wait(progress)
        if code != 0:
            raise RunFailed(f"the run ended with exit code {code}:\n{tail(self.log)}\n(all of it: {self.log})")

    def interrupt(self, number: int, after_step: int, checkpoint: int, progress: Callable[[int], None]) -> int:
        """Sends a signal once `after_step` is logged and the step `checkpoint` is committed; returns the last logged step.

        SIGKILL reaches every process of the run at once, as when a machine is lost; any other signal goes to the process
        that a scheduler would send it to (the run, or torchrun).

        Raises:
            RunFailed: the run ended by itself before.
        """
        manifest = self.run_dir / "checkpoints" / f"step_{checkpoint:08d}" / "manifest.json"
        committed = False
        while self.last_step() < after_step or not committed:
            committed = committed or manifest.exists()  # where few are kept, the next save removes it
            if self.process.poll() is not None:
                raise self._too_early(after_step)
            progress(self.last_step())
            time.sleep(POLL_SECONDS)
        if number == signal.SIGKILL:
            self.kill()
        else:
            self.process.send_signal(number)
        return self.last_step()

    def _too_early(self, after_step: int) -> RunFailed:
        code = self.process.returncode
        if code == 0:
            return RunFailed(
                f"the run was over before the signal could reach it after step {after_step}: its steps are too short; "
                "give more --steps"
            )
        return RunFailed(f"the run ended with exit code {code} before step {after_step}:\n{tail(self.log)}")

    def kill(self) -> None:
        """SIGKILL to all processes of the run; torchrun's workers have sessions of their own, so they are looked up."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def last_step(self) -> int:
        """Returns the newest step in metrics.jsonl; 0 before the first."""
        row = _last_row(self.run_dir / "metrics.jsonl")
        return int(row.get("step", 0))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def descendants(pid: int) -> list[int]:
    """Returns the processes below `pid`, children before their own (from /proc; none where there is no such thing)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(0), [])
        found += children
        todo += children
    return found


def _last_row(path: Path) -> dict[str, Any]:
    """Returns the last complete line of a growing JSON-lines file; {} before there is one."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}


def tail(log: Path, lines: int = 12) -> str:
    """Returns the last lines of a run's output, indented."""
    text = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join(f"  {line}" for line in text[-lines:])
