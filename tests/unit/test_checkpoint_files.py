"""Durable file operations: what a reader sees after each possible failure."""

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
