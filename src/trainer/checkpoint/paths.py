"""Names inside a checkpoints directory, and opening a file of a checkpoint without being led outside it."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import CheckpointError, CorruptCheckpoint

MANIFEST = "manifest.json"
METADATA = "metadata.json"
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
SUPERSEDED = "superseded"

MAX_TABLE_BYTES = 512 << 20
"""Largest JSON file of a checkpoint that is read: a thousand ranks of a thousand tensors need less."""

_STEP = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"step_\d{8,}\.tmp-[0-9a-f]+")
_REMOVED = re.compile(r"step_\d{8,}(\.\d+)?\.removed-[0-9a-f]+")
_REPLACED = re.compile(r"step_(\d{8,})\.replaced-[0-9a-f]+")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARD = re.compile(r"rank_\d{5,}\.safetensors")
_OURS = re.compile(r"rank_\d{5,}\.safetensors|metadata\.json|manifest\.json|\.lock")


def step_name(step: int) -> str:
    """Returns the directory name of a step: "step_00000012"."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a committed directory's name, else None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def replaced_step_of(name: str) -> int | None:
    """Returns the step of a directory that was moved aside while its step is written anew, else None."""
    match = _REPLACED.fullmatch(name)
    return int(match[1]) if match else None


def is_temporary(name: str) -> bool:
    """Whether the name is that of a save in progress, or of one that was interrupted."""
    return _TEMPORARY.fullmatch(name) is not None


def is_removed(name: str) -> bool:
    """Whether the name is that of a checkpoint whose removal has begun."""
    return _REMOVED.fullmatch(name) is not None


def is_our_file(name: str) -> bool:
    """Whether a checkpoint directory of this trainer may hold a file of this name."""
    return _OURS.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether a file of this name holds tensors; the others of a checkpoint are tables about them."""
    return _SHARD.fullmatch(name) is not None


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def check_plain_name(name: object, where: str) -> str:
    """Returns `name` if it is a bare file name.

    Raises:
        CorruptCheckpoint: it has a separator, starts with a dot, or is no text: it could lead out of the directory.
    """
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CorruptCheckpoint(
            f"{where}: {name!r} is not a plain file name inside the checkpoint; refusing to follow it"
        )
    return name


class MissingFile(CorruptCheckpoint):
    """A file of a checkpoint is not there."""


def open_inside(directory: Path, name: str) -> int:
    """Returns a read-only descriptor of the regular file `name` directly inside `directory`.

    Raises:
        MissingFile: there is no such file.
        CorruptCheckpoint: no plain name, a symlink, or not a regular file.
    """
    return _open_inside(directory, name)[0]


def _open_inside(directory: Path, name: str) -> tuple[int, int]:
    """Returns (descriptor, size in bytes), as `open_inside`."""
    path = os.path.join(directory, check_plain_name(name, str(directory)))
    try:
        # O_NONBLOCK: opening a FIFO that somebody put there would wait for ever
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} is missing") from error
    except OSError as error:
        reason = "is a symlink; refusing to follow it" if error.errno == errno.ELOOP else f"{error.strerror}"
        raise CorruptCheckpoint(f"{path}: {reason}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CorruptCheckpoint(f"{path} is not a regular file")
    return fd, status.st_size


def read_inside(directory: Path, name: str) -> bytes:
    """Returns all bytes of a small file of a checkpoint, opened as `open_inside` does.

    Raises:
        CorruptCheckpoint: as `open_inside`, or it is larger than any JSON file of a checkpoint.
    """
    fd, size_bytes = _open_inside(directory, name)
    try:
        if size_bytes > MAX_TABLE_BYTES:
            raise CorruptCheckpoint(f"{directory / name} has {size_bytes} bytes; at most {MAX_TABLE_BYTES} are read")
        data = os.read(fd, size_bytes + 1)  # the byte more tells the end: one call for a file that is not growing
        while len(data) < size_bytes and (more := os.read(fd, size_bytes - len(data))):
            data += more
        return data
    except OSError as error:
        raise CorruptCheckpoint(f"{directory / name}: {error.strerror}") from error
    finally:
        os.close(fd)


def read_exactly(fd: int, view: memoryview, position: int, path: Path) -> None:
    """Fills `view` (bytes) from `position` of an open file.

    Raises:
        CorruptCheckpoint: the file ends before.
    """
    while len(view):
        count = os.preadv(fd, [view], position)
        if count == 0:
            raise CorruptCheckpoint(f"{path} ends at byte {position}, {len(view)} bytes too early")
        view, position = view[count:], position + count


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turns an ``OSError`` inside the block into a CheckpointError: what was done, to which path, and why it failed."""
    try:
        yield
    except OSError as error:
        path = f" ({error.filename})" if error.filename is not None else ""
        raise CheckpointError(f"{what}: {error.strerror or error}{path}") from error
