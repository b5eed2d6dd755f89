"""What `trainer ckpt` and `trainer rollouts` share."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError, TrainerError

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.checkpoint.discovery import Checkpoint

FAILED = 2
"""Exit code of a command that ended with an error."""


def pick(path: str, *, resumable: bool = False) -> "Checkpoint":
    """Returns the checkpoint at a path: itself, or of a run its newest whole one; with `resumable`, of those that a run can
    go on from.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    from trainer.checkpoint.discovery import WHOLE, Status, discover, inspect_step, locate, newest_first

    directory, is_run = locate(path)
    if not is_run:
        candidate = inspect_step(directory)
        if candidate.status not in WHOLE:
            raise CheckpointError(f"{path} is {candidate.status}: {candidate.reason}")
        return candidate.checkpoint()
    wanted = {Status.COMMITTED} if resumable else WHOLE
    for candidate in newest_first(discover(directory)):
        if candidate.status in wanted:
            return candidate.checkpoint()
    what = "resumable" if resumable else "whole"
    raise CheckpointError(f"{directory} has no {what} checkpoint; `trainer ckpt ls {path}` shows what is there")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def console() -> "Console":
    from rich.console import Console

    # Where the output is no terminal, nothing is cut: a table is as wide as it needs to be.
    return Console() if sys.stdout.isatty() else Console(width=10_000, soft_wrap=True)


def size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Parses the arguments and calls the `run` that the parser has set for them."""
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def guarded(command: Callable[[], int]) -> int:
    """Returns the command's exit code; 2 where it ends with an error, which is printed."""
    try:
        return command()
    except SystemExit as stop:  # --help or a usage error, already printed
        return int(stop.code or 0)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
