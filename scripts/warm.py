"""Starts `trainer` in forked processes that begin with every import done: hundreds of short runs in minutes.

A server process (multiprocessing's "forkserver") imports the trainer once, computes nothing, and forks for each run. The
runs are those of `trainer ...` in every other respect: processes of their own, real signals, real exit codes.
"""

import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class WarmRun:
    """The processes of one run, one per rank."""

    processes: Sequence[Any]
    logs: Sequence[Path]

    def kill(self, sig: signal.Signals = signal.SIGKILL, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to the ranks (all of them by default) that are still there."""
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive() and process.pid is not None:
                os.kill(process.pid, sig)

    def wait(self, timeout: float = 300.0, grace_seconds: float = 10.0) -> list[int]:
        """Returns the exit codes in rank order, -9 for SIGKILL. When one rank has failed, the others get `grace_seconds`
        to end by themselves and are killed then, as torchrun does.

        Raises:
            TimeoutError: the run has not ended in time; it is killed.
        """
        deadline, failed = time.monotonic() + timeout, False
        while any(process.is_alive() for process in self.processes):
            if not failed and any(process.exitcode for process in self.processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace_seconds)
            if time.monotonic() > deadline:
                self.kill()
                if not failed:
                    raise TimeoutError(f"not ended after {timeout} s:\n{self.output()}")
            for process in self.processes:
                if process.is_alive():
                    process.join(0.05)
                    break
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        """Returns what all ranks have written to stdout and stderr."""
        return "".join(log.read_text(errors="replace") for log in self.logs if log.exists())


def start(
    argv: Sequence[str], logs: Path, *, nproc: int = 1, prepare: Callable[..., None] | None = None, args: tuple = ()
) -> WarmRun:
    """Starts ``trainer <argv>`` on `nproc` ranks.

    logs: an existing folder for the output of the ranks; what is there is overwritten.
    prepare: called as ``prepare(rank, *args)`` in each rank before the trainer; of a module that can be imported.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [logs / f"rank_{rank}.txt" for rank in range(nproc)]
    processes = []
    for rank, log in enumerate(files):
        target_args = ([str(word) for word in argv], rank, nproc, port, log, prepare, args)
        processes.append(_context().Process(target=_rank, args=target_args, daemon=True))
    for process in processes:
        process.start()
    return WarmRun(processes, files)


@cache
def _context():
    """Starts the server. It takes sys.path from its environment alone, and passes over an import that fails."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([f"{__name__}_imports"])
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [before.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",  # a pool of threads would not survive a fork
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _rank(argv: list[str], rank: int, nproc: int, port: int, log: Path, prepare: Any, args: tuple) -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    if nproc > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(nproc),
            LOCAL_WORLD_SIZE=str(nproc),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        assert "trainer.sft.train" in sys.modules, "the server has not imported the trainer"
        if prepare is not None:
            prepare(rank, *args)
        from trainer.cli.main import main

        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking the interpreter apart would cost as much as a step
