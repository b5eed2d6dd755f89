"""Durable file operations: what a reader sees after each possible failure."""

import errno
import fcntl
import mmap
import os

import pytest
import xxhash

from support.checkpoints import fails_at
from trainer.core import files
from trainer.core.files import DurableFile, file_hook


def test_a_file_is_hashed_while_it_is_written(tmp_path):
    data = os.urandom(files.READ_BYTES + 12345)
    with DurableFile(tmp_path / "a") as file:
        file.write(data[:7])
        file.write(b"")
        file.write(memoryview(data)[7:])
        record = file.finish()
    assert (tmp_path / "a").read_bytes() == data
    assert record.size_bytes == len(data)
    assert record.xxh3 == xxhash.xxh3_64_hexdigest(data) == files.xxh3(tmp_path / "a") == files.xxh3_bytes(data)


BLOCK = files.BLOCK_BYTES


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of four blocks, so that little data makes a large file."""
    monkeypatch.setattr(files, "PIECE_BYTES", 4 * BLOCK)
    monkeypatch.setattr(files, "LARGE_BYTES", 8 * BLOCK)


def page_aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


LENGTHS = (0, 1, 4 * BLOCK - 1, 4 * BLOCK, 8 * BLOCK, 8 * BLOCK + 1, 9 * BLOCK, 20 * BLOCK + 777)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("said", ["right", "too much", "too little", "nothing"])
def test_a_large_file_has_the_bytes_that_were_written(tmp_path, monkeypatch, small_pieces, direct, aligned, said):
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    for number, length in enumerate(LENGTHS):
        data = os.urandom(length)
        view = page_aligned(data) if aligned else memoryview(bytearray(b"x" + data))[1:]
        size = {"right": length, "too much": length + 9 * BLOCK, "too little": 8 * BLOCK, "nothing": 0}[said]
        with DurableFile(tmp_path / str(number), size) as file:
            cut = length // 3 if said == "too little" else 0
            file.write(view[:cut])
            file.write(view[cut:])
            record = file.finish()
        assert (tmp_path / str(number)).read_bytes() == data
        assert record == files.FileRecord(length, xxhash.xxh3_64_hexdigest(data))


def test_a_large_file_goes_past_the_page_cache_where_it_can(tmp_path, monkeypatch, small_pieces):
    flags, pwrite = [], os.pwrite

    def look(fd, view, position):
        flags.append((fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT, len(view) % BLOCK))
        return pwrite(fd, view, position)

    monkeypatch.setattr(os, "pwrite", look)
    with DurableFile(tmp_path / "a", 9 * BLOCK + 5) as file:
        file.write(os.urandom(9 * BLOCK + 5))
        file.finish()
    assert flags == [(os.O_DIRECT, 0)] * 3


def test_a_file_system_that_wants_other_blocks_gets_ordinary_writes(tmp_path, monkeypatch, small_pieces):
    pwrite = os.pwrite

    def picky(fd, view, position):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, view[:5000], position)  # and writes less than it was given

    monkeypatch.setattr(os, "pwrite", picky)
    data = os.urandom(13 * BLOCK + 1)
    with DurableFile(tmp_path / "a", len(data)) as file:
        file.write(data)
        assert file.finish().xxh3 == xxhash.xxh3_64_hexdigest(data)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("k", range(5))
def test_a_piece_that_cannot_be_written_fails_the_file(tmp_path, monkeypatch, small_pieces, k):
    """The write happens on another thread; its error must not be lost, and no piece may land in another file."""
    calls, pwrite = [], os.pwrite

    def full(fd, view, position):
        calls.append(position)
        if position == k * 4 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, view, position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"), DurableFile(tmp_path / "a", 20 * BLOCK) as file:
        for _ in range(20):
            file.write(os.urandom(BLOCK))
        file.finish()
    assert file._fd == -1
    assert len(calls) <= 5


def test_a_large_file_announces_each_piece_and_its_space(tmp_path, small_pieces):
    operations = []
    with file_hook(lambda operation, _: operations.append(operation)), DurableFile(tmp_path / "a", 9 * BLOCK) as file:
        file.write(bytes(9 * BLOCK))
        file.finish()
    assert operations == ["create", "allocate", "write", "write", "write", "fsync"]
    for k in range(len(operations)):
        with (
            file_hook(fails_at(k, OSError(5, "Input/output error"))),
            pytest.raises(OSError, match="Input/output"),
            DurableFile(tmp_path / str(k), 9 * BLOCK) as file,
        ):
            file.write(bytes(9 * BLOCK))
            file.finish()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "a", b"new")
    (tmp_path / "full").mkdir()
    (tmp_path / "empty").mkdir()  # POSIX rename would replace this one
    with pytest.raises(FileExistsError):
        files.rename(tmp_path / "full", tmp_path / "empty")
    assert (tmp_path / "a").read_text() == "old"


def test_an_atomic_write_that_fails_anywhere_leaves_the_old_or_the_new_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    operations = []
    with file_hook(lambda operation, _: operations.append(operation)):
        files.write_atomic(path, b"new")
    assert operations == ["create", "write", "fsync", "replace", "fsync"]
    for k, operation in enumerate(operations):
        path.write_bytes(b"old")
        with file_hook(fails_at(k, OSError(5, "Input/output error"))), pytest.raises(OSError, match="Input/output"):
            files.write_atomic(path, b"new")
        expected = b"new" if k > operations.index("replace") else b"old"
        assert path.read_bytes() == expected, operation
        assert os.listdir(tmp_path) == ["a"]


def test_a_removal_takes_the_marker_first(tmp_path):
    for k in range(20):
        directory = tmp_path / str(k)
        (directory / "sub").mkdir(parents=True)
        for name in ("a", "marker", "z", "sub/b"):
            (directory / name).touch()
        with file_hook(fails_at(k, OSError(5, "Input/output error"))):
            try:
                files.remove_tree(directory, "marker")
            except OSError:
                left = set(os.listdir(directory))
                assert "marker" not in left or left == {"a", "marker", "z", "sub"}
            else:
                break
    assert not directory.exists()
    assert k > 4


def test_a_removal_does_not_follow_symlinks(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "marker").touch()
    (tmp_path / "doomed").mkdir()
    (tmp_path / "doomed" / "link").symlink_to(tmp_path / "precious")
    files.remove_tree(tmp_path / "doomed", "marker")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="is a symlink"):
        files.remove_tree(tmp_path / "link", "marker")
    assert (tmp_path / "precious" / "marker").exists()
