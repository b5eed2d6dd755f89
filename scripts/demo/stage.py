"""What the demos share: headings, lines, the clock, and how a demo ends."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from scripts.demo.runs import DemoFailed


class Stage:
    """Where a demo tells what it does, before it does it."""

    parts: int
    """How many parts the demo has."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.started = time.monotonic()

    def run(self) -> None:
        raise NotImplementedError

    def heading(self, part: int, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{part}/{self.parts}  {text}[/]  [dim]{self.elapsed()}[/]", align="left")
        sys.stdout.flush()

    def command(self, words: str) -> None:
        self.console.print(Text(f"$ trainer {words}", style="dim"), soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text)
        sys.stdout.flush()

    def elapsed(self) -> str:
        seconds = round(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"


def perform(make: Callable[[], Stage]) -> int:
    """Runs a demo and returns its exit code."""
    demo = make()
    try:
        demo.run()
    except DemoFailed as failure:
        demo.console.print(Text(f"\nThe demo failed: {failure}", style="bold red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
