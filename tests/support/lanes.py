"""A device whose queues run in any order that their waits allow: for finding a wait that is missing."""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trainer.core.transfer import Lane, Lanes


class SimulatedMark:
    def __init__(self, lane: "SimulatedLane | None", position: int):
        self.lane, self.position = lane, position

    @property
    def passed(self) -> bool:
        return self.lane is None or self.lane.done >= self.position

    def synchronize(self) -> None:
        if self.lane is not None:
            self.lane.device.run_until(self)


class SimulatedLane(Lane):
    """Work stays in the queue until the device chooses to do it, or somebody waits for it."""

    def __init__(self, device: "SimulatedDevice"):
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()
        self.queued = self.done = 0

    def run(self, work: Callable[[], object]) -> None:
        self._append(lambda: (work(), True)[1])

    def mark(self) -> SimulatedMark:
        return SimulatedMark(self, self.queued)

    def wait(self, mark: Any) -> None:
        if self.device.deaf is None or self.device.random.random() >= self.device.deaf:
            self._append(lambda: mark.passed)

    def _append(self, attempt: Callable[[], bool]) -> None:
        """attempt: does the work and returns True, or returns False when it cannot yet."""
        with self.device.lock:
            self.queue.append(attempt)
            self.queued += 1
            self.device.drift()

    def advance(self) -> bool:
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        self.done += 1
        return True


class ProgramLane(Lane):
    """The program's own queue: what it does happens at once, so it can wait only by letting the others work."""

    def __init__(self, device: "SimulatedDevice"):
        self.device = device

    def run(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> SimulatedMark:
        return SimulatedMark(None, 0)

    def wait(self, mark: Any) -> None:
        if self.device.deaf is None or self.device.random.random() >= self.device.deaf:
            mark.synchronize()


class SimulatedDevice(Lanes):
    """
    Args:
        seed: of the order in which queued work is done.
        queued_computation: computation is queued like copies, instead of happening at once.
        deaf: share of the waits between lanes that are ignored; the results must then be wrong.
    """

    def __init__(self, seed: int, *, queued_computation: bool = False, deaf: float | None = None):
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.deaf = deaf
        self.lanes: list[SimulatedLane] = []
        self.compute: Lane = self.new(torch.device("cpu")) if queued_computation else ProgramLane(self)
        self.eagerness = self.random.choice([0.0, 0.3, 1.0])

    def new(self, device: torch.device) -> SimulatedLane:
        self.lanes.append(SimulatedLane(self))
        return self.lanes[-1]

    def current(self, device: torch.device) -> Lane:
        return self.compute

    def drift(self) -> None:
        while self.random.random() < self.eagerness and self._one():
            pass

    def run_until(self, mark: SimulatedMark) -> None:
        with self.lock:
            while not mark.passed:
                assert self._one(), "the lanes wait for each other"

    def _one(self) -> bool:
        """Does one piece of work in a lane chosen at random; False if none can go on."""
        return any(lane.advance() for lane in self.random.sample(self.lanes, len(self.lanes)))
