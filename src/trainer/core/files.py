"""Every durable file operation of the package, in one place.

"Durable" means: once the call returns, a power cut does not undo it. Each operation first announces itself to one hook,
so that a test can make the k-th operation fail, or kill the process right before it. Errors leave here as ``OSError``;
the callers, who know what the file was for, turn them into a ``TrainerError``.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

Hook = Callable[[str, Path], None]

READ_BYTES = 8 << 20  # per read while hashing; large enough for full disk speed, small enough to stay in cache

_hook: Hook | None = None  # the package's only mutable global: fault injection has to reach every thread


@contextmanager
def file_hook(hook: Hook) -> Iterator[None]:
    """Calls `hook(operation, path)` before each operation below while the block runs.

    Operations are "create", "write", "fsync", "mkdir", "rename", "replace", "unlink" and "rmtree". What the hook raises
    is raised by the operation.
    """
    global _hook
    previous, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = previous


def _announce(operation: str, path: Path) -> None:
    if _hook is not None:
        _hook(operation, path)


@dataclass(frozen=True)
class FileRecord:
    """What a file must look like on disk."""

    size_bytes: int
    xxh3: str
    """xxh3-64 of all bytes, 16 hex digits."""


class DurableFile:
    """A new file, written front to back and hashed on the way; `finish` puts it on disk.

    A context manager: leaving the block closes the file; only `finish` makes it durable.

    Raises:
        FileExistsError: `path` exists; nothing is ever overwritten.
    """

    def __init__(self, path: Path):
        self.path = path
        self._hash = xxhash.xxh3_64()
        self._size_bytes = 0
        _announce("create", path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        _announce("write", self.path)
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        for start in range(0, len(view), READ_BYTES):  # hashed and written piece by piece, while it is in cache
            piece = view[start : start + READ_BYTES]
            self._hash.update(piece)
            _write_all(self._fd, piece)
        self._size_bytes += len(view)

    def finish(self) -> FileRecord:
        """Syncs the file to disk and returns its size and checksum."""
        _announce("fsync", self.path)
        os.fsync(self._fd)
        return FileRecord(self._size_bytes, self._hash.hexdigest())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]


def write_new(path: Path, data: bytes) -> FileRecord:
    """Writes a file that does not exist yet and syncs it; the directory entry is durable after `fsync_dir`."""
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def write_atomic(path: Path, data: bytes) -> FileRecord:
    """Replaces `path` by `data`: at every instant, and after a crash, it holds the old bytes or the new ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        record = write_new(temporary, data)
        _announce("replace", path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)
    return record


def make_dir(path: Path) -> None:
    """Creates a directory that does not exist yet and makes its name durable."""
    _announce("mkdir", path)
    path.mkdir()
    fsync_dir(path.parent)


def make_dirs(path: Path) -> None:
    """Creates `path` and its parents where missing, each durably."""
    missing = [path]
    while not missing[-1].exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing[:-1]):
        _announce("mkdir", directory)
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)


def fsync_dir(path: Path) -> None:
    """Makes the names inside a directory durable: created, renamed and removed entries."""
    _announce("fsync", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Renames durably; within one file system this is atomic.

    Raises:
        FileExistsError: `target` exists (POSIX would silently replace an empty directory).
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists")
    _announce("rename", target)
    os.rename(source, target)
    fsync_dir(target.parent)
    if source.parent != target.parent:
        fsync_dir(source.parent)


def unlink(path: Path) -> None:
    _announce("unlink", path)
    path.unlink()


def remove_tree(path: Path, marker: str) -> None:
    """Removes a directory, durably without its `marker` file before anything else goes.

    Whatever interrupts the removal, what is left has no marker and so cannot be taken for whole.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a symlink; refusing to remove what it points to")
    if os.path.lexists(path / marker):
        unlink(path / marker)
        fsync_dir(path)
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            _announce("rmtree", Path(entry.path))
            shutil.rmtree(entry.path)
        else:
            unlink(Path(entry.path))
    _announce("rmtree", path)
    path.rmdir()


def xxh3(source: Path | int) -> str:
    """Returns the xxh3-64 of a whole file as 16 hex digits; `source` is a path or an open descriptor."""
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC) if isinstance(source, Path) else source
    try:
        digest = xxhash.xxh3_64()
        buffer = memoryview(bytearray(READ_BYTES))
        position = 0
        while count := os.preadv(fd, [buffer], position):
            digest.update(buffer[:count])
            position += count
        return digest.hexdigest()
    finally:
        if isinstance(source, Path):
            os.close(fd)


def xxh3_bytes(data: bytes) -> str:
    """Returns the xxh3-64 of `data` as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def free_bytes(path: Path) -> int:
    """Returns what an unprivileged user may still write on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
