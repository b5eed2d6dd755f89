"""A live progress bar on standard error; log lines are printed above it."""

import sys
from typing import Literal

from trainer.train.sinks.console import Eta, count, duration
from trainer.train.sinks.jsonl import Row


def wants_bar(progress: Literal["auto", "on", "off"]) -> bool:
    """Whether there is to be a bar: "auto" looks for a terminal that can redraw a line."""
    if progress != "auto":
        return progress == "on"
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


class ProgressBar:
    """``step 10/100 ━━━━╸    loss 2.3456  lr 1.00e-04  12.3k tok/s  ETA 1:02``; starts at the resumed step."""

    def __init__(self, *, start_step: int, last_step: int, max_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._eta = Eta(start_step, last_step)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, complete_style="blue", finished_style="green"),
            TextColumn("{task.fields[status]}"),
            # Forced, since "on" asks for a bar where no terminal is detected.
            console=Console(stderr=True, force_terminal=True),
            refresh_per_second=4,  # the drawing thread takes the interpreter lock from the training thread
            expand=True,
        )
        self._task = self._progress.add_task("train", total=max_steps, completed=start_step, status="")
        self._progress.start()

    def write(self, row: Row) -> None:
        self._eta.update(row["step"])
        self._progress.update(self._task, completed=row["step"], status=self._status(row))

    def close(self, *, failed: bool) -> None:
        del failed
        self._progress.stop()

    def _status(self, row: Row) -> str:
        parts = [
            f"{key} {row[key]:{spec}}"
            for key, spec in (("reward", ".3f"), ("loss", ".4f"), ("lr", ".2e"))
            if key in row
        ]
        if "tokens_per_second" in row:
            parts.append(f"{count(row['tokens_per_second'])} tok/s")
        if (left := self._eta.seconds()) is not None:
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts)
