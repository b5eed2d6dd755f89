"""Which prompts are to be generated, which are under way, and which groups wait to be trained on. Pure bookkeeping.

Every prompt of the run's sequence goes one way: drawn -> under way -> ready -> taken, where taken means that it is
trained on (or left out by a filter, which is counted). A group that has become too old goes back to the start, and so
does, at a resume, what was under way: its prompt is drawn again before any new one. So no prompt is lost, and none is
taken twice.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.rl.types import Group


@dataclass
class Buffer:
    """
    Attributes:
        next_number: the first prompt of the sequence that was never drawn.
        again: prompts to draw again, before new ones.
        under_way: prompts that are being generated, in the order in which they were drawn.
        ready: groups that wait, in the order in which they will be taken.
        stale: groups that were too old when their turn came.
    """

    next_number: int = 0
    again: deque[int] = field(default_factory=deque)
    under_way: list[int] = field(default_factory=list)
    ready: deque[Group] = field(default_factory=deque)
    stale: int = 0

    @property
    def ahead(self) -> int:
        """Prompts that are drawn and not yet taken."""
        return len(self.under_way) + len(self.ready)

    def draw(self, count: int) -> list[int]:
        """Returns the next `count` prompts to generate; they are under way now."""
        numbers = []
        for _ in range(count):
            if self.again:
                numbers.append(self.again.popleft())
            else:
                numbers.append(self.next_number)
                self.next_number += 1
        self.under_way += numbers
        return numbers

    def put(self, groups: Sequence[Group]) -> None:
        """Takes in what was generated.

        Raises:
            ValueError: a group is not of a prompt that is under way.
        """
        for group in groups:
            self.under_way.remove(group.number)
            self.ready.append(group)

    def drop_stale(self, oldest_version: int) -> int:
        """Sends waiting groups with tokens older than `oldest_version` back to be generated again; returns how many."""
        fresh = [group for group in self.ready if group.version >= oldest_version]
        old = [group.number for group in self.ready if group.version < oldest_version]
        self.ready = deque(fresh)
        self.again.extend(old)
        self.stale += len(old)
        return len(old)

    def take(self, count: int) -> list[Group]:
        """Returns the groups whose turn it is, at most `count`; they are gone from here."""
        return [self.ready.popleft() for _ in range(min(count, len(self.ready)))]

    def state_dict(self) -> dict[str, Any]:
        """Returns all but the waiting groups themselves; JSON-able. What is under way counts as to be drawn again."""
        return {
            "next_number": self.next_number,
            "again": [*self.under_way, *self.again],
            "ready": [group.number for group in self.ready],
            "stale": self.stale,
        }

    def load_state_dict(self, state: dict[str, Any], ready: Sequence[Group]) -> None:
        """Goes on from `state`; `ready` are the groups that it lists.

        Raises:
            ValueError: they are not.
        """
        if [group.number for group in ready] != state["ready"]:
            raise ValueError(f"groups {[g.number for g in ready]} waited, the state lists {state['ready']}")
        self.next_number, self.stale = state["next_number"], state["stale"]
        self.again, self.under_way, self.ready = deque(state["again"]), [], deque(ready)
