"""Interleaved measurement of several workers, and the arithmetic on it.

Each participant is a process of its own, built and warm before anything is measured. They run blocks of steps in turn,
A B C, C B A, A B C, ..., while the others wait, so that whatever the machine does in the meantime meets all of them alike.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bench"
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Block:
    """What one participant did in one turn.

    Attributes:
        seconds: wall time.
        cpu_seconds: of all threads of the process; with one thread this does not see other processes on the machine.
        tokens: useful ones, without padding.
        notes: what else the worker found.
        series: the same, one number for each step.
    """

    seconds: float
    cpu_seconds: float
    steps: int
    tokens: int
    notes: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Useful tokens per second, or steps per second where there are no tokens."""
        return (self.tokens or self.steps) / self.seconds

    @property
    def cpu_rate(self) -> float:
        return (self.tokens or self.steps) / max(self.cpu_seconds, 1e-9)


class Participant:
    """A worker process that runs blocks of steps on order.

    Raises (from every method):
        RuntimeError: the worker died; ends with the last lines that it wrote.
    """

    def __init__(self, name: str, argv: Sequence[str], *, threads: int):
        """`threads`: the most that it will be asked to use; OpenMP's pool starts at that size."""
        self.name = name
        self._log_path = CACHE / "logs" / f"{name.replace('/', '-').replace(' ', '-')}.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = self._log_path.open("wb")
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=worker_environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def wait_ready(self) -> None:
        self._answer()

    def block(self, steps: int, threads: int) -> Block:
        """Runs `steps` steps and returns what they took."""
        assert self._process.stdin is not None
        order = json.dumps({"steps": steps, "threads": threads}) + "\n"
        try:
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` finds out why
        return Block(**self._answer())

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = self._log_path.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"benchmark worker {self.name!r} ended with code {code}; its last lines:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of every measured process: the same for all participants."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "WANDB"))}
    return environment | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(ROOT),
    }


def our_worker(module: str, arguments: dict) -> list[str]:
    """The command of a worker that runs in this environment."""
    return [sys.executable, "-m", module, json.dumps(arguments)]


@contextmanager
def participants(workers: Mapping[str, Sequence[str]], *, threads: int) -> Iterator[list[Participant]]:
    """Yields a built and waiting participant per entry (name -> command), and ends them afterwards."""
    with ExitStack() as stack:
        started = []
        for name, argv in workers.items():  # one after the other: each shall build on a machine that is not busy
            participant = stack.enter_context(Participant(name, argv, threads=threads))
            participant.wait_ready()
            started.append(participant)
        yield started


def interleave(
    participants: Sequence[Participant],
    *,
    threads: int,
    rounds: int,
    block_seconds: float,
) -> dict[str, list[Block]]:
    """Returns `rounds` blocks of each participant, in the order in which they were measured.

    Args:
        block_seconds: length of a block, from which the number of steps follows after a warm-up; 0 = one step.
    """
    steps = {participant.name: _steps(participant, threads, block_seconds) for participant in participants}
    blocks: dict[str, list[Block]] = {participant.name: [] for participant in participants}
    for number in range(rounds):
        for participant in participants if number % 2 == 0 else reversed(participants):
            blocks[participant.name].append(participant.block(steps[participant.name], threads))
    return blocks


def _steps(participant: Participant, threads: int, block_seconds: float) -> int:
    """Warms a participant up and returns how many of its steps fill a block."""
    first = participant.block(1, threads)
    if not block_seconds:
        return 1
    warm_up = min(WARM_UP_STEPS, max(1, round(block_seconds / first.seconds)))
    each = participant.block(warm_up, threads).seconds / warm_up
    return max(1, round(block_seconds / each))


@dataclass(frozen=True)
class Ratio:
    """A paired comparison: the ratios of the rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Self:
        """Returns ours / theirs, round by round."""
        values = [a / b for a, b in zip(ours, theirs, strict=True)]
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def summary(self) -> dict[str, float]:
        """Returns what a result's case says of it."""
        return {
            "ratio": round(self.median, 4),
            "ratio_low_quartile": round(self.low, 4),
            "ratio_high_quartile": round(self.high, 4),
        }


def summarize(blocks: Sequence[Block]) -> dict[str, float]:
    """Returns the medians of a participant's blocks."""
    return {
        "tokens_per_second": round(statistics.median(block.tokens / block.seconds for block in blocks), 1),
        "step_seconds": round(statistics.median(block.seconds / block.steps for block in blocks), 6),
        "cpu_step_seconds": round(statistics.median(block.cpu_seconds / block.steps for block in blocks), 6),
        "blocks": len(blocks),
        "steps_per_block": blocks[0].steps,
    }


def compare(ours: Sequence[Block], theirs: Sequence[Block]) -> dict[str, float]:
    """Returns ours / theirs in useful tokens per second, and the same by CPU time (a check against a busy machine)."""
    wall = Ratio.of([block.rate for block in ours], [block.rate for block in theirs])
    cpu = Ratio.of([block.cpu_rate for block in ours], [block.cpu_rate for block in theirs])
    return wall.summary() | {"cpu_ratio": round(cpu.median, 4)}


def wait_for_quiet(limit: float, timeout_seconds: float) -> float:
    """Waits until the machine's load is below `limit` or the time is up, and returns the load."""
    deadline = time.monotonic() + timeout_seconds
    while (load := os.getloadavg()[0]) > limit and time.monotonic() < deadline:
        time.sleep(5)
    return load
