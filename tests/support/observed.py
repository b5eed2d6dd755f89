"""Fine-tuning runs that write down what their state is after every step, and can be killed after a save.

In a module of its own: a new process that runs one imports this and nothing of the tests.
"""

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from support.runs import sft


def observed(run_dir: Path, log: Path, argv: list[str], save_at: int | None = None) -> None:
    """Trains, and appends a line to `log`.<rank> after every step: the step, the process, and a digest of the state.

    save_at: saves after this step, and kills the process when the next one is to begin.
    """
    from trainer.train import loop

    begin, take_step = loop._begin, loop.take_step

    def observed_begin(run: Any) -> bool:
        goes_on = begin(run)
        if save_at == 0:
            run.save()
        return goes_on

    def observed_step(run: Any, batch: Any) -> Any:
        if run.progress.step == save_at:
            _die_together(log, run.world)
        row = take_step(run, batch)
        with log.with_suffix(f".{run.world.rank}").open("a") as file:
            file.write(f"{run.progress.step} {os.getpid()} {digest(run)}\n")
        return row

    loop._begin, loop.take_step = observed_begin, observed_step
    sft(run_dir, *argv, *(("--ckpt.at", save_at) if save_at else ()))


def _die_together(log: Path, world: Any) -> None:
    """Kills this process once every rank is about to do so: none may still be waiting for what another one sends."""
    log.with_suffix(f".{world.rank}.dying").touch()
    while not all(log.with_suffix(f".{rank}.dying").exists() for rank in range(world.size)):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def digest(run: Any) -> str:
    """Returns a hash of all that a checkpoint of this moment would hold, as far as it lies on this rank."""
    import torch

    from trainer.optim.offload.tensors import local_part

    found = hashlib.sha256()
    for key, tensor in sorted(run.checkpoints.app.state_dict().items()):  # "json" has all that is no tensor
        part = local_part(tensor).contiguous()
        found.update(f"{key} {part.dtype} {list(part.shape)}".encode())
        found.update(part.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def digests(log: Path, rank: int) -> tuple[dict[int, str], set[int]]:
    """Returns step -> digest, and the processes that they come from."""
    lines = [line.split() for line in log.with_suffix(f".{rank}").read_text().splitlines()]
    return {int(step): found for step, _, found in lines}, {int(process) for _, process, _ in lines}
