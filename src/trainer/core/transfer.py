"""Work that runs beside the computation, and the host memory that copies need.

A `Lane` is an ordered queue of work on one device. The work of two lanes overlaps unless one waits for a mark of the
other. On CPU there is one queue, the program itself: work runs when it is handed in, and waiting returns at once.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from trainer.core import device as devices


class Mark(Protocol):
    """A point in a lane's queue."""

    def synchronize(self) -> None:
        """Returns when everything before the mark is done."""


class _Passed:
    """The mark of a lane whose work is done as soon as it is handed in."""

    def synchronize(self) -> None:
        pass


class Lane:
    """A queue of work; see the module's docstring."""

    def __init__(self, stream: torch.Stream | None, *, switch: bool):
        """`switch`: the stream is not the current one and must be made current around the work."""
        self._stream = stream
        self._switch = switch

    def run(self, work: Callable[[], object]) -> None:
        """Queues what `work` does on the device."""
        if self._stream is None or not self._switch:
            work()
        else:
            with self._stream:
                work()

    def mark(self) -> Mark:
        return _Passed() if self._stream is None else self._stream.record_event()

    def wait(self, mark: Mark | None) -> None:
        """Lets what is queued from here on start only after `mark`."""
        if self._stream is not None and mark is not None and not isinstance(mark, _Passed):
            self._stream.wait_event(mark)  # pyright: ignore[reportArgumentType]


class Lanes:
    """Where lanes come from; a test may bring its own."""

    def current(self, device: torch.device) -> Lane:
        """Returns the queue that operations on `device` go to by themselves, from the calling thread."""
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        return Lane(stream, switch=False)

    def new(self, device: torch.device) -> Lane:
        """Returns a queue of its own on `device`; on CPU, the program itself."""
        return Lane(None if device.type == "cpu" else torch.Stream(device), switch=True)


class HostArena:
    """Host memory from which tensors are taken one after the other, packed into few large blocks.

    Blocks are page-locked where `device` is a GPU, so that copies to and from it run beside the computation. Memory
    lives as long as the arena and is never handed out twice.
    """

    ALIGNMENT_BYTES = 256

    def __init__(self, device: torch.device, *, block_bytes: int = 2**28):
        self._device = device
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._free: Tensor | None = None  # the rest of the newest block that is shared by several tensors
        self._spans: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.numel() for block in self._blocks)

    def take(self, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an uninitialised host tensor of the shape, dtype and, if it is dense, the strides of `like`.

        like: a plain tensor on any device ("meta" too); the result keeps nothing of it.
        """
        shape = torch.empty_like(like, dtype=dtype, device="meta", requires_grad=False)
        size_bytes = shape.numel() * shape.element_size()
        memory = self._carve(size_bytes).view(shape.dtype)
        return memory.as_strided(shape.shape, shape.stride(), memory.storage_offset())

    def owns(self, tensor: Tensor) -> bool:
        """Whether the plain tensor lies in this arena's memory."""
        address = tensor.data_ptr()
        return tensor.device.type == "cpu" and any(start <= address < end for start, end in self._spans)

    def _carve(self, size_bytes: int) -> Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        padded_bytes = -(-size_bytes // self.ALIGNMENT_BYTES) * self.ALIGNMENT_BYTES
        if padded_bytes > self._block_bytes // 4:
            return self._new_block(padded_bytes)[:size_bytes]  # a block of its own leaves no unused rest
        if self._free is None or self._free.numel() < padded_bytes:
            self._free = self._new_block(self._block_bytes)
        piece, self._free = self._free[:size_bytes], self._free[padded_bytes:]
        return piece

    def _new_block(self, size_bytes: int) -> Tensor:
        block = devices.host_buffer(size_bytes + self.ALIGNMENT_BYTES, self._device)
        shift = -block.data_ptr() % self.ALIGNMENT_BYTES
        self._blocks.append(block)
        self._spans.append((block.data_ptr(), block.data_ptr() + block.numel()))
        return block[shift : shift + size_bytes]
