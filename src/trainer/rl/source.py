"""Where the batches of reinforcement learning come from: prompts out, rollouts in, rows to train on.

With `rl.max_lag = 0` a batch is generated with the very weights that it trains. With more, the next batch is generated
while this one trains: by a thread, with the weights before the step, so which weights generate what depends on the
step alone and a resumed run does the same.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.leaves import same
from trainer.config.compare import within
from trainer.config.run import RLConfig
from trainer.core.distributed import World, gather_objects, raise_together
from trainer.core.log import logger
from trainer.errors import CheckpointMismatch, TrainerError, TrainingError
from trainer.rl.buffer import Buffer
from trainer.rl.records import pack_groups, unpack_groups
from trainer.rl.types import Generator, Group

Generate = Callable[[Sequence[int]], list[Group]]
"""Returns a scored group for each prompt number, in their order; this rank's own, without any collective."""
_Generated = tuple[list[Group], float]  # and the seconds that they took


@dataclass
class Batch:
    """The groups that are trained on.

    Attributes:
        groups: in the order of their turn.
        steps: optimizer steps taken on them.
        old_logprobs: float32, the trainer's own for every token of every rollout in order, where it has to remember them.
        filtered: groups left out since the batch before, by the reason.
        generating_seconds: that this process took to generate and score what came in since the batch before.
    """

    groups: list[Group] = field(default_factory=list)
    steps: int = 0
    old_logprobs: np.ndarray | None = None
    filtered: dict[str, int] = field(default_factory=dict)
    generating_seconds: float = 0.0


class RolloutSource:
    """Endless batches of scored groups; an owner of state.

    Every group that waits, every prompt under way and the batch at hand are part of its state, so after a resume each
    prompt of the sequence is still trained on exactly once. The state is the same on all ranks.

    Args:
        order: what the sequence of prompts depends on, by config key.
        keep: returns why a group is left out of training, or None.
        allow: keys of `order` whose difference to a loaded state is wanted.
    """

    def __init__(
        self,
        config: RLConfig,
        world: World,
        *,
        order: dict[str, Any],
        keep: Callable[[Group], str | None],
        allow: Collection[str] = (),
    ):
        self.config, self.world = config, world
        self.buffer, self.batch = Buffer(), Batch()
        self.taken = 0
        self._order, self._keep, self._allow = order, keep, allow
        self._filtered: dict[str, int] = {}
        self._generating_seconds = 0.0
        self._is_collected = False
        self._before = self._state()
        self._room: dict[str, torch.Tensor] | None = None
        self._flights: deque[tuple[list[int], Future[_Generated]]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._engine: Generator | None = None
        self._generate: Generate | None = None

    def attach(self, engine: Generator, generate: Generate) -> None:
        """Called once before the first batch."""
        self._engine, self._generate = engine, generate

    @property
    def lag(self) -> int:
        """Batches that are generated ahead; an engine in this process can work on one only."""
        most = self.config.rl.max_lag
        return most if self._engine is not None and self._engine.overlaps else min(most, 1)

    def next_groups(self, version: int) -> Batch:
        """Returns the batch for the step after `version`. Collective.

        Raises:
            TrainingError: generating failed on a rank.
        """
        is_used_up = self.batch.steps >= self.config.objective.iterations or not self.batch.groups
        if is_used_up:
            self._collect(version)
        self._before = self._state() | {"collected": is_used_up}
        if is_used_up:
            groups = self.buffer.take(self.config.rl.prompts)
            self.batch = Batch(groups, filtered=self._filtered, generating_seconds=self._generating_seconds)
            self._filtered, self._generating_seconds = {}, 0.0
        self.batch.steps += 1
        self.taken += 1
        return self.batch

    def settle(self) -> None:
        """Waits for what the engine in this process has under way, so that a resumed run finds it done."""
        if self._engine is not None and not self._engine.overlaps:
            self._land(len(self._flights))

    def quiesce(self) -> None:
        """Waits until this process generates nothing. Collective."""
        self._land(len(self._flights))

    def close(self) -> None:
        """Waits for the thread and ends it."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None

    # -- generating --------------------------------------------------------------------------------------------------

    def _collect(self, version: int) -> None:
        """Sees to it that a batch is ready, and that what comes after it is under way."""
        assert self._engine is not None
        wanted, lag = self.config.rl.prompts, self.lag
        if not self._engine.overlaps or len(self.buffer.ready) < wanted:
            self._land(len(self._flights) if not self._engine.overlaps else min(1, len(self._flights)))
        if dropped := self.buffer.drop_stale(version - self.config.rl.max_lag):
            logger.warning(
                f"{dropped} groups were generated by weights older than step {version} - {self.config.rl.max_lag}"
            )
        self._engine.update(version)
        # A batch that the filters left short was no fuller when it was saved.
        rounds = 0 if self._is_collected else 1 + self.config.rl.max_resamples
        self._is_collected = False
        for _ in range(rounds):
            while self._flights and len(self.buffer.ready) < wanted:
                self._land(1)
            if missing := max(0, wanted - len(self.buffer.ready)):
                self._take_in(self._run(self.buffer.draw(missing)))
        while lag and self.buffer.ahead < (1 + lag) * wanted:
            self._launch(self.buffer.draw(wanted))

    def _run(self, numbers: list[int]) -> list[Group]:
        return self._exchange(lambda: self._own(numbers), numbers)

    def _own(self, numbers: list[int]) -> _Generated:
        assert self._generate is not None
        started = time.perf_counter()
        groups = self._generate(numbers[self.world.rank :: self.world.size])
        return groups, time.perf_counter() - started

    def _launch(self, numbers: list[int]) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._flights.append((numbers, self._worker.submit(self._own, numbers)))

    def _land(self, count: int) -> None:
        """Waits for the first `count` flights and takes in what they bring. Collective."""
        for _ in range(count):
            numbers, future = self._flights.popleft()
            self._take_in(self._exchange(future.result, numbers))

    def _exchange(self, own: Callable[[], _Generated], numbers: list[int]) -> list[Group]:
        """Returns the groups of all ranks, in the order of `numbers`."""
        groups, error = [], None
        try:
            groups, seconds = own()
            self._generating_seconds += seconds
        except TrainerError as failure:
            error = failure
        except Exception as failure:
            error = TrainingError(f"generating rollouts failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        raise_together(error, "generating rollouts")
        by_number = {group.number: group for part in gather_objects(groups) for group in part}
        return [by_number[number] for number in numbers]

    def _take_in(self, groups: list[Group]) -> None:
        for group in groups:
            self.buffer.put([group])
            if reason := self._keep(group):
                self.buffer.ready.pop()
                self._filtered[reason] = self._filtered.get(reason, 0) + 1

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = self._tensors(self._state())
        return state if self._room is None else state | {"rollouts": self._room}

    def state_before(self) -> dict[str, Any]:
        return self._tensors(self._before)

    def _state(self) -> dict[str, Any]:
        """A picture of the present; groups never change once they are here, so it holds references."""
        return {
            "taken": self.taken,
            "steps": self.batch.steps,
            "collected": self._is_collected,  # the next batch is in the buffer, whole or not
            "filtered": [dict(self.batch.filtered), dict(self._filtered)],
            "buffer": self.buffer.state_dict(),
            "groups": [*self.batch.groups, *self.buffer.ready],
            "current": len(self.batch.groups),
            "old": self.batch.old_logprobs,
        }

    def _tensors(self, picture: dict[str, Any]) -> dict[str, Any]:
        arrays = pack_groups(picture["groups"])
        about, old = arrays.pop("text"), picture["old"]
        arrays = {**arrays, "old_logprobs": np.empty(0, np.float32) if old is None else old}
        leaves = {key: value for key, value in picture.items() if key not in ("groups", "old")}
        return {
            "version": 1,
            "order": self._order,
            "cursor": leaves | {"has_old": old is not None},
            "about": about,
            "rollouts": {name: torch.tensor(array) for name, array in arrays.items()},
        }

    def make_room(self, saved: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Before a load: the tensors are as large as the checkpoint's."""
        prefix = "rollouts."
        self._room = {
            name.removeprefix(prefix): torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in saved.items()
            if name.startswith(prefix)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the last batch of the source that `state` is from.

        Raises:
            CheckpointMismatch: the sequence of prompts is another one; every difference is listed.
        """
        self._check_order(state["order"])
        cursor = state["cursor"]
        self._room = None
        arrays = {name: tensor.numpy() for name, tensor in state["rollouts"].items()}
        old = arrays.pop("old_logprobs")
        groups = unpack_groups({**arrays, "text": state["about"]})
        current, self.taken = cursor["current"], cursor["taken"]
        self.batch = Batch(groups[:current], cursor["steps"], old if cursor["has_old"] else None, cursor["filtered"][0])
        self._filtered = cursor["filtered"][1]
        self._is_collected = cursor.get("collected", False)
        self.buffer.load_state_dict(cursor["buffer"], groups[current:])
        self._before = self._state()

    def verify(self, saved: dict[str, Any]) -> list[str]:
        """Returns what differs from the loaded state, but for the order where another one was allowed."""
        live = self._tensors(self._state())
        keys = ("cursor", "about")
        return [
            f"{k}: loaded {saved.get(k)!r}, reads back {live[k]!r}" for k in keys if not same(saved.get(k), live[k])
        ]

    def _check_order(self, saved: dict[str, Any]) -> None:
        changed = [key for key in self._order | saved if self._order.get(key) != saved.get(key)]
        refused = [key for key in changed if not within(key, self._allow)]
        if refused:
            lines = "\n".join(
                f"  {key}: checkpoint {saved.get(key)!r}, now {self._order.get(key)!r}" for key in refused
            )
            tables = ",".join(sorted({key.split(".")[0] for key in refused}))
            raise CheckpointMismatch(
                f"the prompts would come in another order than in the checkpoint's run:\n{lines}\n"
                f"Restore these settings, or let the new ones win with --resume.override {tables}"
            )
