"""Reading a checkpoint's file front to back: past the page cache and through it, the bytes and the errors are the same."""

import os
import random
from pathlib import Path

import pytest

from trainer.checkpoint.streams import DirectPieces, FileStream
from trainer.core.files import BLOCK_BYTES, PIECE_BYTES, FileRecord, xxh3
from trainer.errors import CorruptCheckpoint

SIZES = [0, 1, 5_000, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1, 5 * PIECE_BYTES + 3 * BLOCK_BYTES + 77]


def written(path: Path, size_bytes: int) -> FileRecord:
    path.write_bytes(random.Random(size_bytes).randbytes(size_bytes))
    return FileRecord(size_bytes, xxh3(path))


def forget(path: Path) -> None:
    """Takes the file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read(path: Path, record: FileRecord | None, ranges: list[tuple[int, int]]) -> tuple[list[bytes], bool]:
    """Returns the bytes of each [start, end), and whether they were read past the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with FileStream(fd, path, record) as stream:
            found = []
            for start, end in ranges:
                target = bytearray(end - start)
                stream.read(memoryview(target), start)
                found.append(bytes(target))
            stream.finish()
            return found, stream._pieces is not None
    finally:
        os.close(fd)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_any_ranges_of_any_size(tmp_path, size_bytes, cold):
    path = tmp_path / "file"
    record, data = written(path, size_bytes), path.read_bytes()
    draw = random.Random(1)
    edges = sorted(draw.randrange(size_bytes + 1) for _ in range(8))
    ranges = [
        *zip(edges[::2], edges[1::2], strict=True),
        (0, min(size_bytes, 100)),
        (0, size_bytes),
    ]  # the last go back
    for check in (record, None):
        if cold:
            forget(path)
        found, direct = read(path, check, ranges)
        assert found == [data[start:end] for start, end in ranges]
        if direct:
            assert cold and check and size_bytes >= 2 * PIECE_BYTES


def test_a_large_file_that_is_not_cached_is_read_past_the_cache(tmp_path):
    path = tmp_path / "file"
    record = written(path, SIZES[-1])
    forget(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = DirectPieces.open(fd, record.size_bytes)
        if pieces is None:
            pytest.skip("this file system has no reads past the page cache, or is one")
        pieces.close()
        path.read_bytes()
        assert DirectPieces.open(fd, record.size_bytes) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize("place", [0, PIECE_BYTES, SIZES[-1] - 1])
def test_a_changed_byte_is_found(tmp_path, place):
    path = tmp_path / "file"
    record = written(path, SIZES[-1])
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    forget(path)
    with pytest.raises(CorruptCheckpoint, match=f"has checksum .* expected {record.xxh3}"):
        read(path, record, [(0, 1000)])


@pytest.mark.parametrize("missing", [1, BLOCK_BYTES, 2 * PIECE_BYTES + 5])
def test_a_file_that_ends_early(tmp_path, missing):
    path = tmp_path / "file"
    record = written(path, SIZES[-1])
    os.truncate(path, record.size_bytes - missing)
    forget(path)
    with pytest.raises(CorruptCheckpoint, match=f"ends at byte {record.size_bytes - missing}"):
        read(path, record, [])


def test_a_file_that_goes_on(tmp_path):
    path = tmp_path / "file"
    record = written(path, SIZES[-1])
    with open(path, "ab") as file:
        file.write(b"more")
    forget(path)
    with pytest.raises(CorruptCheckpoint, match=f"over {record.size_bytes + 4} bytes"):
        read(path, record, [])
