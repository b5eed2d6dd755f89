"""Files that torch.save wrote, read as tensors and plain values; what would run code or fill the memory is refused."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.paths import os_errors
from trainer.errors import CheckpointError, CorruptCheckpoint


def load_file(path: Path) -> Any:
    """Returns what a .pt or .bin file holds: tensors on CPU and plain values.

    Raises:
        CheckpointError: it is missing, no regular file, or holds more than that (naming what).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    with open(fd, "rb") as file, os_errors(f"cannot read {path}"):
        _check_archive(file, os.fstat(fd).st_size, str(path))
        file.seek(0)
        return _load(file, str(path))


def load_bytes(data: bytes, where: str) -> Any:
    """As `load_file`, of bytes in memory."""
    _check_archive(io.BytesIO(data), len(data), where)
    return _load(io.BytesIO(data), where)


def _check_archive(file: Any, size_bytes: int, where: str) -> None:
    """torch.save writes uncompressed zips. Anything else is not read: a few compressed bytes can stand for terabytes."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CorruptCheckpoint(
            f"{where} is not a file of torch.save in its zip format ({error}); older ones are bare pickles and not read"
        ) from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CorruptCheckpoint(f"{where} is compressed, which torch.save never does; not read")
    total = sum(entry.file_size for entry in entries)
    if total > size_bytes:
        raise CorruptCheckpoint(f"{where} claims {total} bytes of contents in {size_bytes} bytes; not read")


def _load(file: Any, where: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = next(
            (line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), ""
        )
        raise CheckpointError(
            f"{where} holds more than tensors and plain values, and nothing of it was run: {refused or error}"
        ) from error
    except RecursionError as error:
        raise CorruptCheckpoint(f"{where} is nested too deeply") from error
    except (
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
    ) as error:
        raise CorruptCheckpoint(
            f"{where} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
