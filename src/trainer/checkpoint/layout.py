"""Where each tensor of a checkpoint lies: `metadata.json`, and the header of the safetensors file of each rank.

A rank's file is a plain safetensors file: an 8-byte little-endian header length, a JSON header, then raw little-endian
bytes. Any safetensors reader opens it; a tensor that is split over ranks appears as one entry per chunk, named
"tensor@row,column" after the chunk's offset. `metadata.json` says for each tensor its dtype, its global shape, and for
each chunk its box (offsets, sizes) and place (file, first byte, bytes). This module needs neither torch nor numpy.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.paths import METADATA, check_plain_name, open_inside, read_inside
from trainer.errors import CheckpointError, CorruptCheckpoint

LAYOUT_FORMAT = 1
ALIGNMENT_BYTES = 4096  # where the data of a file starts; entries follow by falling element size, so each is aligned

_MAX_COMPARISONS = 2_500_000  # of chunks of one tensor; a mesh of 128 x 128 ranks needs 2.1 million

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes per element of each dtype, by its safetensors name."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the bytes that hold it, in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte within the file."""
    size_bytes: int
    xxh3: str | None = None
    """xxh3-64 of its bytes, for what is read before the file as a whole has been checked."""


@dataclass(frozen=True)
class TensorLayout:
    dtype: str
    """safetensors name, a key of ITEM_BYTES."""
    shape: tuple[int, ...]
    """Global shape."""
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Layout = Mapping[str, TensorLayout]
"""Tensor name -> where it lies."""


def entry_name(name: str, offsets: Sequence[int], whole: bool) -> str:
    """Returns the name of a chunk in the safetensors header: the tensor's own when it is all of it."""
    return name if whole else f"{name}@{','.join(map(str, offsets))}"


def safetensors_header(
    entries: Sequence[tuple[str, str, Sequence[int]]], room_bytes: int = 0
) -> tuple[bytes, list[int]]:
    """Returns the file's first bytes for `entries` (name, dtype, shape), and the first byte of each entry in the file.

    room_bytes: length of the first bytes at least; a header is padded with spaces.

    Raises:
        CheckpointError: two entries have the same name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": "exact-trainer"}}
    starts, position = [], 0
    for name, dtype, shape in entries:
        if name in header:
            raise CheckpointError(f"two tensors would be written under the name {name!r}; rename one")
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size_bytes]}
        starts.append(position)
        position += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    length = max(8 + len(text), room_bytes)
    text = text.ljust(length + -length % ALIGNMENT_BYTES - 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


def dump_layout(layout: Layout) -> bytes:
    """Returns the bytes of `metadata.json`."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [_dump_chunk(chunk) for chunk in tensor.chunks],
        }
        for name, tensor in layout.items()
    }
    return json.dumps({"format": LAYOUT_FORMAT, "tensors": tensors}, separators=(",", ":")).encode()


def _dump_chunk(chunk: Chunk) -> dict[str, Any]:
    entry: dict[str, Any] = {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": chunk.file}
    entry |= {"start": chunk.start, "bytes": chunk.size_bytes}
    return entry if chunk.xxh3 is None else entry | {"xxh3": chunk.xxh3}


def read_layout(directory: Path) -> Layout:
    """Reads and checks `metadata.json`.

    Raises:
        CorruptCheckpoint: it is missing, malformed, names a file outside the directory, its chunks do not fill their
            tensor, or lie outside their file or over each other.
        CheckpointError: it was written by a newer version of this trainer.
    """
    layout = parse_layout(read_inside(directory, METADATA), str(directory / METADATA))
    check_places(directory, layout)
    return layout


def check_places(directory: Path, layout: Layout) -> None:
    """Holds every chunk's place against the file it names, so that no table makes anybody ask for memory in vain.

    Raises:
        CorruptCheckpoint: a file is missing, a chunk reaches beyond its file's end, or two share a byte.
    """
    places: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in layout.items():
        for chunk in tensor.chunks:
            if chunk.size_bytes:
                places[chunk.file].append((chunk.start, chunk.start + chunk.size_bytes, name))
    for file, ranges in places.items():
        fd = open_inside(directory, file)
        try:
            file_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        end, before = 0, ""
        for start, stop, name in sorted(ranges):
            where = f"{directory / METADATA}: tensor {name!r}"
            if stop > file_bytes:
                raise CorruptCheckpoint(f"{where} ends at byte {stop} of {file}, which has {file_bytes}")
            if start < end:
                raise CorruptCheckpoint(f"{where} shares bytes of {file} with tensor {before!r}")
            end, before = stop, name


def parse_layout(data: bytes, where: str) -> Layout:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no UTF-8
        raise CorruptCheckpoint(f"{where} is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("tensors"), dict):
        raise CorruptCheckpoint(f"{where} has no table of tensors")
    if document.get("format") != LAYOUT_FORMAT:
        raise CheckpointError(
            f"{where} has format {document.get('format')!r}, this version reads {LAYOUT_FORMAT}; use a newer trainer"
        )
    return {name: _parse_tensor(entry, f"{where}: tensor {name!r}") for name, entry in document["tensors"].items()}


def _parse_tensor(entry: Any, where: str) -> TensorLayout:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CorruptCheckpoint(f"{where} has no known dtype (found {dtype!r})")
    shape = _numbers(entry.get("shape"), f"{where}: shape")
    chunks = entry.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptCheckpoint(f"{where} has no list of chunks")
    tensor = TensorLayout(dtype, shape, tuple(_parse_chunk(chunk, where) for chunk in chunks))
    for chunk in tensor.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset + size <= extent for offset, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside or chunk.size_bytes != math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]:
            raise CorruptCheckpoint(
                f"{where}: chunk at {chunk.offsets} of sizes {chunk.sizes} in {chunk.size_bytes} bytes does not fit "
                f"{tensor.dtype} {shape}"
            )
    if sum(chunk.size_bytes for chunk in tensor.chunks) != tensor.size_bytes or overlap(tensor.chunks):
        raise CorruptCheckpoint(f"{where}: its chunks do not fill its shape {shape} exactly once")
    return tensor


def _parse_chunk(entry: Any, where: str) -> Chunk:
    if not isinstance(entry, dict):
        raise CorruptCheckpoint(f"{where}: a chunk is {entry!r}")
    start, size_bytes = _numbers([entry.get("start"), entry.get("bytes")], f"{where}: place of a chunk")
    return Chunk(
        offsets=_numbers(entry.get("offsets"), f"{where}: offsets"),
        sizes=_numbers(entry.get("sizes"), f"{where}: sizes"),
        file=check_plain_name(entry.get("file"), where),
        start=start,
        size_bytes=size_bytes,
        xxh3=None if entry.get("xxh3") is None else str(entry["xxh3"]),
    )


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise CorruptCheckpoint(f"{where} must be non-negative integers, found {value!r}")
    return tuple(value)


def overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two chunks share an element; swept along the dimension that is cut the most, so that shards cost n log n.

    Chunks that cost more comparisons than any mesh of ranks makes count as overlapping: a table must not cost hours.
    """
    comparisons = 0
    boxes = [chunk for chunk in chunks if chunk.size_bytes]
    if not boxes or not boxes[0].offsets:
        return len(boxes) > 1
    axis = max(range(len(boxes[0].offsets)), key=lambda axis: len({box.offsets[axis] for box in boxes}))
    boxes.sort(key=lambda box: box.offsets[axis])
    open_boxes: list[Chunk] = []
    for box in boxes:
        open_boxes = [other for other in open_boxes if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        comparisons += len(open_boxes)
        if comparisons > _MAX_COMPARISONS:
            return True
        for other in open_boxes:
            pairs = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in pairs):
                return True
        open_boxes.append(box)
    return False


def owner_of(name: str) -> str:
    """Returns the owner of a tensor: the part of its name before the first dot."""
    return name.partition(".")[0]
