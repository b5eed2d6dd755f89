"""Stepping host masters on the device: for update rules that are matrix products, which the device does far faster."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.core.transfer import Lanes
from trainer.optim.offload.chunks import Chunk, ChunkedStep, plan_chunks
from trainer.optim.offload.hosting import Entry, HostedState
from trainer.optim.offload.tensors import around, largest_part_bytes, local_part
from trainer.optim.offload.transfer import ChunkStream, Passage


class DeviceStep:
    """Streams masters, their gradients and their state through the device; masters and state come back.

    During a chunk's step the optimizer sees twins on the device in the masters' places: group["params"] holds them, and
    state is found under them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hosted: HostedState,
        gradient_of: Callable[[Tensor], Tensor],
        device: torch.device,
        chunk_bytes: int,
        lanes: Lanes,
    ):
        """`gradient_of`: master -> its gradient's plain part on the host, whether or not it has one in this step."""
        self._optimizer = optimizer
        self._hosted = hosted
        self._gradient_of = gradient_of
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._lanes = lanes
        self._chunks: list[Chunk] = []
        self._twins: list[list[nn.Parameter]] = []
        self._gradients: list[list[Tensor]] = []
        self._entries: list[list[Entry]] = []
        self._stream: ChunkStream | None = None

    @property
    def device_bytes(self) -> int:
        return self._stream.device_bytes if self._stream is not None else 0

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def run(self, scale: Tensor | None, done: Callable[[Tensor, Tensor], None]) -> None:
        """One step. `scale`: factor of all gradients. ``done(master, twin)`` is called while the twin holds the result."""
        if self._hosted.replan(self._entries):
            self._plan()
        assert self._stream is not None
        scale = scale if scale is None else scale.to(self._device)
        step = ChunkedStep(self._optimizer)
        self._stream.run(lambda index: self._step_chunk(index, step, scale, done))

    def _step_chunk(
        self,
        index: int,
        step: ChunkedStep,
        scale: Tensor | None,
        done: Callable[[Tensor, Tensor], None],
    ) -> None:
        state, twins = self._optimizer.state, self._twins[index]
        masters = self._chunks[index].parameters(self._optimizer.param_groups)
        for master, twin, gradient in zip(masters, twins, self._gradients[index], strict=True):
            twin.grad = None if master.grad is None else gradient
            if scale is not None and twin.grad is not None:
                local_part(twin.grad).mul_(scale)
            if master in state:
                state[twin] = state[master]  # the same dict: what a step writes, the master has
        try:
            with self._hosted.on_device(self._entries[index]):
                step(self._chunks[index], twins)
        finally:
            for master, twin in zip(masters, twins, strict=True):
                made = state.pop(twin, None)
                if made is not None:
                    state[master] = made
        self._hosted.adopt(masters)
        for master, twin in zip(masters, twins, strict=True):
            done(master, twin)

    def _plan(self) -> None:
        self.synchronize()
        self._stream, self._twins, self._gradients, self._entries = None, [], [], []

        def streamed_bytes(master: Tensor) -> int:
            tensors = [master, master, *self._streamed(master).values()]  # twice: the gradient is as large
            return sum(largest_part_bytes(tensor) for tensor in tensors)

        self._chunks = plan_chunks(self._optimizer, streamed_bytes, self._chunk_bytes)
        masters = [chunk.parameters(self._optimizer.param_groups) for chunk in self._chunks]
        places = [[(m, key, t) for m in members for key, t in self._streamed(m).items()] for members in masters]
        passages = [
            Passage(
                [local_part(master) for master in members]
                + [local_part(tensor) for _, _, tensor in place]
                + [self._gradient_of(master) for master in members],
                returned=len(members) + len(place),
            )
            for members, place in zip(masters, places, strict=True)
        ]
        self._stream = ChunkStream(passages, self._device, self._lanes)
        for members, place, twins in zip(masters, places, self._stream.twins, strict=True):
            first, last = len(members), len(members) + len(place)
            pairs = list(zip(members, twins[:first], strict=True))
            self._twins.append([nn.Parameter(around(twin, master)) for master, twin in pairs])
            self._gradients.append([around(twin, master) for master, twin in zip(members, twins[last:], strict=True)])
            self._entries.append(
                [self._hosted.entry(*where, twin) for where, twin in zip(place, twins[first:last], strict=True)]
            )
        self._hosted.stale = False

    def _streamed(self, master: Tensor) -> dict[str, Tensor]:
        """Counters of a single element stay on the host, unless the group says that its step wants them on the device."""
        on_device = any(_wants_counters(group) for group in self._optimizer.param_groups)
        return {k: t for k, t in self._hosted.tensors(master).items() if on_device or t.numel() != 1}


def _wants_counters(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))
