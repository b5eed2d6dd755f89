"""The worker's side of a measurement: a training loop that runs a block of steps when told to, and then waits.

Only the standard library, so that a peer's environment can import it. The protocol is one JSON object per line: the worker
says {"ready": true} once, then answers each order {"steps": n, "threads": t} with what that block took.
"""

import json
import os
import sys
import time
from collections.abc import Callable


class Stopped(Exception):
    """The measurement is over; raised out of the loop that called `before_step`."""


class Gate:
    """Call `before_step` where a step begins; whatever the loop does between two calls belongs to the step.

    Args:
        set_threads: called with the number of threads when an order asks for another one.
    """

    def __init__(self, set_threads: Callable[[int], None]):
        self._set_threads = set_threads
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what the loop prints must not look like an answer
        self._threads = 0
        self._steps = self._left = 0
        self._tokens = 0
        self._notes: dict[str, float] = {}
        self._series: dict[str, list[float]] = {}
        self._started = self._cpu_started = 0.0

    def before_step(self) -> None:
        """Starts the next step, or reports the block that is over and waits for the next order.

        Raises:
            Stopped: there is no further order.
        """
        if self._left == 0:
            self._report()
            self._wait()
        self._left -= 1

    def count(self, tokens: int) -> None:
        """Adds the useful (non-padding) tokens of a step."""
        self._tokens += tokens

    def note(self, **values: float) -> None:
        """Adds what else was found to the block's answer."""
        self._notes |= values

    def add(self, **values: float) -> None:
        """Adds to such numbers, which begin at zero in each block."""
        self.note(**{name: self._notes.get(name, 0) + value for name, value in values.items()})

    def append(self, **values: float) -> None:
        """Adds to lists of numbers, which begin empty in each block."""
        for name, value in values.items():
            self._series.setdefault(name, []).append(value)

    def _report(self) -> None:
        if self._steps == 0:
            answer: dict[str, object] = {"ready": True}
        else:
            answer = {
                "seconds": time.perf_counter() - self._started,
                "cpu_seconds": time.process_time() - self._cpu_started,
                "steps": self._steps,
                "tokens": self._tokens,
                "notes": self._notes,
                "series": self._series,
            }
        self._answers.write(json.dumps(answer) + "\n")

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise Stopped
        order = json.loads(line)
        if order["threads"] != self._threads:
            self._threads = order["threads"]
            self._set_threads(self._threads)
        self._steps = self._left = order["steps"]
        self._tokens = 0
        self._notes, self._series = {}, {}
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
