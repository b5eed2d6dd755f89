"""Ways to write and read the state of a run, ours and others', each as one function over the same tensors."""

# pyright: reportPrivateImportUsage=false
# torch documents these names without listing them in __all__.

import fcntl
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.staging import Stager
from trainer.config.train import CkptConfig, ResumeConfig
from trainer.core import files

PIECE_BYTES = 8 << 20


class Table:
    """An owner whose state is a dict of tensors and values."""

    def __init__(self, entries: dict[str, Any]):
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return self.entries

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state


def make_state(hidden_size: int, layers: int, vocab_size: int) -> dict[str, Tensor]:
    """Returns what AdamW and a Llama of this size have on their hosts: four tensors per parameter, in float32."""
    shapes = {"embed": (vocab_size, hidden_size), "norm": (hidden_size,)}
    for layer in range(layers):
        for name in "qkvo":
            shapes[f"layers.{layer}.{name}"] = (hidden_size, hidden_size)
        for name in ("gate", "up"):
            shapes[f"layers.{layer}.{name}"] = (8 * hidden_size // 3, hidden_size)
        shapes[f"layers.{layer}.down"] = (hidden_size, 8 * hidden_size // 3)
        for name in ("norm1", "norm2"):
            shapes[f"layers.{layer}.{name}"] = (hidden_size,)
    torch.manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"{name}.{kind}"] = torch.randn(shape)
        state[f"{name}.step"] = torch.tensor(1.0)
    return state


@dataclass
class Bench:
    """The state, a folder on the disk that is measured, and memory for the raw reads and writes: uint8 [size_bytes]."""

    state: dict[str, Tensor]
    folder: Path
    flat: np.ndarray
    steps: int = 0
    saver: tuple[CheckpointManager, Table] | None = None
    stager: Stager = field(default_factory=lambda: Stager(copy=False))

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state.values())

    # -- writing: each leaves `folder/out`, durable ------------------------------------------------------------------

    def raw_buffered(self) -> None:
        fd = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(self.flat), PIECE_BYTES):
            os.write(fd, self.flat[start : start + PIECE_BYTES].data)
        os.fsync(fd)
        os.close(fd)

    def raw_direct(self) -> None:
        fd = os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        os.posix_fallocate(fd, 0, len(self.flat))
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(
                    lambda start: os.pwrite(fd, self.flat[start : start + PIECE_BYTES].data, start),
                    range(0, len(self.flat), PIECE_BYTES),
                )
            )
        os.fsync(fd)
        os.close(fd)

    def ours(self) -> None:
        """A whole save: manifest, commit and retention included. Not a run's first, which also makes the plan."""
        self.saver = self.saver or self.manager(self.folder / "out")
        self.save(*self.saver)

    def ours_bare(self) -> None:
        """The bytes alone, through the same writer: no checksum, no tables, no manifest, no commit."""
        (self.folder / "out").mkdir()
        shard = self.stager.stage(self.state)
        with no_checksums(), files.DurableFile(self.folder / "out" / "shard", shard.plan.size_bytes) as file:
            for part in shard.parts():
                file.write(part)
            file.finish()

    def plain_dcp(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(self.state), checkpoint_id=self.folder / "out", no_dist=True)

    def torch_save(self) -> None:
        with open(self.folder / "out", "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors_save(self) -> None:
        safetensors.torch.save_file(self.state, self.folder / "out")
        fd = os.open(self.folder / "out", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    # -- reading: each fills the live tensors from what its partner wrote --------------------------------------------

    def raw_read(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        for start in range(0, len(self.flat), PIECE_BYTES):
            os.preadv(fd, [self.flat[start : start + PIECE_BYTES].data], start)
        os.close(fd)

    def load_ours(self, path: Path, verify: str) -> None:
        manager, _ = self.manager(path, verify=verify)
        assert manager.resume(ResumeConfig()) is not None

    def load_dcp(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(self.state), checkpoint_id=path, no_dist=True)

    def load_torch(self, path: Path) -> None:
        self._take(torch.load(path, weights_only=True))

    def load_safetensors(self, path: Path) -> None:
        self._take(safetensors.torch.load_file(path))

    def _take(self, loaded: dict[str, Tensor]) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    # -- memory --------------------------------------------------------------------------------------------------------

    def memcpy(self) -> None:
        """The state's tensors into memory that is warm, one after the other: what a copy of the state cannot do without."""
        position = 0
        for tensor in self.state.values():
            source = tensor.reshape(-1).view(torch.uint8).numpy()
            np.copyto(self.flat[position : position + source.nbytes], source)
            position += source.nbytes

    # -- ours ----------------------------------------------------------------------------------------------------------

    def manager(self, run_dir: Path, **ckpt: Any) -> tuple[CheckpointManager, Table]:
        """Returns the checkpoints of a run that has this state, and its counter."""
        progress = Table({"step": 0})
        weights = {name: tensor for name, tensor in self.state.items() if name.endswith(".weight")}
        rest = {name: tensor for name, tensor in self.state.items() if name not in weights}
        app = AppState(model=Table(weights), optimizer=Table(rest), progress=progress)
        config = CkptConfig.model_validate({"keep_last": 1, **ckpt})
        return CheckpointManager(run_dir, config, app, describe=lambda: {"config": {}}), progress

    def save(self, manager: CheckpointManager, progress: Table) -> None:
        self.steps += 1
        progress.entries = {"step": self.steps}
        manager.save(self.steps)


@contextmanager
def bench(state: dict[str, Tensor], place: Path) -> Iterator[Bench]:
    folder = place / "checkpoint-bench"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    flat = np.frombuffer(mmap.mmap(-1, -(-size_bytes // 4096) * 4096), dtype=np.uint8)
    made = Bench(state, folder, flat)
    made.memcpy()
    try:
        yield made
    finally:
        shutil.rmtree(folder)


@contextmanager
def no_checksums() -> Iterator[None]:
    class Nothing:
        def update(self, data: Any) -> None:
            pass

        def hexdigest(self) -> str:
            return ""

    before, files.xxhash.xxh3_64 = files.xxhash.xxh3_64, Nothing
    try:
        yield
    finally:
        files.xxhash.xxh3_64 = before


def timed(function: Callable[[], object]) -> float:
    """Returns the seconds that `function` takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop_cache(path: Path) -> None:
    """Makes the next read of a file, or of all files in a folder, come from the disk."""
    for file in [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
