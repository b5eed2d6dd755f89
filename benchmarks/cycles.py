"""Comparison of loops that take steps in turn, from the time of each step.

Two things make single steps dear. What a loop does now and then (it prepares several batches at once, collects garbage, plans
an epoch) is its own and counts. What the machine does (a pause of 50 ms within a step of 20) strikes either loop, and a few
of them more in one than in the other are percents of a measurement. So steps are looked at by their place in the loop's
cycle, and none counts for more than `CAP` of the median at its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

CAP = 1.5
RESAMPLES = 200


@dataclass(frozen=True)
class Steps:
    """The steps of one loop in one process, each array [cycles, places of a cycle].

    Attributes:
        seconds: wall time.
        cpu_seconds: of all threads of the process.
        tokens: useful ones, without padding.
    """

    seconds: Float64
    cpu_seconds: Float64
    tokens: Float64

    def cycles(self, which: NDArray[np.int64]) -> Self:
        """Returns these cycles; one may be named several times."""
        return type(self)(self.seconds[which], self.cpu_seconds[which], self.tokens[which])

    @property
    def step_seconds(self) -> float:
        return typical(self.seconds)

    @property
    def rate(self) -> float:
        """Useful tokens per second."""
        return float(self.tokens.mean()) / self.step_seconds

    @property
    def cpu_rate(self) -> float:
        return float(self.tokens.mean()) / typical(self.cpu_seconds)

    @property
    def whole_rate(self) -> float:
        """Useful tokens per second of all that passed, pauses of the machine among it."""
        return float(self.tokens.sum() / self.seconds.sum())


def typical(seconds: Float64) -> float:
    """Returns the mean of a step, [cycles, places] -> seconds, in which no step is more than `CAP` of its place's median."""
    return float(np.minimum(seconds, CAP * np.median(seconds, axis=0)).mean())


def standard_error(ours: Steps, theirs: Steps) -> float:
    """Returns that of ours / theirs within one process: the spread of the ratio over cycles drawn anew, with their pairing."""
    draw = np.random.default_rng(0)
    count = len(ours.seconds)
    drawn = (draw.integers(0, count, count) for _ in range(RESAMPLES))
    return float(np.std([ours.cycles(which).rate / theirs.cycles(which).rate for which in drawn]))


def compare_steps(ours: Sequence[Steps], theirs: Sequence[Steps]) -> dict[str, float]:
    """Returns ours / theirs in useful tokens per second, the mean over the processes, and how sure that is.

    The standard error is the larger one of what single processes say of themselves and what lies between them. Beside it:
    the same by CPU time (a check against a busy machine), and by all the time that passed.
    """
    pairs = list(zip(ours, theirs, strict=True))
    ratios = np.array([a.rate / b.rate for a, b in pairs])
    within = np.sqrt(np.sum([standard_error(a, b) ** 2 for a, b in pairs])) / len(pairs)
    between = np.std(ratios, ddof=1) / np.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return {
        "ratio": round(float(ratios.mean()), 4),
        "standard_error": round(float(max(within, between)), 4),
        "lowest_process": round(float(ratios.min()), 4),
        "highest_process": round(float(ratios.max()), 4),
        "cpu_ratio": round(float(np.mean([a.cpu_rate / b.cpu_rate for a, b in pairs])), 4),
        "whole_ratio": round(float(np.mean([a.whole_rate / b.whole_rate for a, b in pairs])), 4),
    }
