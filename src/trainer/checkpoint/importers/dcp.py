"""Directories of torch.distributed.checkpoint, read without its pickle loader.

``.metadata`` is a pickle. It is read by an unpickler that knows nothing but stand-ins for DCP's own dataclasses, dtypes
and paths, made anew for each file, so that no name in it can reach code. What it says of places is then held against the
files: plain names, inside the directory, within the file, and as many bytes as the tensors need.
"""

import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.dcp import DTYPE_NAMES
from trainer.checkpoint.importers.torch_files import load_bytes
from trainer.checkpoint.layout import Chunk, overlap
from trainer.checkpoint.paths import MAX_TABLE_BYTES, check_plain_name, open_inside, os_errors, read_exactly
from trainer.errors import CheckpointError, CorruptCheckpoint

METADATA = ".metadata"
MAX_OBJECT_BYTES = 16 << 20  # of one value that is no tensor

_DATACLASSES = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
    | {("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")}
    | {("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")}
)
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


@dataclass(frozen=True)
class Place:
    file: str
    start: int
    size_bytes: int


@dataclass(frozen=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], Place], ...]
    """(offsets, sizes, place) of each."""


class DcpDirectory:
    """One checkpoint: names of tensors and of other values, and reading them one by one.

    Raises:
        CheckpointError: it is no DCP checkpoint, or its metadata is malformed or asks for something it may not.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Place] = {}
        self._sizes: dict[str, int] = {}
        metadata = _read_metadata(path)
        places = self._places(metadata)
        for name, entry in _table(metadata, "state_dict_metadata", self._where()).items():
            where = f"{self._where()}: {name!r}"
            if not isinstance(name, str):
                raise CorruptCheckpoint(f"{where} is no name")
            if _kind(entry) == "BytesStorageMetadata":
                self.objects[name] = _one_place(places, name, where)
            elif _kind(entry) == "TensorStorageMetadata":
                self.tensors[name] = _tensor(entry, name, places, where)
            else:
                raise CorruptCheckpoint(f"{where} is a {type(entry).__name__}, neither a tensor nor a value")

    def tensor(self, name: str) -> Tensor:
        """Returns a whole tensor on CPU, put together from its chunks."""
        saved = self.tensors[name]
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for offsets, sizes, place in saved.chunks:
            where = f"{self.path / place.file}: {name!r}"
            chunk = load_bytes(self._bytes(place), where)
            if not isinstance(chunk, Tensor) or tuple(chunk.shape) != sizes or chunk.dtype != saved.dtype:
                found = f"{chunk.dtype} {list(chunk.shape)}" if isinstance(chunk, Tensor) else type(chunk).__name__
                raise CorruptCheckpoint(f"{where} is {found}, {METADATA} says {saved.dtype} {list(sizes)}")
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = chunk
        return whole

    def value(self, name: str) -> Any:
        """Returns a value that is no tensor: numbers, text, lists, tuples and tables of them; or a 0-dim tensor's.

        Raises:
            CheckpointError: it holds anything else.
        """
        if name in self.tensors:
            tensor = self.tensor(name)
            return tensor.item() if tensor.numel() == 1 else tensor
        place = self.objects[name]
        where = f"{self.path / place.file}: {name!r}"
        if place.size_bytes > MAX_OBJECT_BYTES:
            raise CorruptCheckpoint(f"{where} has {place.size_bytes} bytes, too many for a value that is no tensor")
        value = load_bytes(self._bytes(place), where)
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def values(self, prefix: str) -> dict[str, Any]:
        """Returns every value whose name starts with `prefix`, without it. Tensors of more than one element are left out."""
        names = [name for name in (*self.objects, *self.tensors) if name.startswith(prefix)]
        small = [name for name in names if name not in self.tensors or math.prod(self.tensors[name].shape) == 1]
        return {name.removeprefix(prefix): self.value(name) for name in small}

    def _where(self) -> str:
        return str(self.path / METADATA)

    def _places(self, metadata: Any) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        places = {}
        for index, info in _table(metadata, "storage_data", self._where()).items():
            name, offset = getattr(index, "fqn", None), getattr(index, "offset", None)
            where = f"{self._where()}: place of {name!r}"
            if not isinstance(name, str):
                raise CorruptCheckpoint(f"{where}: no name")
            file = check_plain_name(_undotted(getattr(info, "relative_path", None)), where)
            start: Any = getattr(info, "offset", None)
            size_bytes: Any = getattr(info, "length", None)
            if not _counts((start, size_bytes)):
                raise CorruptCheckpoint(f"{where}: {size_bytes!r} bytes from {start!r}")
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{where}: written through {info.transform_descriptors}, which is not read")
            if start + size_bytes > self._file_bytes(file):
                raise CorruptCheckpoint(
                    f"{where}: bytes {start} to {start + size_bytes} of {file}, which has {self._file_bytes(file)}"
                )
            key = None if offset is None else _numbers(offset, where)
            places[name, key] = Place(file, start, size_bytes)
        return places

    def _file_bytes(self, file: str) -> int:
        if file not in self._sizes:
            fd = open_inside(self.path, file)
            self._sizes[file] = os.fstat(fd).st_size
            os.close(fd)
        return self._sizes[file]

    def _bytes(self, place: Place) -> bytes:
        data = bytearray(place.size_bytes)
        fd = open_inside(self.path, place.file)
        try:
            with os_errors(f"cannot read {self.path / place.file}"):
                read_exactly(fd, memoryview(data), place.start, self.path / place.file)
        finally:
            os.close(fd)
        return bytes(data)


def _undotted(name: Any) -> Any:
    """DCP's files are called __0_0.distcp, which is a plain name; a leading "./" is not refused on its own."""
    return name.removeprefix("./") if isinstance(name, str) else name


# -- metadata ------------------------------------------------------------------------------------------------------------


def _read_metadata(path: Path) -> Any:
    file = path / METADATA
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {METADATA}: it is no finished torch.distributed.checkpoint") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{file}: {error.strerror}; symlinks are not followed") from error
    with open(fd, "rb") as opened, os_errors(f"cannot read {file}"):
        size_bytes = os.fstat(fd).st_size
        if size_bytes > MAX_TABLE_BYTES:
            raise CorruptCheckpoint(f"{file} has {size_bytes} bytes; at most {MAX_TABLE_BYTES} are read")
        try:
            metadata = _Unpickler(opened).load()
        except _Refused as error:
            raise CheckpointError(f"{file}: {error}; nothing of it was run") from None
        except Exception as error:  # a pickle can be wrong in any way that Python knows
            raise CorruptCheckpoint(f"{file} is no metadata of DCP: {type(error).__name__}: {error}") from error
    if _kind(metadata) != "Metadata":
        raise CorruptCheckpoint(f"{file} holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


class _Refused(Exception):
    pass


class _StandIn:
    """Takes the place of a class that a pickle names: keeps what it is given, and can do nothing."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({name: value for name, value in state.items() if isinstance(name, str)})
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows DCP's dataclasses, torch's dtypes and sizes, and paths; whatever else a pickle names ends it.

    The stand-ins are new classes in each unpickler, so that a pickle that sets attributes on a class changes only these.
    """

    def __init__(self, file: Any):
        super().__init__(file)
        self._stand_ins: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPE_NAMES:
            return _DTYPE_NAMES[name]
        if (module, name) in _DATACLASSES:
            return self._stand_in(name, _StandIn)
        if (module, name) == ("torch", "Size"):
            return self._stand_in(name, tuple)
        if (module, name) == ("collections", "OrderedDict"):
            return self._stand_in(name, dict)
        raise _Refused(f"it wants {module}.{name}, which has no place in a checkpoint's metadata")

    def _stand_in(self, name: str, base: type) -> type:
        if name not in self._stand_ins:
            self._stand_ins[name] = type(name, (base,), {})
        return self._stand_ins[name]


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _StandIn) else ""


def _table(metadata: Any, name: str, where: str) -> Mapping[Any, Any]:
    table = getattr(metadata, name, None)
    if not isinstance(table, dict):
        raise CorruptCheckpoint(f"{where} has no table {name}")
    return table


def _counts(values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not _counts(value):
        raise CorruptCheckpoint(f"{where}: expected sizes, found {value!r}")
    return tuple(value)


def _one_place(places: Mapping[Any, Place], name: str, where: str) -> Place:
    place = places.get((name, None))
    if place is None:
        raise CorruptCheckpoint(f"{where} lies nowhere")
    return place


def _tensor(entry: Any, name: str, places: Mapping[Any, Place], where: str) -> SavedTensor:
    properties, chunks = getattr(entry, "properties", None), getattr(entry, "chunks", None)
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else getattr(properties, "dtype", None)
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        raise CorruptCheckpoint(f"{where} has no dtype or no chunks")
    shape = _numbers(getattr(entry, "size", None), where)
    boxes, found = [], []
    for chunk in chunks:
        offsets, sizes = (
            _numbers(getattr(chunk, "offsets", None), where),
            _numbers(getattr(chunk, "sizes", None), where),
        )
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o + n <= extent for o, n, extent in zip(offsets, sizes, shape, strict=True)
        )
        place = places.get((name, offsets))
        if not inside or place is None:
            raise CorruptCheckpoint(f"{where}: a chunk of {list(sizes)} at {list(offsets)} does not fit {list(shape)}")
        size_bytes = math.prod(sizes) * dtype.itemsize
        if size_bytes > place.size_bytes:
            raise CorruptCheckpoint(f"{where}: {size_bytes} bytes are said to lie in {place.size_bytes}")
        boxes.append(Chunk(offsets, sizes, place.file, place.start, size_bytes))
        found.append((offsets, sizes, place))
    if sum(box.size_bytes for box in boxes) != math.prod(shape) * dtype.itemsize or overlap(boxes):
        raise CorruptCheckpoint(f"{where}: its chunks do not fill its shape {list(shape)} exactly once")
    return SavedTensor(dtype, shape, tuple(found))
