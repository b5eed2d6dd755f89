"""Compares two checkpoints by value: every tensor bit for bit, every group entry, counter and cursor.

Whole tensors are put together from their chunks, so the number of ranks that wrote them does not matter. Manifests are
not compared: what they hold (time, world size, file names) describes the save, not the state. Needs numpy, not torch.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.checkpoint.layout import ITEM_BYTES, Layout, TensorLayout, owner_of
from trainer.checkpoint.leaves import flatten_leaves, same
from trainer.checkpoint.paths import open_inside, os_errors, read_exactly
from trainer.checkpoint.tables import JSON_TENSOR, read_tables

_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    owner: str
    key: str
    """Full name of the tensor or entry."""
    text: str
    """What differs, A before B."""


@dataclass(frozen=True)
class Contents:
    """One checkpoint, opened for reading by value."""

    directory: Path
    layout: Layout
    leaves: dict[str, dict]

    @property
    def owners(self) -> list[str]:
        return list(dict.fromkeys([*self.leaves, *(owner_of(name) for name in self.tensors())]))

    def tensors(self) -> list[str]:
        return [name for name in self.layout if name != JSON_TENSOR]

    def bits(self, name: str) -> np.ndarray:
        """Returns a whole tensor as unsigned integers of its element size, in its global shape."""
        return read_bits(self.directory, self.layout[name])


def open_contents(directory: Path) -> Contents:
    """Opens a checkpoint directory; only its tables are read.

    Raises:
        CorruptCheckpoint: they are missing or malformed.
    """
    return Contents(directory, *read_tables(directory))


def read_bits(directory: Path, tensor: TensorLayout) -> np.ndarray:
    kind = np.dtype(f"u{ITEM_BYTES[tensor.dtype]}")
    whole = np.empty(tensor.shape, kind)
    for chunk in tensor.chunks:
        if chunk.size_bytes == 0:
            continue
        box = whole if chunk.sizes == tensor.shape else np.empty(chunk.sizes, kind)
        path = directory / chunk.file
        fd = open_inside(directory, chunk.file)
        try:
            with os_errors(f"cannot read {path}"):
                read_exactly(fd, box.reshape(-1).view(np.uint8).data, chunk.start, path)
        finally:
            os.close(fd)
        if box is not whole:
            region = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[region] = box
    return whole


def differences(a: Contents, b: Contents) -> Iterator[Difference]:
    """Yields every difference, owner by owner: its entries first, then its tensors. None = the states are identical."""
    for owner in dict.fromkeys([*a.owners, *b.owners]):
        if owner not in a.leaves or owner not in b.leaves:
            yield Difference(owner, owner, f"only in {'B' if owner in b.leaves else 'A'}")
            continue
        yield from _leaf_differences(owner, a, b)
        names = [name for name in dict.fromkeys([*a.tensors(), *b.tensors()]) if owner_of(name) == owner]
        for name in names:
            text = _tensor_difference(name, a, b)
            if text:
                yield Difference(owner, name, text)


def _leaf_differences(owner: str, a: Contents, b: Contents) -> Iterator[Difference]:
    left, right = dict(flatten_leaves(a.leaves[owner], owner)), dict(flatten_leaves(b.leaves[owner], owner))
    for key in dict.fromkeys([*left, *right]):
        if key not in right:
            yield Difference(owner, key, f"{left[key]!r}, only in A")
        elif key not in left:
            yield Difference(owner, key, f"{right[key]!r}, only in B")
        elif not same(left[key], right[key]):
            yield Difference(owner, key, f"{left[key]!r} != {right[key]!r}")


def _tensor_difference(name: str, a: Contents, b: Contents) -> str:
    """Returns how a tensor differs; "" if it does not."""
    left, right = a.layout.get(name), b.layout.get(name)
    if left is None or right is None:
        return f"only in {'A' if right is None else 'B'}"
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {list(left.shape)} != {right.dtype} {list(right.shape)}"
    a_bits, b_bits = a.bits(name), b.bits(name)
    unequal = a_bits != b_bits
    count = int(np.count_nonzero(unequal))
    if count == 0:
        return ""
    text = f"{count} of {math.prod(left.shape)} elements differ"
    a_values, b_values = float_values(a_bits[unequal], left.dtype), float_values(b_bits[unequal], left.dtype)
    if a_values is None or b_values is None:
        return text
    finite = np.isfinite(a_values) & np.isfinite(b_values)
    if finite.any():
        text += f", at most by {np.abs(a_values[finite] - b_values[finite]).max():.6g}"
    return text if finite.all() else f"{text}, {np.count_nonzero(~finite)} not finite"


def float_values(bits: np.ndarray, dtype: str) -> np.ndarray | None:
    """Returns the numbers that `bits` stand for as float64; None for the 8-bit floats, which numpy does not know."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(_NUMPY[dtype]).astype(np.float64) if dtype in _NUMPY else None
