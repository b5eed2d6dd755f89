"""The run's one endless sequence of prompts, as a pure function of (config, seed).

Prompt k is the same whatever the number of ranks, the batch size and the resumes before it, so a place in the sequence is
a single number.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.rng import numpy_generator
from trainer.rl.envs import LoadedEnvironment
from trainer.rl.types import Prompt

_BLOCK = 256  # prompts in which every environment has its share, to within one
_ORDERS = 2  # epochs' orders kept per environment: a batch may lie across the end of one


class PromptSequence:
    """Prompts of several environments, mixed by weight.

    Over every stretch of the sequence each environment gets its share of the prompts, spread evenly. It walks through its
    own `prompts` in an order of its own for every epoch: none comes again before all others have come.
    """

    def __init__(self, environments: Sequence[LoadedEnvironment], seed: int):
        self.environments, self.seed = environments, seed
        weights = [Fraction(loaded.config.weight) for loaded in environments]
        self._shares = [weight / sum(weights) for weight in weights]
        self._block = max(_BLOCK, math.ceil(1 / min(self._shares)))
        self._before: list[tuple[int, ...]] = [(0,) * len(environments)]
        """Prompts of each environment before each block."""
        self._layout: tuple[int, npt.NDArray[np.int64]] | None = None
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def prompt(self, number: int) -> Prompt:
        """Returns prompt `number` of the sequence, from 0.

        Raises:
            DataError: the environment's code failed.
        """
        position, index = self.place(number)
        return self._make(number, position, index, "train")

    def place(self, number: int) -> tuple[int, int]:
        """Returns which environment prompt `number` is from, and which of its prompts it is."""
        block, offset = divmod(number, self._block)
        layout = self._layout_of(block)
        position = int(layout[offset])
        drawn = self._before[block][position] + int(np.count_nonzero(layout[:offset] == position))
        epoch, place = divmod(drawn, self.environments[position].config.prompts)
        return position, int(self._order(position, epoch)[place])

    def held_out(self, count: int) -> list[Prompt]:
        """Returns `count` prompts of each environment that never occur in the sequence, numbered from 0."""
        return [
            self._make(position * count + index, position, index, "eval")
            for position in range(len(self.environments))
            for index in range(count)
        ]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the sequence depends on, by config key; JSON-able."""
        configs = [loaded.config for loaded in self.environments]
        return {
            "seed": self.seed,
            "envs.name": [config.name for config in configs],
            "envs.args": [list(config.args) for config in configs],
            "envs.weight": [config.weight for config in configs],
            "envs.prompts": [config.prompts for config in configs],
            "envs.system": [config.system for config in configs],
        }

    def _make(self, number: int, position: int, index: int, split: Any) -> Prompt:
        messages, info = self.environments[position].prompt(index, split)
        return Prompt(number=number, env=position, index=index, messages=messages, info=info)

    def _layout_of(self, block: int) -> npt.NDArray[np.int64]:
        """int64 [block]: the environment of each of its prompts."""
        if self._layout is None or self._layout[0] != block:
            while len(self._before) <= block + 1:
                self._before.append(self._counts_after(len(self._before)))
            counts = [after - before for before, after in zip(*self._before[block : block + 2], strict=True)]
            places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            owners = np.repeat(np.arange(len(counts)), counts)
            self._layout = block, owners[np.argsort(places, kind="stable")]
        return self._layout[1]

    def _counts_after(self, blocks: int) -> tuple[int, ...]:
        """Prompts of each environment in the first `blocks` blocks, given those before the last of them.

        What each is owed by then is given by largest remainder, in exact arithmetic, so that shares never drift. A block
        holds at least one prompt of every environment, so nobody is owed less than nothing.
        """
        before = self._before[blocks - 1]
        owed = [share * blocks * self._block - had for share, had in zip(self._shares, before, strict=True)]
        counts = [math.floor(part) for part in owed]
        by_remainder = sorted(range(len(owed)), key=lambda position: (counts[position] - owed[position], position))
        for position in by_remainder[: self._block - sum(counts)]:
            counts[position] += 1
        return tuple(had + count for had, count in zip(before, counts, strict=True))

    def _order(self, position: int, epoch: int) -> npt.NDArray[np.int64]:
        key = (position, epoch)
        if key not in self._orders:
            for old in [old for old in self._orders if old[0] == position][: 1 - _ORDERS]:
                del self._orders[old]
            count = self.environments[position].config.prompts
            self._orders[key] = numpy_generator(self.seed, "prompts", position, epoch).permutation(count)
        return self._orders[key]
