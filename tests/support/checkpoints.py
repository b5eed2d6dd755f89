"""Owners with real tensors for the checkpoint tests, and a few ways to hurt a file."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.train import CkptConfig, ResumeConfig


class Table:
    """An owner whose state is a nested dict: tensors are filled in place, the rest is replaced on load."""

    def __init__(self, **entries: Any):
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return self.entries

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state


class Network:
    """A module, plain or sharded."""

    def __init__(self, module: nn.Module):
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


class Optimizer:
    """AdamW with its state by parameter name; groups are updated in place."""

    def __init__(self, module: nn.Module, **settings: Any):
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.inner = torch.optim.AdamW(module.parameters(), **settings)
        for parameter in self.names:  # state exists from the start, so that there is something to load into
            self.inner.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state_dict(self) -> dict[str, Any]:
        (group,) = self.inner.param_groups
        state = {name: self.inner.state[parameter] for parameter, name in self.names.items()}
        return {"state": state, "group": {key: value for key, value in group.items() if key != "params"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.param_groups[0].update(state["group"])


class Run:
    """A tiny regression: module, AdamW and a counter, checkpointed as a run would be."""

    def __init__(self, run_dir: Path, *, mesh: Any = None, seed: int = 0, **ckpt: Any):
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3, bias=False))
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.module, mesh=mesh)
        self.optimizer = Optimizer(self.module, lr=0.1)
        self.progress = Table(step=0, tokens=0)
        self.app = AppState(model=Network(self.module), optimizer=self.optimizer, progress=self.progress)
        self.manager = CheckpointManager(
            run_dir, CkptConfig(**ckpt), self.app, describe=lambda: {"config": {"seed": seed}}
        )

    @property
    def step(self) -> int:
        return self.progress.entries["step"]

    def train(self, steps: int = 1) -> None:
        """Whole-batch steps, so that the data are the same on every rank and at every world size."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            batch = torch.randn(8, 6, generator=generator)
            loss = self.module(batch).square().mean()
            self.optimizer.inner.zero_grad()
            loss.backward()
            self.optimizer.inner.param_groups[0]["lr"] = 0.1 / (self.step + 1)
            self.optimizer.inner.step()
            self.progress.entries["step"] += 1
            self.progress.entries["tokens"] += 48

    def save(self) -> Path:
        return self.manager.save(self.step)

    def resume(self, **resume: Any) -> int | None:
        """Resumes and returns the step, None where there is nothing."""
        return None if self.manager.resume(ResumeConfig(**resume)) is None else self.step


def whole(state: dict[str, Tensor]) -> dict[str, bytes]:
    """Returns the bits of every tensor of a flat state, sharded ones gathered."""
    from torch.distributed.tensor import DTensor

    bits = {}
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full = full.detach().cpu().contiguous()
        head = f"{full.dtype} {tuple(full.shape)} ".encode()
        bits[name] = head + full.reshape(-1).view(torch.uint8).numpy().tobytes()
    return bits


def steps_of(run_dir: Path) -> list[int]:
    """Returns the committed steps of a run."""
    from trainer.checkpoint.discovery import Status, discover

    return [c.step for c in discover(run_dir / "checkpoints") if c.status is Status.COMMITTED and c.step is not None]


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def fails_at(k: int, error: Exception) -> Callable[[str, Path], None]:
    """Returns a file hook that raises `error` at the k-th operation (from 0) and at no other."""
    count = -1

    def hook(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == k:
            raise error

    return hook


def in_killed_process(function: Callable[[], object], k: int) -> bool:
    """Runs `function` in a forked process that is killed with SIGKILL right before its k-th file operation.

    Returns whether it was killed; False = it ended by itself, having had fewer operations.
    """
    from trainer.core.files import file_hook

    count = -1

    def hook(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == k:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with file_hook(hook):
                function()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
