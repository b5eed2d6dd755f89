"""Host memory that passes chunk by chunk through a bounded buffer on the device.

While chunk i is worked on, chunk i + 1 is copied in and chunk i - 1 is copied out, on queues of their own. So device
memory grows by the buffer, three chunks long, and not by what lies on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.transfer import HostArena, Lanes, Mark

SLOTS = 3  # one chunk comes in, one is worked on, one goes out


@dataclass(frozen=True)
class Passage:
    """The host tensors of one chunk.

    Attributes:
        tensors: dense plain tensors on the host, of any dtype and shape; empty ones are allowed.
        returned: so many of them, from the front, are copied back.
    """

    tensors: Sequence[Tensor]
    returned: int


@dataclass(frozen=True)
class _Run:
    """Neighbouring tensors that one copy moves."""

    host: Tensor  # uint8
    offset: int  # in the slot


class ChunkStream:
    """Streams `passages` through the device; see the module's docstring.

    Attributes:
        twins: for each passage, its tensors' counterparts on the device. They have contents only while `run` works on
            that passage; passages that are SLOTS apart share memory.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        device: torch.device,
        lanes: Lanes,
    ):
        self._device = device
        self._lanes = lanes
        self._into, self._out_of = lanes.new(device), lanes.new(device)
        offsets = [_offsets(passage.tensors) for passage in passages]
        self._inputs = [_runs(p.tensors, at) for p, at in zip(passages, offsets, strict=True)]
        self._outputs = [_runs(p.tensors[: p.returned], at) for p, at in zip(passages, offsets, strict=True)]
        sizes = [max((run.offset + run.host.numel() for run in runs), default=0) for runs in self._inputs]
        self._slots = [
            torch.empty(max(sizes[first::SLOTS]), dtype=torch.uint8, device=device)
            for first in range(min(SLOTS, len(passages)))
        ]
        # The allocator may hand out memory that queued work still uses: the first copies wait for it.
        self._emptied: list[Mark] = [lanes.current(device).mark()] * len(self._slots)
        self.twins = [
            [self._twin(tensor, index, offset) for tensor, offset in zip(passage.tensors, at, strict=True)]
            for index, (passage, at) in enumerate(zip(passages, offsets, strict=True))
        ]

    @property
    def device_bytes(self) -> int:
        return sum(slot.numel() for slot in self._slots)

    def run(self, work: Callable[[int], object]) -> None:
        """Calls ``work(i)`` for every passage, in order, with its twins filled, and copies its results back.

        Returns when the last copy is queued; `synchronize` waits for it.
        """
        compute = self._lanes.current(self._device)
        count = len(self._inputs)
        arrived = self._bring(0) if count else None
        for index in range(count):
            following = self._bring(index + 1) if index + 1 < count else None
            compute.wait(arrived)
            compute.run(lambda index=index: work(index))
            self._return(index, compute.mark())
            arrived = following

    def synchronize(self) -> None:
        """Returns when all results are on the host."""
        for mark in self._emptied:
            mark.synchronize()

    def _slot(self, index: int, run: _Run) -> Tensor:
        return self._slots[index % SLOTS][run.offset : run.offset + run.host.numel()]

    def _bring(self, index: int) -> Mark:
        # The slot's last occupant went out on the other lane. This chunk's own copy-out of the step before did so too,
        # earlier or in that very slot: the host memory is complete when the slot is empty.
        self._into.wait(self._emptied[index % SLOTS])
        for run in self._inputs[index]:
            self._into.run(lambda run=run: self._slot(index, run).copy_(run.host, non_blocking=True))
        return self._into.mark()

    def _return(self, index: int, done: Mark) -> None:
        self._out_of.wait(done)
        for run in self._outputs[index]:
            self._out_of.run(lambda run=run: run.host.copy_(self._slot(index, run), non_blocking=True))
        self._emptied[index % SLOTS] = self._out_of.mark()

    def _twin(self, tensor: Tensor, index: int, offset: int) -> Tensor:
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device=self._device)
        size_bytes = tensor.numel() * tensor.element_size()
        memory = self._slots[index % SLOTS][offset : offset + size_bytes].view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Places in a slot: neighbours on the host stay neighbours, with the same distance, so that one copy moves them."""
    offsets, end, before = [], 0, None
    for tensor in tensors:
        distance = _distance(before, tensor)
        aligned = -(-end // HostArena.ALIGNMENT_BYTES) * HostArena.ALIGNMENT_BYTES
        offset = aligned if distance is None else offsets[-1] + distance
        offsets.append(offset)
        end, before = offset + tensor.numel() * tensor.element_size(), tensor
    return offsets


def _distance(a: Tensor | None, b: Tensor) -> int | None:
    """Bytes from the start of `a` to that of `b`, if `b` is the next tensor in the same memory; else None."""
    if a is None or a.numel() == 0 or b.numel() == 0:
        return None
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    distance = b.data_ptr() - a.data_ptr()
    gap = distance - a.numel() * a.element_size()
    return distance if 0 <= gap < HostArena.ALIGNMENT_BYTES else None


def _runs(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[_Run]:
    runs: list[tuple[Tensor, int, int]] = []  # first tensor, its offset, bytes
    before, before_offset = None, 0
    for tensor, offset in zip(tensors, offsets, strict=False):  # the first few of the passage's
        size_bytes = tensor.numel() * tensor.element_size()
        if not size_bytes:
            continue
        if _distance(before, tensor) == offset - before_offset:
            first, start, _ = runs[-1]
            runs[-1] = (first, start, offset - start + size_bytes)
        else:
            runs.append((tensor, offset, size_bytes))
        before, before_offset = tensor, offset
    return [_Run(_bytes(first, size_bytes), offset) for first, offset, size_bytes in runs]


def _bytes(first: Tensor, size_bytes: int) -> Tensor:
    """Returns `size_bytes` of the memory from the start of `first` on, as uint8."""
    start = first.storage_offset() * first.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())  # pyright: ignore[reportArgumentType,reportCallIssue]
    return whole[start : start + size_bytes]
