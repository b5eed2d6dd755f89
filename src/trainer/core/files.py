"""Every durable file operation of the package, in one place.

"Durable" means: once the call returns, a power cut does not undo it. Each operation first announces itself to one hook,
so that a test can make the k-th operation fail, or kill the process right before it. Errors leave here as ``OSError``;
the callers, who know what the file was for, turn them into a ``TrainerError``.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

Hook = Callable[[str, Path], None]

READ_BYTES = 8 << 20  # per read while hashing; large enough for full disk speed, small enough to stay in cache
PIECE_BYTES = 8 << 20  # per write
HASH_BYTES = 1 << 18  # hashed at a time right after they were copied: they fit into a core's own cache
LARGE_BYTES = 2 * PIECE_BYTES  # from here on a file is written past the page cache
BLOCK_BYTES = 4096  # direct writes begin and end, in memory and in the file, at multiples of this
_WRITERS = 2  # threads per large file: one piece is on its way to the disk while the next one is handed over

_hook: Hook | None = None  # the package's only mutable global: fault injection has to reach every thread


def local_path(name: str) -> Path:
    """Returns the path that a config names, "~" expanded, whether anything is there or not.

    Raises:
        OSError: permission is missing on the way there, or the name is too long.
        ValueError: the name holds a null byte.
        RuntimeError: it begins with the home of a user that does not exist.
    """
    path = Path(name).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    return path


@contextmanager
def file_hook(hook: Hook) -> Iterator[None]:
    """Calls `hook(operation, path)` before each operation below while the block runs.

    Operations are "create", "allocate", "write" (one piece), "fsync", "mkdir", "rename", "replace", "unlink" and
    "rmtree". What the hook raises is raised by the operation.
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
    """A new file, written front to back in pieces and hashed on the way; `finish` puts it on disk.

    A context manager: leaving the block closes the file; only `finish` makes it durable. What was given to `write` must
    not change before `finish` returns: large parts are written from where they lie, while the next ones are hashed.

    A large file goes past the page cache (O_DIRECT), two pieces in flight: that leaves the processor to the training,
    and was 1.3 GB/s where buffered writes made 0.4 to 1.0 on a disk of 1.4 GB/s. File systems that cannot do that get
    ordinary writes.

    Raises:
        FileExistsError: `path` exists; nothing is ever overwritten.
        OSError: from any method, once a write has failed.
    """

    def __init__(self, path: Path, size_bytes: int = 0):
        """`size_bytes`: what will be written, as far as it is known; a disk without room for it fails right away."""
        self.path = path
        self._hash = xxhash.xxh3_64()
        self._size_bytes = 0
        self._direct = False
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        self._free: list[mmap.mmap] = []
        self._buffer: mmap.mmap | None = None  # the piece that is being filled
        self._filled = 0
        _announce("create", path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if size_bytes >= LARGE_BYTES:
            try:
                _announce("allocate", path)
                _allocate(self._fd, size_bytes)
                self._direct = _set_direct(self._fd, True)
                self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="checkpoint-write")
            except BaseException:
                self.close()
                raise

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        position = 0
        while position < len(view):
            whole = view[position : position + PIECE_BYTES]
            if self._filled == 0 and len(whole) == PIECE_BYTES and not (self._direct and _address(whole) % BLOCK_BYTES):
                self._hash.update(whole)
                self._put(whole, None)
                position += PIECE_BYTES
            else:
                position += self._fill(view[position : position + min(HASH_BYTES, PIECE_BYTES - self._filled)])

    def _fill(self, part: memoryview) -> int:
        """Copies a little into the piece that is being filled; returns how much."""
        if self._buffer is None:
            self._buffer = self._free.pop() if self._free else self._new_piece()
        target = memoryview(self._buffer)[self._filled : self._filled + len(part)]
        if part.readonly:
            target[:] = part
        else:
            ctypes.memmove(_address(target), _address(part), len(part))  # as above, but lets the writers run meanwhile
        self._hash.update(part)  # while the copy has it in the cache
        self._filled += len(part)
        if self._filled == PIECE_BYTES:
            self._put_buffer()
        return len(part)

    def finish(self) -> FileRecord:
        """Syncs the file to disk and returns its size and checksum."""
        self._put_buffer()
        self._wait(0)
        if self._pool is not None:
            os.ftruncate(self._fd, self._size_bytes)  # the last block was written whole, or less came than was said
        _announce("fsync", self.path)
        os.fsync(self._fd)
        return FileRecord(self._size_bytes, self._hash.hexdigest())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # before the descriptor's number can be that of another file
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _new_piece(self) -> mmap.mmap:
        return huge_pages(PIECE_BYTES) if self._pool is not None else mmap.mmap(-1, PIECE_BYTES)

    def _put_buffer(self) -> None:
        if self._buffer is not None and self._filled:
            self._put(memoryview(self._buffer)[: self._filled], self._buffer)
            self._buffer, self._filled = None, 0

    def _put(self, piece: memoryview, buffer: mmap.mmap | None) -> None:
        """Writes the next bytes; `buffer` is the memory that they lie in if it can be used again."""
        _announce("write", self.path)
        position = self._size_bytes
        self._size_bytes += len(piece)
        if self._pool is None:
            _write_at(self._fd, piece, position)
            if buffer is not None:
                self._free.append(buffer)
            return
        if self._direct and len(piece) % BLOCK_BYTES:  # the end of the file, in the buffer, which has room
            assert buffer is not None
            piece = memoryview(buffer)[: -(-len(piece) // BLOCK_BYTES) * BLOCK_BYTES]
        self._in_flight.append((self._pool.submit(_write_at, self._fd, piece, position), buffer))
        self._wait(_WRITERS + 1)

    def _wait(self, at_most: int) -> None:
        """Returns when no more than `at_most` pieces are in flight.

        Raises:
            OSError: one of them could not be written.
        """
        while len(self._in_flight) > at_most:
            future, buffer = self._in_flight.popleft()
            future.result()
            if buffer is not None:
                self._free.append(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_at(fd: int, view: memoryview, position: int) -> None:
    again = False
    while len(view):
        try:
            count = os.pwrite(fd, view, position)
        except OSError as error:
            if error.errno != errno.EINVAL or again:
                raise
            _set_direct(fd, False)  # larger blocks are wanted, or a write ended inside one: the page cache takes any
            again = True
            continue
        view, position = view[count:], position + count


def _set_direct(fd: int, wanted: bool) -> bool:
    """Switches O_DIRECT on or off; returns whether that changed something."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flag or bool(flags & flag) == wanted:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ flag)
    except OSError:  # this file system has no direct writes
        return False
    return True


def _allocate(fd: int, size_bytes: int) -> None:
    """Reserves disk space for the file: a full disk is found before the first byte, and the blocks lie together.

    Not os.posix_fallocate: where a file system cannot reserve, the C library writes into every block instead.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def huge_pages(size_bytes: int) -> mmap.mmap:
    """Returns memory of zeros that begins at a page. Pages are huge where the kernel has such: the first use costs 500 times
    fewer page faults."""
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: the advice is all that is lost
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if not view.readonly else 1


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


def xxh3_bytes(data: bytes | bytearray) -> str:
    """Returns the xxh3-64 of `data` as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def free_bytes(path: Path) -> int:
    """Returns what an unprivileged user may still write on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
