"""The small parts of a checkpoint that say what is in it: where each tensor lies, and every value that is no tensor."""

from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import Layout, read_layout
from trainer.checkpoint.leaves import load_leaves
from trainer.checkpoint.paths import MAX_TABLE_BYTES, open_inside, os_errors, read_exactly
from trainer.core.files import xxh3_bytes
from trainer.errors import CorruptCheckpoint

JSON_TENSOR = "json"
"""Name of the uint8 tensor that carries all non-tensor leaves."""


def read_tables(directory: Path) -> tuple[Layout, dict[str, dict[str, Any]]]:
    """Returns the layout of a checkpoint's tensors and its leaves by owner, reading nothing else.

    Raises:
        CorruptCheckpoint: they are missing or malformed.
    """
    layout = read_layout(directory)
    table = layout.get(JSON_TENSOR)
    if table is None or table.dtype != "U8" or len(table.chunks) != 1:
        raise CorruptCheckpoint(f"{directory} has no tensor {JSON_TENSOR!r} with the counters and group entries")
    chunk = table.chunks[0]
    if chunk.size_bytes > MAX_TABLE_BYTES:
        raise CorruptCheckpoint(
            f"{directory}: tensor {JSON_TENSOR!r} has {chunk.size_bytes} bytes, too many to be true"
        )
    path, data = directory / chunk.file, bytearray(chunk.size_bytes)
    with os_errors(f"cannot read {path}"), open(open_inside(directory, chunk.file), "rb", buffering=0) as file:
        read_exactly(file.fileno(), memoryview(data), chunk.start, path)
    if chunk.xxh3 is not None and xxh3_bytes(data) != chunk.xxh3:
        raise CorruptCheckpoint(
            f"{path}: the bytes of tensor {JSON_TENSOR!r} changed: their checksum is not {chunk.xxh3}"
        )
    leaves = load_leaves(bytes(data), f"{path}: tensor {JSON_TENSOR!r}")
    if not all(isinstance(part, dict) for part in leaves.values()):
        raise CorruptCheckpoint(f"{path}: tensor {JSON_TENSOR!r} has no table for each owner")
    return layout, leaves
