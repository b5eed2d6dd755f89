"""Persistent gloo worker processes, shared by every multi-rank test of a session.

Starting a rank costs seconds of imports, so each world size keeps its processes until pytest ends.
"""

import atexit
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

_POOLS: dict[int, "RankPool"] = {}


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Runs module-level `function(*args)` on every rank of a gloo world and returns the results in rank order.

    Inside, torch.distributed is initialised and torchrun's environment variables are set. An exception on any rank
    fails the call with every rank's traceback.
    """
    if world_size not in _POOLS or not _POOLS[world_size].alive():
        _POOLS[world_size] = RankPool(world_size)
    try:
        return _POOLS[world_size].run(function, args, timeout)
    except BaseException:
        _POOLS.pop(world_size).close()  # a rank that failed may have left the others inside a collective
        raise


class RankPool:
    def __init__(self, world_size: int):
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, port), daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], args: tuple, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= {rank: "no answer" for rank in range(len(self.pipes)) if rank not in answers}
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    ok, answers[rank] = pipe.recv()
                except EOFError:
                    ok, answers[rank] = False, "the process died"
                if not ok:
                    failures[rank] = answers[rank]
                    deadline = min(deadline, time.monotonic() + 3.0)  # the others may wait for this rank for ever
        if failures:
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()


@atexit.register
def close_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns what torchrun would set for this rank of one host."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | dict.fromkeys(
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)
    )
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _serve(pipe: Any, rank: int, world_size: int, port: int) -> None:
    os.environ.update(launcher_environment(rank, world_size, port), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # skip the group's shutdown handshake: the other ranks may be gone already
