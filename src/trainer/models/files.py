"""A Hugging Face model directory: finding it and reading its safetensors, a few rows at a time."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.core.distributed import on_main
from trainer.core.files import local_path
from trainer.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {"F64", "F32", "F16", "BF16"}


def resolve_model_dir(name: str, key: str = "model.name") -> Path:
    """Returns the local directory that the config names under `key`; a hub name is downloaded (by rank 0) into the Hugging
    Face cache.

    Raises:
        ModelError: there is no such directory and the hub does not have it or cannot be reached; or it is a checkpoint.
    """
    if not name:
        raise ModelError(f"{key} is not set; give a Hugging Face model directory or hub name")
    try:
        path = local_path(name)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{key} = {name[:200]!r} cannot be opened: {error}; correct the path") from error
    if (path / "manifest.json").exists() and not (path / "config.json").exists():
        raise ModelError(
            f"{path} is a checkpoint of a run and no model directory. To go on with that run: --resume.dir {path}; to start "
            f"a new one from its weights: trainer ckpt export {path} OUT, then model.name = OUT"
        )
    if path.is_dir():
        return path
    # A hub name is "name" or "owner/name"; anything else can only be a path.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(f"{key} = {name!r} is not a directory (looked for {path.absolute()}); correct the path")
    return Path(on_main(_download, name, key))


def _download(name: str, key: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except Exception as error:  # the hub client raises many kinds; each means the same to the user
        raise ModelError(
            f"{key} = {name!r} is neither a local directory nor available from the Hugging Face hub: {error}"
        ) from error


class WeightFiles:
    """The tensors of a model directory by name, read lazily.

    Raises:
        ModelError: there are no safetensors, a file of the index is missing, or a file cannot be read.
    """

    def __init__(self, model_dir: Path, files: dict[str, Any]):
        self.model_dir = model_dir
        self._files = files  # name of a tensor -> open safetensors file

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """Returns these rows (first dimension) of a tensor, in the file's dtype, on CPU; only they are read."""
        part = self._files[name].get_slice(name)
        if part.get_dtype() not in _FLOATS:
            raise ModelError(
                f"{self.model_dir}: {name} has dtype {part.get_dtype()}; training needs float weights (not quantized)"
            )
        try:
            return part[rows] if part.get_shape() else self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.model_dir}: {name} cannot be read: {error}") from error


@contextmanager
def open_weights(model_dir: Path) -> Iterator[WeightFiles]:
    """Opens `model.safetensors`, or all files of `model.safetensors.index.json`."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path, expected in _weight_paths(model_dir).items():
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise ModelError(f"{path} is missing, but {INDEX} lists it; download the model again") from None
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}; download it again") from error
            names = set(file.keys())
            if expected is not None and names != expected:
                absent, extra = sorted(expected - names), sorted(names - expected)
                what = f"lacks {absent[0]}" if absent else f"holds {extra[0]}, which {INDEX} does not place there"
                raise ModelError(f"{path} {what}; file and index do not belong together")
            files |= dict.fromkeys(names, file)
        yield WeightFiles(model_dir, files)


def has_weights(model_dir: Path) -> bool:
    """Whether there are safetensors files to load a model from."""
    return (model_dir / INDEX).exists() or (model_dir / SINGLE).exists()


def _weight_paths(model_dir: Path) -> dict[Path, set[str] | None]:
    """Returns each weight file with the tensors its index expects in it (None: no index)."""
    index = model_dir / INDEX
    if not index.exists():
        if (model_dir / SINGLE).exists():
            return {model_dir / SINGLE: None}
        others = sorted(path.name for path in model_dir.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {', '.join(others[:3])}: convert them to safetensors)" if others else ""
        raise ModelError(
            f"{model_dir} has neither {SINGLE} nor {INDEX}{found}; set model.random_init = true to train from scratch"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = next((file for file in weight_map.values() if Path(file).name != file), None)
        if outside is not None:
            raise ModelError(f"{index} names {outside!r}, which is no file of that directory; refusing to follow it")
        by_file: dict[Path, set[str] | None] = {model_dir / file: set() for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            names = by_file[model_dir / file]
            assert names is not None
            names.add(name)
    except OSError as error:
        raise ModelError(f"{index} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}; download it again") from error
    return by_file
