"""Weights on disk for the servers: one directory for each version, there as a whole or not at all."""

import hashlib
import json
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.core import files
from trainer.core.distributed import on_main, raise_together, world_from_env
from trainer.core.log import logger
from trainer.errors import TrainerError, TrainingError
from trainer.models.base import CausalLM
from trainer.models.hf import MAX_FILE_BYTES, file_names, gathered

MANIFEST = "published.json"
"""Written last, and the directory gets its name after that: {"version", "files": {name: bytes}}."""


@dataclass(frozen=True)
class Publication:
    """What one call of `WeightsFolder.publish` wrote."""

    path: Path
    weights_bytes: int
    seconds: float


class WeightsFolder:
    """The directories of published versions, and who still needs which.

    A version is removed once every reader has acknowledged it or a newer one; the newest stays, for servers that start
    again. Only rank 0's object keeps the books, for any of its threads; `publish` is called on all ranks.
    """

    def __init__(self, root: Path):
        self.root = root
        self._versions: dict[int, Path] = {}
        self._acknowledged: dict[str, int] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Removes what a run that was killed left here, and makes the folder.

        Raises:
            TrainingError: the folder cannot be made.
        """
        try:
            shutil.rmtree(self.root, ignore_errors=True)
            files.make_dirs(self.root)
        except OSError as error:
            raise TrainingError(
                f"{self.root} cannot hold published weights: {error}; set engine.weights_dir"
            ) from error

    def path(self, version: int) -> Path:
        """Returns the directory of a version, whether it is there or not."""
        return self.root / f"version_{version:08d}"

    @property
    def versions(self) -> list[int]:
        """The versions that are on disk, oldest first."""
        return sorted(self._versions)

    @torch.no_grad()
    def publish(self, model: CausalLM, version: int, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES):
        """Writes the model's present weights as `version` and returns the `Publication`. Collective; rank 0 writes.

        Names are those of transformers, a tied weight is there once; floats are cast to `dtype`, which is what the
        trainer's own forward computes with.

        Raises:
            TrainingError: the disk refuses; on every rank.
        """
        started, world = time.perf_counter(), world_from_env()
        target = self.path(version)
        staging = target.with_name(f".{target.name}.tmp")
        names = file_names(model, max_file_bytes)
        error: TrainerError | None = None
        sizes: dict[str, int] = {}
        if world.is_main:
            shutil.rmtree(staging, ignore_errors=True)  # of a publication that failed
        # Every rank gathers to the end, whatever rank 0 meets.
        for file_name, tensors in gathered(model, names, world, None):
            if world.is_main and error is None:
                try:
                    sizes[file_name] = _save(staging / file_name, tensors, dtype)
                except (OSError, RuntimeError) as problem:  # safetensors reports a full disk as its own RuntimeError
                    error = _refused(target, problem)
        raise_together(error, f"publishing weights as {target}")
        on_main(self._commit, version, staging, sizes)
        return Publication(target, sum(sizes.values()), time.perf_counter() - started)

    def acknowledge(self, reader: str, version: int) -> None:
        """`reader` has read all of `version`, and will read none before it."""
        with self._lock:
            self._acknowledged[reader] = version
            self._remove_unneeded()

    def expect(self, reader: str) -> None:
        """`reader` will read versions from now on: none newer than what it acknowledged goes before it has."""
        with self._lock:
            self._acknowledged.setdefault(reader, -1)

    def forget(self, reader: str) -> None:
        """`reader` is gone and reads nothing; when it comes back it reads the newest."""
        with self._lock:
            self._acknowledged.pop(reader, None)
            self._remove_unneeded()

    def close(self) -> None:
        """Removes everything."""
        with self._lock:
            self._versions.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def _commit(self, version: int, staging: Path, sizes: dict[str, int]) -> None:
        target = self.path(version)
        try:
            text = json.dumps({"version": version, "files": sizes}, indent=2)
            files.write_new(staging / MANIFEST, text.encode())
            if target.exists():
                shutil.rmtree(target)
            files.rename(staging, target)
        except OSError as error:
            raise _refused(target, error) from error
        with self._lock:
            self._versions[version] = target
            self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        oldest = min(self._acknowledged.values(), default=-1)
        for version in self.versions[:-1]:
            if version <= oldest:
                try:
                    files.remove_tree(self._versions.pop(version), MANIFEST)
                except OSError as error:  # a full disk will say so by itself
                    logger.warning(f"published weights {self.path(version)} could not be removed: {error}")


def folder_for(run_dir: Path, weights_dir: str | None) -> Path:
    """Returns where a run publishes: a folder of its own, the same after a resume."""
    if weights_dir is None:
        return run_dir / "weights-served"
    name = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=4).hexdigest()
    return Path(weights_dir).expanduser() / f"{run_dir.name}-{name}"


def _save(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(cast, path, metadata={"format": "pt"})
    return path.stat().st_size


def _refused(target: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"weights cannot be published as {target}: {error}; free some space, or set engine.weights_dir to another disk"
    )
