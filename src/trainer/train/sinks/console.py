"""One plain line per step, and the text shared with the progress bar."""

import time
from collections import deque
from collections.abc import Callable

from trainer.core.log import file_only, logger
from trainer.train.sinks.jsonl import Row


class Console:
    """``step 12/100  loss 2.3456  lr 1.00e-04  grad_norm 0.87  12.3k tok/s  ETA 1:02``, every ``interval`` steps.

    The first and the last step of the process and every step that validated have a line too. With ``quiet`` (a progress
    bar is on) the lines go to the log file and only those with a measurement on held-out data to the terminal as well.
    """

    def __init__(self, *, start_step: int, last_step: int, max_steps: int, interval: int, quiet: bool) -> None:
        self._first_step = start_step + 1
        self._last_step = last_step
        self._max_steps = max_steps
        self._interval = interval
        self._quiet = quiet
        self._eta = Eta(start_step, last_step)

    def write(self, row: Row) -> None:
        step = row["step"]
        self._eta.update(step)
        validated = "val_loss" in row or "eval_reward" in row
        if step % self._interval and step not in (self._first_step, self._last_step) and not validated:
            return
        line = f"step {step}/{self._max_steps}  {describe(row)}"
        if (left := self._eta.seconds()) is not None and step < self._last_step:
            line += f"  ETA {duration(left)}"
        (file_only if self._quiet and not validated else logger).info(line)

    def close(self, *, failed: bool) -> None:
        del failed


class Eta:
    """Seconds left at the pace of the last steps, validation and checkpoints included.

    Only this process's steps count: a resumed run does not inherit the clock of the one before it.
    """

    def __init__(self, start_step: int, last_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._last_step = last_step
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque([(start_step, clock())], maxlen=64)

    def update(self, step: int) -> None:
        if step > self._seen[-1][0]:  # validation before the first step reports step 0 once more
            self._seen.append((step, self._clock()))

    def seconds(self) -> float | None:
        (first, began), (step, now) = self._seen[0], self._seen[-1]
        return None if step == first else (now - began) / (step - first) * max(self._last_step - step, 0)


def describe(row: Row) -> str:
    """The row's main values as text; what it does not have is left out."""
    parts = []
    for key, spec in (("reward", ".3f"), ("loss", ".4f"), ("lr", ".2e"), ("grad_norm", ".2f")):
        if key in row:
            parts.append(f"{key} {row[key]:{spec}}")
    if "tokens_per_second" in row:
        parts.append(f"{count(row['tokens_per_second'])} tok/s")
    parts += [f"{key} {row[key]:.4f}" for key in ("val_loss", "eval_reward") if key in row]
    return "  ".join(parts)


def count(number: float) -> str:
    """987, 12.3k, 1.2M, 3.4G."""
    for unit in ("", "k", "M"):
        if abs(number) < 999.5 if unit == "" else abs(number) < 999.95:
            return f"{number:.0f}" if unit == "" else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def duration(seconds: float) -> str:
    """1:02 or 3:04:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
