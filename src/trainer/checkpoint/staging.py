"""What a save writes, made ready on the training thread: who writes which chunk, and the bytes as they are now.

DCP plans which rank writes which chunk: a replicated tensor once, shared out evenly. The plan depends on names, shapes,
dtypes and placements only, so it is made at the first save and used again. The values either stay where they are
(the training waits for the write) or are copied into one block of host memory that every save uses again (`copy`): then
the training goes on, and nothing that it does can reach the checkpoint.
"""

import math
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from trainer.checkpoint.dcp import DTYPE_NAMES, as_bytes, dcp_errors, tensor_bytes
from trainer.checkpoint.finite import FiniteCheck
from trainer.checkpoint.layout import Chunk, Layout, TensorLayout, entry_name, safetensors_header
from trainer.checkpoint.paths import shard_name
from trainer.checkpoint.tables import JSON_TENSOR
from trainer.core import device as devices
from trainer.core.distributed import gather_objects
from trainer.core.files import PIECE_BYTES, xxh3_bytes
from trainer.errors import CheckpointError, LaunchError

_COPY_BYTES = 16 << 20  # a thread's share at a time


@dataclass(frozen=True)
class Entry:
    """A chunk that this rank writes."""

    name: str
    dtype: str
    chunk: Chunk
    whole: bool
    """The chunk is all of its tensor."""

    @property
    def header(self) -> tuple[str, str, tuple[int, ...]]:
        """What the shard's own header says of it."""
        return entry_name(self.name, self.chunk.offsets, self.whole), self.dtype, self.chunk.sizes


@dataclass(frozen=True)
class ShardPlan:
    """What one rank writes in every save of a state of these names, shapes, dtypes and placements."""

    file: str
    entries: tuple[Entry, ...]
    """In the order in which they lie in the file."""
    room_bytes: int
    """Where the first one begins: the header takes no more."""
    size_bytes: int
    """Of the file, without the values that are no tensors."""
    layout: Layout
    """Where every tensor lies, on all ranks; on rank 0 alone, else empty."""


@dataclass(frozen=True)
class Shard:
    """What one rank is about to write."""

    plan: ShardPlan
    """With the values that are no tensors."""
    tensors: Sequence[Tensor]
    """The live ones, one per entry of the plan; none where they were copied."""
    block: np.ndarray | None
    """Their copy: uint8 [plan.size_bytes], the file with room for its header."""

    def parts(self, check: FiniteCheck | None = None) -> Iterator[memoryview]:
        """Yields the bytes of the file from front to back, a piece at a time; `check` sees each before it is yielded.

        Live tensors are brought to the host one at a time.
        """
        header, _ = safetensors_header([entry.header for entry in self.plan.entries], self.plan.room_bytes)
        if self.block is None:
            yield memoryview(header)
            for entry, tensor in zip(self.plan.entries, self.tensors, strict=True):
                data = tensor_bytes(tensor.detach().cpu().contiguous())
                for start in range(0, len(data), PIECE_BYTES):
                    piece = data[start : start + PIECE_BYTES]
                    if check is not None:
                        check.look(entry.name, entry.dtype, piece)
                    yield piece
        else:
            file = self.block.data
            file[: len(header)] = header
            for start in range(0, len(file), PIECE_BYTES):
                if check is not None:
                    self._look(file, start, start + PIECE_BYTES, check)
                yield file[start : start + PIECE_BYTES]

    def _look(self, file: memoryview, start: int, end: int, check: FiniteCheck) -> None:
        """Shows `check` what of the tensors lies between two places of the file.

        No element lies on both sides: tensors and pieces begin at multiples of their element's size.
        """
        entries = self.plan.entries
        index = max(0, bisect_right(entries, start, key=lambda entry: entry.chunk.start) - 1)
        while index < len(entries) and entries[index].chunk.start < end:
            entry, chunk = entries[index], entries[index].chunk
            if check.wants(entry.name):
                check.look(
                    entry.name, entry.dtype, file[max(start, chunk.start) : min(end, chunk.start + chunk.size_bytes)]
                )
            index += 1


class Stager:
    """Makes the shards of one run's saves; `copy` = of copies, so that the training may go on."""

    def __init__(self, *, copy: bool):
        self.copy = copy
        self._plan: ShardPlan | None = None
        self._key: tuple = ()
        self._memory: HostMemory | None = None

    @torch.no_grad()
    def stage(self, state: Mapping[str, Tensor]) -> Shard:
        """Returns what this rank has to write of `state`; collective.

        state: flat names -> plain tensors (equal on all ranks) or DTensors, on any device, and "json" as of
            `AppState.state_dict`, which rank 0 writes.

        Raises:
            CheckpointError: on every rank, if any rank failed; names the rank, the tensor, and the reason.
        """
        tensors = {name: tensor for name, tensor in state.items() if name != JSON_TENSOR}
        key = tuple((name, _shape_and_place(tensor)) for name, tensor in tensors.items())
        if not all(gather_objects(self._plan is not None and self._key == key)):  # all ranks plan anew, or none
            self._plan, self._key = plan_shard(tensors), key
        assert self._plan is not None
        plan, sources = self._plan, [_local(tensors[entry.name]) for entry in self._plan.entries]
        if JSON_TENSOR in state and _rank() == 0:
            plan, sources = _with_document(plan, state[JSON_TENSOR]), [*sources, state[JSON_TENSOR]]
        if not self.copy:
            return Shard(plan, sources, None)
        if self._memory is None:
            self._memory = HostMemory(_device_of(tensors.values()))
        return self._memory.copy(plan, sources)

    def close(self) -> None:
        """Gives the host memory back."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class HostMemory:
    """One block of host memory, page-locked where there is a GPU, that grows to the largest save and stays."""

    def __init__(self, device: torch.device):
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)
        self._helpers = torch.get_num_threads() - 1 if device.type == "cpu" else 0
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="checkpoint-copy")

    def copy(self, plan: ShardPlan, sources: Sequence[Tensor]) -> Shard:
        """Returns the shard with its tensors copied to where they lie in the file; returns when that is done."""
        if self._block.numel() < plan.size_bytes:
            self._block = _allocate(plan.size_bytes + plan.size_bytes // 64 + (1 << 20), self._device)
        block, jobs = self._block.numpy(), []
        for entry, source in zip(plan.entries, sources, strict=True):
            chunk = entry.chunk
            if source.device.type == "cpu" and source.is_contiguous():
                array = as_bytes(source.detach()).numpy()
                for start in range(0, chunk.size_bytes, _COPY_BYTES):
                    piece = array[start : start + _COPY_BYTES]
                    jobs.append((block[chunk.start + start : chunk.start + start + len(piece)], piece))
            else:
                target = self._block[chunk.start : chunk.start + chunk.size_bytes].view(source.dtype).view(chunk.sizes)
                target.copy_(source.detach(), non_blocking=True)
        self._copy_all(jobs)
        devices.synchronize(self._device)
        return Shard(plan, (), block[: plan.size_bytes])

    def _copy_all(self, jobs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """One memcpy per job: torch would start and join its threads for each tensor, which costs more than small copies
        take. numpy lets other threads run meanwhile."""
        remaining = iter(jobs)  # taking the next one is a single operation of the interpreter: no lock is needed

        def work() -> None:
            for target, source in remaining:
                np.copyto(target, source)

        helpers = [self._pool.submit(work) for _ in range(self._helpers)]
        work()
        for helper in helpers:
            helper.result()

    def close(self) -> None:
        self._pool.shutdown()


def plan_shard(tensors: Mapping[str, Tensor]) -> ShardPlan:
    """Returns what this rank has to write; collective.

    Raises:
        CheckpointError: on every rank; a value that cannot be written, by name.
    """
    recorder = _Recorder(_rank())
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with dcp_errors("cannot plan the checkpoint"), torch.no_grad():
        dcp_save(dict(tensors), storage_writer=recorder, planner=planner, no_dist=not dist.is_initialized())
    return replace(recorder.plan, layout=recorder.layout)


class _Recorder(StorageWriter):
    """Takes down what DCP plans for this rank and, on the coordinator, for all of them. Writes nothing."""

    def __init__(self, rank: int):
        self.plan = ShardPlan(shard_name(rank), (), 0, 0, {})
        self.layout: dict[str, TensorLayout] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
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
        self.plan = _lay_out(self.plan.file, sorted(plan.items, key=_file_order))
        results = []
        for entry in self.plan.entries:
            chunk = entry.chunk
            index = MetadataIndex(entry.name, torch.Size(chunk.offsets))
            results.append(WriteResult(index, chunk.size_bytes, (chunk.file, chunk.start, chunk.size_bytes)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank_results in results for result in rank_results}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = tuple(
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *places[MetadataIndex(name, chunk.offsets)])
                for chunk in tensor.chunks
            )
            self.layout[name] = TensorLayout(DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), chunks)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # DCP must not pick this by path


def _lay_out(file: str, items: Sequence[WriteItem]) -> ShardPlan:
    entries = []
    for item in items:
        data = _tensor_data(item)
        offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        size_bytes = math.prod(sizes) * data.properties.dtype.itemsize
        chunk = Chunk(offsets, sizes, file, 0, size_bytes)
        entries.append(Entry(item.index.fqn, DTYPE_NAMES[data.properties.dtype], chunk, data.chunk.sizes == data.size))
    # With room for the longest entry of the values that are no tensors, the header never moves what follows it.
    document = (JSON_TENSOR, "U8", (10**18,))
    header, starts = safetensors_header([*(entry.header for entry in entries), document])
    placed = [
        replace(entry, chunk=replace(entry.chunk, start=start))
        for entry, start in zip(entries, starts[:-1], strict=True)
    ]
    return ShardPlan(file, tuple(placed), len(header), starts[-1], {})


def _with_document(plan: ShardPlan, document: Tensor) -> ShardPlan:
    """Returns the plan with the JSON of everything that is no tensor, as the last entry of the file."""
    start = plan.size_bytes
    checksum = xxh3_bytes(document.numpy().tobytes())
    chunk = Chunk((0,), (document.numel(),), plan.file, start, document.numel(), checksum)
    layout = {**plan.layout, JSON_TENSOR: TensorLayout("U8", chunk.sizes, (chunk,))}
    entries = (*plan.entries, Entry(JSON_TENSOR, "U8", chunk, True))
    return replace(plan, entries=entries, size_bytes=start + document.numel(), layout=layout)


def _tensor_data(item: WriteItem):
    if item.tensor_data is None:
        raise CheckpointError(f"state {item.index.fqn!r} is not a tensor; only tensors are written as shards")
    return item.tensor_data


def _file_order(item: WriteItem) -> tuple:
    """Large elements first, so that every entry of a file starts at a multiple of its element's size."""
    return (-_tensor_data(item).properties.dtype.itemsize, item.index.fqn, tuple(item.index.offset or ()))


def _shape_and_place(tensor: Any) -> tuple:
    if not isinstance(tensor, Tensor):
        return (type(tensor),)  # the plan refuses it by name
    place = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
    return tuple(tensor.shape), tensor.dtype, place


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _device_of(tensors: Any) -> torch.device:
    """Returns the device to synchronise with, and to lock pages for: that of a tensor beyond the host, if any is."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def _allocate(size_bytes: int, device: torch.device) -> Tensor:
    """Returns host memory that begins at a page: uint8 [size_bytes]."""
    try:
        memory = devices.host_buffer(size_bytes + mmap.PAGESIZE, device)
    except LaunchError as error:
        raise CheckpointError(f"{error}; a copy of the state wants it: save without one (--ckpt.no-async)") from error
    shift = -memory.data_ptr() % mmap.PAGESIZE
    return memory[shift : shift + size_bytes]
