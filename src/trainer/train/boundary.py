"""Where updates happen, counted in micro-steps, and which update serves a request that fell inside a cycle.

A *micro-step* is one forward and backward of a micro-batch on each data rank, and a *cycle* is the micro-steps of one
update. Pure arithmetic: positions are functions of the step, so a resumed run has those of the uninterrupted one.

With 10 micro-batches in an epoch and 4 in a cycle, "flush" updates after micro-steps 4, 8, 10, 14, 18, 20 (an epoch's
last cycle is short), "carry" after 4, 8, 12, 16, 20.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Boundaries:
    """The step boundaries of a run at one cut of its batches.

    Attributes:
        grad_accum: micro-steps of a full cycle.
        epoch_end: "carry": cycles run on across the end of an epoch; "flush": an epoch's last cycle ends with it.
        in_epoch: epoch -> its micro-steps; asked with "flush" only.
    """

    grad_accum: int
    epoch_end: Literal["carry", "flush"]
    in_epoch: Callable[[int], int]

    def after(self, step: int) -> int:
        """Returns the micro-steps done after `step` updates."""
        if self.epoch_end == "carry":
            return step * self.grad_accum
        epoch = begin = 0
        while step > (cycles := self._cycles(epoch)):
            step, begin, epoch = step - cycles, begin + self.in_epoch(epoch), epoch + 1
        return begin + min(step * self.grad_accum, self.in_epoch(epoch))

    def next_boundary(self, micro_step: int) -> int:
        """Returns the first boundary at or behind `micro_step` (from 1): where a request made there is served."""
        if self.epoch_end == "carry":
            return _up(micro_step, self.grad_accum)
        epoch = begin = 0
        while micro_step > begin + (length := self.in_epoch(epoch)):
            begin, epoch = begin + length, epoch + 1
        return begin + min(_up(micro_step - begin, self.grad_accum), length)

    def serves(self, step: int, interval: int) -> bool:
        """Whether a request at a multiple of `interval` micro-steps is served after `step` updates (from 1)."""
        return self.after(step) // interval > self.after(step - 1) // interval

    def _cycles(self, epoch: int) -> int:
        return -(-self.in_epoch(epoch) // self.grad_accum)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
