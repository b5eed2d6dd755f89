"""New processes that start quickly: forked from a server that has imported the trainer and done nothing else."""

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from support.pool import launcher_environment

PRELOADED = ["support.preloaded"]


def run_fresh(function: Callable[..., None], world_size: int, *args: Any, timeout: float = 240.0) -> list[int]:
    """Runs module-level `function(*args)` in `world_size` new processes and returns their exit codes in rank order.

    Each has torchrun's environment variables, if there are several; the code of a killed one is the signal's negative
    number. An exception in one fails the call with its traceback.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, receivers = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_enter, args=(sender, rank, world_size, port, function, args))
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        failures = _messages(receivers, timeout)
        if failures:
            raise RuntimeError("\n".join(failures))
        for process in processes:
            process.join(5.0)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _messages(receivers: list[Connection], timeout: float) -> list[str]:
    """Returns what the processes sent before they ended."""
    waiting, found = list(receivers), []
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return [*found, f"{len(waiting)} processes did not end"]
        for receiver in ready:
            assert isinstance(receiver, Connection)
            waiting.remove(receiver)
            try:
                found.append(receiver.recv())
                deadline = min(deadline, time.monotonic() + 3.0)  # the others may wait for this one for ever
            except EOFError:
                pass  # it ended without a word
    return found


def _enter(sender: Any, rank: int, world_size: int, port: int, function: Callable[..., None], args: tuple) -> None:
    if world_size > 1:
        os.environ.update(launcher_environment(rank, world_size, port))
    try:
        function(*args)
    except BaseException:
        sender.send(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None
