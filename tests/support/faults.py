"""Faults put into the file operations of a real run: the k-th operation on its checkpoints fails, or the process dies."""

import errno
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts import warm
from support.runs import DEBUG, checkpoint, differences, metrics, samples

STEPS = 4
SHORT = [
    *("--max-steps", str(STEPS), "--ckpt.interval", "1", "--ckpt.keep-last", "1", "--ckpt.no-export-weights"),
    *("--data.batch-size", "2", "--data.seq-len", "64", "--val.interval", "0", "--data.val-documents", "0"),
    *("--runtime.gc-interval", "0", "--log.level", "error"),
]
"""The debug config in its shortest form. Each step is saved, and the checkpoint before it removed."""

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
_installed: list[Any] = []


def install(hook: Callable[[str, Path], None]) -> None:
    """Sets a file hook for the rest of this process."""
    from trainer.core.files import file_hook

    hooked = file_hook(hook)
    hooked.__enter__()
    _installed.append(hooked)  # or it would be collected, and so taken away


@dataclass(frozen=True)
class Fault:
    """What happens right before the k-th operation below checkpoints/ (from 0) on one rank: an error, or SIGKILL."""

    kind: Literal["fail", "kill", "record"]
    rank: int = 0
    k: int = -1
    operation: str = ""

    @property
    def errno(self) -> int:
        return ERRORS[self.k % len(ERRORS)]

    def __str__(self) -> str:
        return f"{self.kind} at {self.k} ({self.operation}) on rank {self.rank}"


def arm(rank: int, fault: Fault, record: str) -> None:
    """Arms this process; for "record", the operations are appended to a file instead."""
    count, lock = -1, threading.Lock()

    def hook(operation: str, path: Path) -> None:
        nonlocal count
        if "checkpoints" not in path.parts:
            return
        with lock:
            count += 1
            mine = count == fault.k and rank == fault.rank
            if fault.kind == "record":
                with open(f"{record}.{rank}", "a") as file:
                    file.write(f"{operation} {path.name.split('.tmp-')[0].split('.removed-')[0]}\n")
        if mine and fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and fault.kind == "fail":
            raise OSError(fault.errno, os.strerror(fault.errno))

    install(hook)


class FaultSuite:
    """Runs of one world size, in the foreground or background, that are hurt during a save and resumed."""

    def __init__(self, place: Path, *, world_size: int, background: bool, step: int):
        """
        place: an empty folder.
        step: the one whose save is hurt; after that of the last, a resumed run has nothing to train and to save.
        """
        self.place = place
        self.step = step
        self.world_size = world_size
        self.flags = [*SHORT, "--ckpt.async"] if background else SHORT
        self.whole, self.template = place / "whole", place / "template"
        self._run(self.whole)
        self._run(self.template, "--stop-step", str(step - 1))

    def _run(self, run_dir: Path, *flags: str, fault: Fault | None = None, record: Path | None = None, ok: bool = True):
        logs = run_dir.with_suffix(".logs")
        logs.mkdir(exist_ok=True)
        argv = ["sft", *DEBUG, "--output-dir", str(run_dir), *self.flags, *flags]
        prepare = {"prepare": arm, "args": (fault, str(record))} if fault else {}
        run = warm.start(argv, logs, nproc=self.world_size, **prepare)
        codes = run.wait()
        assert not ok or not any(codes), f"{codes}: {run.output()}"
        return codes, run.output()

    def faults(self) -> list[Fault]:
        """Returns every fault there is: each operation of the save and of the retention after it, on each rank, failing or
        never happening, and the death right after the last one."""
        run_dir, record = shutil.copytree(self.template, self.place / "recorded"), self.place / "operations"
        self._run(run_dir, "--resume", "--stop-step", str(self.step), fault=Fault("record"), record=record)
        found = []
        for rank in range(self.world_size):
            operations = Path(f"{record}.{rank}").read_text().splitlines()
            for k, operation in enumerate(operations):
                found += [Fault("fail", rank, k, operation), Fault("kill", rank, k, operation)]
            if self.step < STEPS:
                found.append(Fault("kill", rank, len(operations), "next save"))
        return found

    def check(self, fault: Fault) -> str:
        """Hurts a run, resumes it, and holds the end against the run that never stopped. Returns how the first one ended.

        Raises:
            AssertionError: anything is not as promised.
        """
        run_dir = self.place / f"{fault.kind}-{fault.rank}-{fault.k}"
        shutil.copytree(self.template, run_dir)
        codes, output = self._run(run_dir, "--resume", fault=fault, ok=False)
        if fault.kind == "kill":
            assert codes[fault.rank] == -signal.SIGKILL, (fault, codes, output)
            assert all(code != 0 for code in codes), (fault, codes)
            ending = "killed"
        else:
            ending = self._check_error(fault, codes, output)
        steps = {path.name for path in (run_dir / "checkpoints").iterdir() if "." not in path.name}
        assert steps, (fault, "nothing is left to resume from")
        if not any(codes):
            assert ending == "went on"
        else:
            self._run(run_dir, "--resume")
        assert differences(checkpoint(self.whole, STEPS), checkpoint(run_dir, STEPS)) == "", fault
        assert metrics(run_dir) == metrics(self.whole), fault
        assert samples(run_dir) == samples(self.whole), fault
        left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        assert left == ["step_00000004"] or (ending == "went on" and "step_00000004" in left), (fault, left)
        shutil.rmtree(run_dir)
        shutil.rmtree(run_dir.with_suffix(".logs"))
        return ending

    def _check_error(self, fault: Fault, codes: list[int], output: str) -> str:
        """A save that fails ends the run with one error; what fails after the commit is a warning."""
        assert "Traceback" not in output, (fault, output)
        if not any(codes):
            assert fault.operation.split()[0] in ("rename", "fsync", "unlink", "rmtree"), (fault, output)
            return "went on"
        assert set(codes) == {1}, (fault, codes, output)
        errors = [line for line in output.splitlines() if line.startswith("error")]
        assert len(errors) == self.world_size, (fault, output)
        assert all(os.strerror(fault.errno) in line and "step" in line for line in errors), (fault, errors)
        return "failed"


def tally(endings: list[str]) -> str:
    counts = Counter(endings)
    return f"{sum(counts.values())} points injected: " + ", ".join(f"{n} {ending}" for ending, n in counts.items())
