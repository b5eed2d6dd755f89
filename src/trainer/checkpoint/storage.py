"""Tensors of a run to and from the files of a checkpoint, through torch.distributed.checkpoint (DCP).

DCP plans: which rank writes which chunk (a replicated tensor once, see `staging`), and which saved chunks overlap what a
rank wants, so that a checkpoint of any world size and mesh loads at any other. The bytes are ours: one safetensors file
per rank (`layout`), written straight from the tensors and read straight into them. No pickle, zip or `torch.save` is
involved, and DCP's own file formats are never read.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer.checkpoint.dcp import DTYPES, dcp_errors, error_text, tensor_bytes
from trainer.checkpoint.finite import FiniteCheck
from trainer.checkpoint.layout import Chunk, Layout, dump_layout
from trainer.checkpoint.paths import METADATA, open_inside, os_errors
from trainer.checkpoint.staging import Shard, Stager
from trainer.checkpoint.streams import FileStream
from trainer.core.distributed import gather_objects
from trainer.core.files import DurableFile, FileRecord, write_new
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Written:
    """What all ranks together wrote; the same on every rank."""

    files: Mapping[str, FileRecord]
    """By name."""
    not_finite: str | None = None
    """A tensor of the owner that was looked at, with a NaN or an infinity in it."""


def write_shard(
    directory: Path, shard: Shard, *, finite: str | None = None, group: "ProcessGroup | None" = None
) -> Written:
    """Writes every rank's shard, and on rank 0 the table of all; collective.

    finite: an owner whose tensors are looked at on the way: whether each of their values is a number.

    What a rank wrote is on its disk when it returns. `group`: the ranks' group of the calling thread.

    Raises:
        CheckpointError: on every rank, if any rank failed; names the rank, the file, and the reason.
    """
    written: dict[str, FileRecord] = {}
    failure, check = None, FiniteCheck(finite) if finite is not None else None
    try:
        plan = shard.plan
        if plan.entries:
            path = directory / plan.file
            with os_errors(f"cannot write {path}"), DurableFile(path, plan.size_bytes) as file:
                for part in shard.parts(check):
                    file.write(part)
                written[plan.file] = file.finish()
        if plan.layout:
            path = directory / METADATA
            with os_errors(f"cannot write {path}"):
                written[METADATA] = write_new(path, dump_layout(plan.layout))
    except Exception as error:
        failure = error
    outcome = (written, check.found if check else None, None if failure is None else error_text(failure))
    outcomes = gather_objects(outcome, group=group)
    failed = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(outcomes) if text is not None]
    if failed:
        raise CheckpointError(f"cannot write the checkpoint {directory.name}: {'; '.join(failed)}") from failure
    files = {name: record for part, _, _ in outcomes for name, record in sorted(part.items())}
    return Written(files, next((found for _, found, _ in outcomes if found is not None), None))


def save_tensors(directory: Path, state: Mapping[str, Tensor]) -> Mapping[str, FileRecord]:
    """Writes `state` into `directory`; collective. Returns the records of all files; their bytes are synced.

    state: flat names -> plain tensors (equal on all ranks) or DTensors, on any device.

    Raises:
        CheckpointError: on every rank, if any rank failed; names the rank, the tensor or file, and the reason.
    """
    return write_shard(directory, Stager(copy=False).stage(state)).files


def load_tensors(
    directory: Path,
    layout: Layout,
    state: Mapping[str, Tensor],
    *,
    check: Mapping[str, FileRecord] | None = None,
) -> None:
    """Reads the saved tensors into those of `state`, in place; collective.

    layout: of the checkpoint, the same on every rank; it must have every name of `state`, with its shape and dtype.
    check: files whose checksum this rank compares while it reads them (each on one rank): it then reads them whole.

    Raises:
        CorruptCheckpoint: on every rank, if a file is damaged. `state` is overwritten by then, and worth nothing.
        CheckpointError: on every rank, if any rank failed otherwise.
    """
    reader = ShardReader(directory, layout, check or {})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with dcp_errors(f"cannot read the checkpoint {directory}"), torch.no_grad():
        dcp_load(dict(state), storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())


def global_bytes(state: Mapping[str, Tensor]) -> int:
    """Returns the bytes that all ranks together write for `state`: each element once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class ShardReader(StorageReader):
    """Reads the byte ranges that DCP plans for this rank straight into the target tensors, each file front to back."""

    def __init__(self, directory: Path, layout: Layout, check: Mapping[str, FileRecord]):
        self.directory = directory
        self.layout = layout
        self.check = check
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
        for name in sorted(by_file.keys() | self.check.keys()):
            path = self.directory / name
            fd = open_inside(self.directory, name)
            try:
                with os_errors(f"cannot read {path}"), FileStream(fd, path, self.check.get(name)) as stream:
                    for chunk, item in sorted(by_file[name], key=lambda read: read[0].start):
                        self._read(stream, chunk, item, planner)
                    stream.finish()
            finally:
                os.close(fd)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, stream: "FileStream", chunk: Chunk, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        dtype = DTYPES[self.layout[item.storage_index.fqn].dtype]
        if target.dtype != dtype:
            raise CheckpointError(f"tensor {item.storage_index.fqn!r}: checkpoint {dtype}, this run {target.dtype}")
        source = _region(chunk, item, dtype, stream.read, target)
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
        read(tensor_bytes(box), position)
        return box
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    rows = torch.empty((lengths[0], *chunk.sizes[1:]), dtype=dtype)
    read(tensor_bytes(rows), chunk.start + offsets[0] * row_bytes)
    return rows[(slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True)))]
