"""What the subcommands of `trainer ckpt` share."""

import json
import sys
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.checkpoint.discovery import Checkpoint


def pick(path: str) -> "Checkpoint":
    """Returns the checkpoint at a path: itself, or of a run its newest whole one.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    from trainer.checkpoint.discovery import WHOLE, discover, inspect_step, locate, newest_first

    directory, is_run = locate(path)
    if not is_run:
        candidate = inspect_step(directory)
        if candidate.status not in WHOLE:
            raise CheckpointError(f"{path} is {candidate.status}: {candidate.reason}")
        return candidate.checkpoint()
    for candidate in newest_first(discover(directory)):
        if candidate.status in WHOLE:
            return candidate.checkpoint()
    raise CheckpointError(f"{directory} has no whole checkpoint; `trainer ckpt ls {path}` shows what is there")


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
