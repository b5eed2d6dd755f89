"""metadata.json: a hostile or damaged one is refused before anything it names is opened."""

import json
import os

import pytest

from trainer.checkpoint.layout import parse_layout, read_layout
from trainer.checkpoint.paths import open_inside, read_inside
from trainer.errors import CheckpointError, CorruptCheckpoint


def document(**changes):
    chunk = {"offsets": [0, 0], "sizes": [2, 3], "file": "rank_00000.safetensors", "start": 64, "bytes": 24}
    entry = {"dtype": "F32", "shape": [2, 3], "chunks": [{**chunk, **changes.pop("chunk", {})}], **changes}
    return json.dumps({"format": 1, "tensors": {"model.weight": entry}}).encode()


def test_a_sound_layout_is_read():
    tensor = parse_layout(document(), "here")["model.weight"]
    assert (tensor.dtype, tensor.shape, tensor.size_bytes) == ("F32", (2, 3), 24)
    assert tensor.chunks[0].start == 64


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/b", ".hidden", "..", "", "a\\b", "a\0b", "a b", "a\n", 3, None]
)
def test_a_file_outside_the_directory_is_refused(name):
    with pytest.raises(CorruptCheckpoint, match=r"model\.weight.*not a plain file name"):
        parse_layout(document(chunk={"file": name}), "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "PICKLE"},
        {"dtype": ["F32"]},
        {"shape": [2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [4, 3]},  # not filled
        {"shape": [2, 3, 1]},
        {"chunks": None},
        {"chunks": []},
        {"chunk": {"start": -1}},
        {"chunk": {"start": True}},
        {"chunk": {"bytes": 25}},
        {"chunk": {"offsets": [0]}},
        {"chunk": {"offsets": [1, 0]}},  # sticks out
        {"chunk": {"sizes": [10**12, 3], "bytes": 12 * 10**12}},
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(changes):
    with pytest.raises(CorruptCheckpoint, match=r"model\.weight"):
        parse_layout(document(**changes), "here")


@pytest.mark.parametrize("rows", [[(0, 2), (1, 1)], [(0, 1), (0, 1)]])
def test_overlapping_chunks_are_refused(rows):
    chunks = [
        {"offsets": [row, 0], "sizes": [count, 1], "file": "f", "start": 0, "bytes": 4 * count} for row, count in rows
    ]
    total = sum(count for _, count in rows)
    with pytest.raises(CorruptCheckpoint, match="exactly once"):
        parse_layout(document(shape=[total, 1], chunks=chunks), "here")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b'{"tensors": []}', b"\x80\x04\x95", b"[" * 10**5])
def test_what_is_no_layout_is_refused(data):
    with pytest.raises(CorruptCheckpoint, match="here"):
        parse_layout(data, "here")


def test_a_newer_format_is_refused():
    with pytest.raises(CheckpointError, match="newer trainer"):
        parse_layout(b'{"format": 2, "tensors": {}}', "here")


def test_symlinks_and_special_files_are_not_opened(tmp_path):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "metadata.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptCheckpoint, match="is a symlink"):
        read_layout(tmp_path)
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        open_inside(tmp_path, "fifo")
    (tmp_path / "dir").mkdir()
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        read_inside(tmp_path, "dir")
    with pytest.raises(CorruptCheckpoint, match="missing"):
        read_inside(tmp_path, "nothing")
