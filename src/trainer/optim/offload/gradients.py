"""Gradients that leave the device while backward goes on, and are summed on the host in float32.

Each device parameter has a hook that runs when its gradient is complete for this micro-step. It sends the gradient to
the host and frees it, so the device holds the gradients of a few parameters and never of all.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from trainer.core.transfer import HostArena, Lanes, Mark
from trainer.errors import TrainingError
from trainer.optim.offload.tensors import around, local_part

SLOTS = 4


@dataclass(frozen=True)
class _Sum:
    """A master and its accumulator: float32 on the host, in the shape of the master's part on this rank."""

    master: Tensor
    part: Tensor
    whole: Tensor  # `part` as `master.grad` shows it


class HostGradients:
    """Float32 sums of gradients on the host, shown as the `.grad` of the masters.

    A master's `.grad` is None until a gradient of this step has arrived, as with any parameter; `finish` must be called
    before its values are read.

    Attributes:
        before_adding: called before a gradient is added to a sum.
        on_arrival: called in backward for each gradient that has left, with its master and what still adds it up.
    """

    before_adding: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        arena: HostArena,
        device: torch.device,
        *,
        copies: bool,
        slot_bytes: int,
        lanes: Lanes,
    ):
        """`copies`: gradients go through `SLOTS` page-locked slots of `slot_bytes`; else they are read where they are."""
        self._arena = arena
        self._device = device
        self._lanes = lanes
        self._lane = lanes.new(device)
        self._sums: dict[int, _Sum] = {}
        self._hooks: list[Any] = []
        self._copies = copies
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._pending: list[Future[None]] = []
        self.on_arrival: Callable[[Tensor, list[Future[None]]], None] | None = None
        # One thread adds up, in the order of arrival: the device's queue must not wait for the host's arithmetic.
        self._adder = ThreadPoolExecutor(1, thread_name_prefix="gradients") if copies else None
        for _ in range(SLOTS if copies else 0):
            self._free.put(arena.take(torch.empty(slot_bytes, dtype=torch.uint8, device="meta")))

    def watch(self, parameter: Tensor, master: Tensor) -> None:
        """Takes the gradients of the device parameter from now on, for `master` (float32, host).

        Raises:
            TrainingError: they go to another optimizer already, which would leave nothing to this one.
        """
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(isinstance(getattr(hook, "__self__", None), HostGradients) for hook in hooks.values()):
            raise TrainingError(
                f"a parameter of shape {list(parameter.shape)} sends its gradients to another optimizer in mode "
                '"full"; close() that one first'
            )
        part = self._arena.take(local_part(master))
        self._sums[id(parameter)] = _Sum(master, part, around(part, master))
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._leave))

    def finish(self) -> None:
        """Returns when all gradients that left are in the sums."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    @torch.no_grad()
    def restore(self, gradients: Mapping[int, Tensor]) -> None:
        """Makes these the sums so far, by the `id` of their masters; other masters have none."""
        self.finish()
        for target in self._sums.values():
            gradient = gradients.get(id(target.master))
            target.master.grad = None if gradient is None else target.whole
            if gradient is not None:
                target.part.copy_(local_part(gradient))

    def close(self) -> None:
        """Lets gradients stay on the device again; returns when those that left have arrived. `finish` tells how that ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._adder is not None:
            self._adder.shutdown()

    @torch.no_grad()
    def _leave(self, parameter: Tensor) -> None:
        """The hook: runs in backward, on the stream that made the gradient."""
        if parameter.grad is None:
            return
        gradient = local_part(parameter.grad)
        parameter.grad = None
        target = self._sums[id(parameter)]
        is_first = target.master.grad is None
        if not is_first:
            self.before_adding()
        target.master.grad = target.whole
        additions: list[Future[None]] = []
        if self._copies and gradient.is_contiguous() and target.part.is_contiguous():
            additions = self._send(gradient.view(-1), target.part.view(-1), is_first)
        else:
            self.finish()  # what left earlier is added first
            _add(gradient.cpu(), target.part, is_first)
        if self.on_arrival is not None:
            self.on_arrival(target.master, additions)

    def _send(self, gradient: Tensor, target: Tensor, is_first: bool) -> list[Future[None]]:
        self._lane.wait(self._lanes.current(self._device).mark())
        done = [future for future in self._pending if future.done()]
        for future in done:
            self._pending.remove(future)
            future.result()
        additions: list[Future[None]] = []
        start, count = 0, gradient.numel()
        while start < count:
            slot = self._free.get()
            length = min(count - start, slot.numel() // gradient.element_size())
            piece = gradient[start : start + length]
            landed = slot[: length * gradient.element_size()].view(gradient.dtype)
            self._lane.run(lambda piece=piece, landed=landed: landed.copy_(piece, non_blocking=True))
            arrival = self._lane.mark()
            into = target[start : start + length]
            additions.append(self._submit(self._receive, arrival, piece, landed, slot, into, is_first))
            self._pending.append(additions[-1])
            start += length
        return additions

    def _submit(self, work: Callable[..., None], *arguments: Any) -> "Future[None]":
        assert self._adder is not None
        return self._adder.submit(work, *arguments)

    @torch.no_grad()
    def _receive(
        self, arrival: Mark, piece: Tensor, landed: Tensor, slot: Tensor, into: Tensor, is_first: bool
    ) -> None:
        # `piece` keeps the device's memory from being used for something else before the copy is done.
        try:
            arrival.synchronize()
            _add(landed, into, is_first)
        finally:
            self._free.put(slot)


def _add(gradient: Tensor, target: Tensor, is_first: bool) -> None:
    if is_first:
        target.copy_(gradient)  # not 0 + gradient, which would turn -0.0 into 0.0
    else:
        target.add_(gradient)
