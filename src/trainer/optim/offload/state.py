"""Mode "optimizer": weights and gradients on the device, optimizer state on the host."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.core.log import logger
from trainer.core.transfer import HostArena, Lanes
from trainer.optim.clip import clip_gradients, clipping_factor
from trainer.optim.offload.base import OffloadOptimizer, updated_parameters
from trainer.optim.offload.chunks import Chunk, ChunkedStep, plain_step, plan_chunks
from trainer.optim.offload.hosting import Entry, HostedState
from trainer.optim.offload.native import NativeAdamW
from trainer.optim.offload.tensors import largest_part_bytes, local_part
from trainer.optim.offload.transfer import ChunkStream, Passage

Transfer = Literal["auto", "direct", "copy"]
"""How host and device exchange data. "direct": they are the same memory, nothing is copied (CPU only). "copy": through
bounded buffers. "auto": "direct" on CPU, "copy" elsewhere."""

CHUNK_BYTES = 2**28


def copies(transfer: Transfer, device: torch.device) -> bool:
    """Whether data is copied between host and device."""
    return transfer == "copy" or device.type != "cpu"


def new_arena(parameters: list[Tensor], device: torch.device) -> HostArena:
    """Returns an empty arena whose blocks suit state of the size of `parameters`: little of the last stays unused."""
    size_bytes = sum(local_part(parameter).numel() * 4 for parameter in parameters)
    return HostArena(device, block_bytes=min(2**28, max(2**12, size_bytes // 8)))


class CPUOffloadOptimizer(OffloadOptimizer):
    """Keeps the state tensors of `inner` in packed host memory and streams them through the device in every step.

    The results are bit for bit those of `inner` alone. State that exists is taken over at construction (see
    `hosting.StateOnHost` for making it on the host in the first place); state that `inner` makes lazily, in the step
    that makes it. On CPU the host memory is the device's, and a step works on it directly.
    """

    mode = "optimizer"

    def __init__(
        self,
        inner: Optimizer,
        *,
        arena: HostArena | None = None,
        transfer: Transfer = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        lanes: Lanes | None = None,
    ):
        """
        Args:
            arena: where state lies; by default a new one.
            chunk_bytes: state that is on the device at a time, times three.
        """
        super().__init__(inner)
        self._lanes = lanes or Lanes()
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self._device = local_part(parameters[0]).device if parameters else torch.device("cpu")
        self._arena = arena or new_arena(parameters, self._device)
        self._hosted = HostedState(inner, self._arena, self._device)
        self._copies = copies(transfer, self._device)
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Chunk] = []
        self._entries: list[list[Entry]] = []
        self._stream: ChunkStream | None = None
        self._hosted.adopt_new()
        self._native = None if self._copies else NativeAdamW.of(inner)
        self._factor: Tensor | None = None
        if self._copies:
            self._plan()

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def device_bytes(self) -> int:
        return self._stream.device_bytes if self._stream is not None else 0

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()

    def _take_over(self) -> None:
        self._hosted.adopt_new()

    def _adopt(self, group: dict[str, Any]) -> None:
        self._hosted.adopt(group["params"])
        self._hosted.stale = True

    def clip_gradients(self, max_norm: float | None, *, within_step: bool = False) -> Tensor:
        if self._native is None or not within_step:
            return super().clip_gradients(max_norm)
        norm = clip_gradients(updated_parameters(self), None)
        self._factor = clipping_factor(norm, max_norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._factor = None
        super().zero_grad(set_to_none)

    def _update_in_place(self) -> None:
        factor, self._factor = self._factor, None
        groups = enumerate(self.param_groups)
        active = {index: [p for p in group["params"] if p.grad is not None] for index, group in groups}
        members = None if self._native is None else self._native.plan(active)
        if self._native is not None and members is not None:
            self._native.step(members, factor, {})
            return
        for parameter in (p for members in active.values() for p in members):
            if factor is not None and parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)
        plain_step(self.inner)()
        self._hosted.adopt_new()

    def _update(self) -> None:
        if not self._copies:
            self._update_in_place()
            return
        self._hosted.adopt_new()
        if self._hosted.replan(self._entries):
            self._plan()
        assert self._stream is not None
        step = ChunkedStep(self.inner)
        self._stream.run(lambda index: self._step_chunk(index, step))

    def _step_chunk(self, index: int, step: ChunkedStep) -> None:
        chunk = self._chunks[index]
        with self._hosted.on_device(self._entries[index]):
            step(chunk)
        self._hosted.adopt(chunk.parameters(self.param_groups))

    def _plan(self) -> None:
        self.synchronize()  # the old stream's copies

        def state_bytes(parameter: Tensor) -> int:
            return sum(largest_part_bytes(tensor) for tensor in self._hosted.tensors(parameter).values())

        self._chunks = plan_chunks(self.inner, state_bytes, self._chunk_bytes)
        places = [
            [
                (parameter, key, tensor)
                for parameter in chunk.parameters(self.param_groups)
                for key, tensor in self._hosted.tensors(parameter).items()
            ]
            for chunk in self._chunks
        ]
        self._stream = None  # its buffer is free before the next one is made
        self._entries = []
        passages = [Passage([local_part(tensor) for _, _, tensor in place], len(place)) for place in places]
        self._stream = ChunkStream(passages, self._device, self._lanes)
        self._entries = [
            [self._hosted.entry(*where, twin) for where, twin in zip(place, twins, strict=True)]
            for place, twins in zip(places, self._stream.twins, strict=True)
        ]
        self._hosted.stale = False
        logger.debug(
            f"optimizer state on the host: {self.host_bytes / 2**30:.2f} GiB in {len(self._chunks)} chunks through "
            f"{self.device_bytes / 2**30:.2f} GiB on {self._device}"
        )
