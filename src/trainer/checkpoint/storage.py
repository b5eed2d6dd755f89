"""Tensors of a run to and from the files of a checkpoint, through torch.distributed.checkpoint (DCP).

DCP plans: which rank writes which chunk (a replicated tensor once), and which saved chunks overlap what a rank wants,
so that a checkpoint of any world size and mesh loads at any other. The bytes are ours: one safetensors file per rank
(`layout`), written straight from the tensors and read straight into them. No pickle, zip or `torch.save` is involved,
and DCP's own file formats are never read.
"""

import math
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoint.layout import Chunk, Layout, TensorLayout, dump_layout, entry_name, safetensors_header
from trainer.checkpoint.paths import METADATA, open_inside, os_errors, read_exactly, shard_name
from trainer.core.files import DurableFile, FileRecord, write_new
from trainer.errors import CheckpointError, TrainerError

T = TypeVar("T")

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""torch dtype -> its safetensors name, for every dtype a checkpoint can hold."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def save_tensors(directory: Path, state: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Writes `state` into `directory`; collective. Returns the files that this rank wrote; their bytes are synced.

    state: flat names -> plain tensors (equal on all ranks) or DTensors, on any device.

    Raises:
        CheckpointError: on every rank, if any rank failed; names the rank, the tensor or file, and the reason.
    """
    writer = ShardWriter(directory, rank=dist.get_rank() if dist.is_initialized() else 0)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(f"cannot write the checkpoint {directory.name}"), torch.no_grad():
        dcp_save(dict(state), storage_writer=writer, planner=planner, no_dist=not dist.is_initialized())
    return writer.written


def load_tensors(directory: Path, layout: Layout, state: Mapping[str, Tensor]) -> None:
    """Reads the saved tensors into those of `state`, in place; collective.

    layout: of the checkpoint, the same on every rank; it must have every name of `state`, with its shape and dtype.

    Raises:
        CheckpointError: on every rank, if any rank failed. Some of `state` may have been overwritten by then.
    """
    reader = ShardReader(directory, layout)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors(f"cannot read the checkpoint {directory}"), torch.no_grad():
        dcp_load(dict(state), storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())


def global_bytes(state: Mapping[str, Tensor]) -> int:
    """Returns the bytes that all ranks together write for `state`: each element once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@contextmanager
def _dcp_errors(what: str):
    """DCP's exception is a BaseException that holds one exception per failed rank: turn it into a CheckpointError."""
    if sys.byteorder != "little":
        raise CheckpointError(f"{what}: checkpoints hold little-endian bytes and this machine is big-endian")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        failures = {rank: pair[0] for rank, pair in sorted(error.failures.items())}
        for cause in failures.values():
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from None
        texts = [f"rank {rank}: {_text(cause)}" for rank, cause in failures.items()]
        kinds = {type(cause) for cause in failures.values()}
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError
        kind = kind if issubclass(kind, CheckpointError) else CheckpointError
        raise kind(f"{what}: {'; '.join(texts)}") from next(iter(failures.values()))
    except RuntimeError as error:  # what gloo and NCCL raise when another rank is gone or the timeout is over
        raise CheckpointError(f"{what}: the ranks lost each other: {error}") from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as writable bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class ShardWriter(StorageWriter):
    """Writes what DCP plans for this rank into `rank_NNNNN.safetensors`, and `metadata.json` on the coordinator."""

    def __init__(self, directory: Path, rank: int):
        self.directory = directory
        self.rank = rank
        self.written: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            dtype = _tensor_data(item).properties.dtype
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(f"tensor {item.index.fqn!r} has dtype {dtype}, which a checkpoint cannot hold")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = self._write(sorted(plan.items, key=_file_order), planner) if plan.items else []
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries = []
        for item in items:
            data = _tensor_data(item)
            name = entry_name(item.index.fqn, data.chunk.offsets, whole=data.chunk.sizes == data.size)
            entries.append((name, DTYPE_NAMES[data.properties.dtype], tuple(data.chunk.sizes)))
        header, starts = safetensors_header(entries)
        path = self.directory / shard_name(self.rank)
        results = []
        with os_errors(f"cannot write {path}"), DurableFile(path) as file:
            file.write(header)
            for item, start in zip(items, starts, strict=True):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                view = _tensor_bytes(tensor.detach().cpu().contiguous())
                file.write(view)
                results.append(WriteResult(item.index, view.nbytes, (path.name, start, view.nbytes)))
            self.written[path.name] = file.finish()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank_results in results for result in rank_results}
        layout = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                file, start, size_bytes = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, start, size_bytes))
            layout[name] = TensorLayout(DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), tuple(chunks))
        path = self.directory / METADATA
        with os_errors(f"cannot write {path}"):
            self.written[METADATA] = write_new(path, dump_layout(layout))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # DCP must not pick this by path: the directory alone is no checkpoint without its manifest


def _tensor_data(item: WriteItem):
    if item.tensor_data is None:
        raise CheckpointError(f"state {item.index.fqn!r} is not a tensor; only tensors are written as shards")
    return item.tensor_data


def _file_order(item: WriteItem) -> tuple:
    """Large elements first, so that every entry of a file starts at a multiple of its element's size."""
    return (-_tensor_data(item).properties.dtype.itemsize, item.index.fqn, tuple(item.index.offset or ()))


class ShardReader(StorageReader):
    """Reads the byte ranges that DCP plans for this rank straight into the target tensors."""

    def __init__(self, directory: Path, layout: Layout):
        self.directory = directory
        self.layout = layout
        self.chunks = {(name, c.offsets): c for name, tensor in layout.items() for c in tensor.chunks}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                )
                for name, tensor in self.layout.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            chunk = self.chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file[chunk.file].append((chunk, item))
        for name, reads in by_file.items():
            path = self.directory / name
            fd = open_inside(self.directory, name)
            try:
                with os_errors(f"cannot read {path}"):
                    for chunk, item in sorted(reads, key=lambda read: read[0].start):  # front to back: disk order
                        self._read(fd, path, chunk, item, planner)
            finally:
                os.close(fd)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, fd: int, path: Path, chunk: Chunk, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        dtype = DTYPES[self.layout[item.storage_index.fqn].dtype]
        if target.dtype != dtype:
            raise CheckpointError(f"tensor {item.storage_index.fqn!r}: checkpoint {dtype}, this run {target.dtype}")
        source = _region(chunk, item, dtype, lambda view, position: read_exactly(fd, view, position, path), target)
        if source is not target:
            target.copy_(source)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


def _region(
    chunk: Chunk, item: ReadItem, dtype: torch.dtype, read: Callable[[memoryview, int], None], target: Tensor
) -> Tensor:
    """Returns the wanted box of a chunk: `target` itself where its bytes could be read in place, else a CPU tensor.

    Boxes that are one run of bytes in the chunk (all of it, or some of its rows) are read alone; for others, such as
    columns, the rows that hold them are read and cut.
    """
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if lengths[1:] == chunk.sizes[1:]:  # whole rows; also true of tensors without dimensions
        row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
        position = chunk.start + (offsets[0] * row_bytes if offsets else 0)
        in_place = target.device.type == "cpu" and target.is_contiguous()
        box = target if in_place else torch.empty(lengths, dtype=dtype)
        read(_tensor_bytes(box), position)
        return box
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    rows = torch.empty((lengths[0], *chunk.sizes[1:]), dtype=dtype)
    read(_tensor_bytes(rows), chunk.start + offsets[0] * row_bytes)
    return rows[(slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True)))]
