"""A file of a checkpoint, read front to back: by ranges, or whole and compared with its record on the way."""

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import xxhash

from trainer.checkpoint.paths import read_exactly
from trainer.core.files import BLOCK_BYTES, HASH_BYTES, LARGE_BYTES, PIECE_BYTES, FileRecord, huge_pages
from trainer.errors import CorruptCheckpoint


class FileStream:
    """Reads an open file into memory that is given; where its record is known, hashed on the way.

    A little at a time, so that it is hashed while it is in a core's own cache. A large file that is not in the page cache
    is read past it, some pieces ahead; for others the kernel is told early what will be read. Either way the disk does not
    wait for the hash. A context manager: leaving it ends the reading ahead; the descriptor stays open.
    """

    _AHEAD_BYTES = 64 << 20

    def __init__(self, fd: int, path: Path, record: FileRecord | None):
        self.fd = fd
        self.path = path
        self.record = record
        self._hash = xxhash.xxh3_64()
        self._position = 0  # hashed up to here
        self._announced = 0  # the kernel knows of everything before
        self._pieces = None if record is None else DirectPieces.open(fd, record.size_bytes)

    def read(self, view: memoryview, position: int) -> None:
        """Fills `view` with the bytes from `position` on.

        Raises:
            CorruptCheckpoint: the file ends before.
        """
        if self.record is None or position < self._position:  # the latter: they were wanted, and hashed, before
            for start in range(0, len(view), self._AHEAD_BYTES // 2):
                self._read_ahead(position + start)
                piece = view[start : start + self._AHEAD_BYTES // 2]
                read_exactly(self.fd, piece, position + start, self.path)
            return
        self._skip_to(position)
        while len(view):
            view = view[self._read_on(view[:HASH_BYTES]) :]

    def finish(self) -> None:
        """Reads what is left.

        Raises:
            CorruptCheckpoint: size or checksum differ from the record.
        """
        if self.record is None:
            return
        self._skip_to(self.record.size_bytes)
        size_bytes, found = os.fstat(self.fd).st_size, self._hash.hexdigest()
        if size_bytes != self.record.size_bytes or found != self.record.xxh3:
            raise CorruptCheckpoint(
                f"{self.path} has checksum {found} over {size_bytes} bytes, expected {self.record.xxh3} over "
                f"{self.record.size_bytes}: its bytes changed"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pieces is not None:
            self._pieces.close()

    def _skip_to(self, position: int) -> None:
        buffer = memoryview(bytearray(min(HASH_BYTES, max(0, position - self._position))))
        while self._position < position:
            self._read_on(buffer[: position - self._position])

    def _read_on(self, target: memoryview) -> int:
        """Fills the beginning of `target` with the next bytes; returns how many there were."""
        if self._pieces is None:
            self._read_ahead(self._position)
            read_exactly(self.fd, target, self._position, self.path)
            self._hash.update(target)
        else:
            part = self._pieces.next(len(target))
            if not part:
                missing = len(target)
                raise CorruptCheckpoint(f"{self.path} ends at byte {self._position}, {missing} bytes too early")
            self._hash.update(part)
            target[: len(part)] = part  # while the hash has it in the cache
            target = target[: len(part)]
        self._position += len(target)
        return len(target)

    def _read_ahead(self, position: int) -> None:
        if position + self._AHEAD_BYTES // 2 > self._announced and hasattr(os, "posix_fadvise"):
            start = max(position, self._announced)
            self._announced = position + self._AHEAD_BYTES
            os.posix_fadvise(self.fd, start, self._announced - start, os.POSIX_FADV_WILLNEED)


class DirectPieces:
    """The bytes of a file front to back, read past the page cache (O_DIRECT) by two threads, some pieces ahead.

    The disk is faster so (`python -m benchmarks checkpoint`), and the copy out of the cache is saved.
    """

    _THREADS = 2
    _PIECES = 4

    def __init__(self, fd: int, size_bytes: int):
        """fd: taken over."""
        self._fd = fd
        self._pool = ThreadPoolExecutor(self._THREADS, thread_name_prefix="checkpoint-read")
        self._starts = iter(range(0, size_bytes, PIECE_BYTES))
        self._coming: deque[tuple[Future[int], mmap.mmap]] = deque()
        self._buffer: mmap.mmap | None = None
        self._rest = memoryview(b"")
        for _ in range(self._PIECES):
            self._ask(huge_pages(PIECE_BYTES))

    @classmethod
    def open(cls, fd: int, size_bytes: int) -> "DirectPieces | None":
        """Returns None where the file is small, in the page cache already, or on a file system without such reads."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag or size_bytes < LARGE_BYTES or _is_cached(fd, size_bytes):
            return None
        try:
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flag | os.O_CLOEXEC)  # the same file, its own flags
        except OSError:
            return None
        try:
            os.preadv(direct, [mmap.mmap(-1, BLOCK_BYTES)], 0)
        except OSError as error:
            os.close(direct)
            if error.errno == errno.EINVAL:
                return None
            raise
        return cls(direct, size_bytes)

    def next(self, most: int) -> memoryview:
        """Returns the next bytes, at least one and `most` at the most, until the next call; nothing at the file's end.

        Raises:
            OSError: they could not be read.
        """
        while not self._rest:
            if self._buffer is not None:
                self._ask(self._buffer)
                self._buffer = None
            if not self._coming:
                self._rest = memoryview(b"")
                return self._rest
            future, self._buffer = self._coming.popleft()
            self._rest = memoryview(self._buffer)[: future.result()]
        part, self._rest = self._rest[:most], self._rest[most:]
        return part

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _ask(self, buffer: mmap.mmap) -> None:
        start = next(self._starts, None)
        if start is not None:
            self._coming.append((self._pool.submit(self._read, buffer, start), buffer))

    def _read(self, buffer: mmap.mmap, start: int) -> int:
        view, count = memoryview(buffer), 0
        while count < len(view):
            got = os.preadv(self._fd, [view[count:]], start + count)
            count += got
            if got == 0 or got % BLOCK_BYTES:  # the end of the file
                break
        return count


def _is_cached(fd: int, size_bytes: int) -> bool:
    """Whether the file seems to be in the page cache, by the look of three places."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    for position in (0, size_bytes // 2, size_bytes - 1):
        try:
            os.preadv(fd, [bytearray(1)], position, os.RWF_NOWAIT)
        except OSError:  # it would have to wait for the disk, or cannot tell
            return False
    return True
