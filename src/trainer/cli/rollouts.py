"""`trainer rollouts show`: what the model wrote and what it got for it. None of it imports torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cli.ckpt_common import console, guarded, print_json, run_command
from trainer.errors import ConfigError

_SHOWN_CHARS = 300  # of a prompt or completion in the table


def main(argv: Sequence[str]) -> int:
    """Runs `trainer rollouts` with the arguments after "rollouts"; returns 0 or 2 (error)."""
    return guarded(lambda: run_command(_parser(), argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer rollouts", description="Look at the rollouts of an RL run.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="show a step's rollouts with their rewards")
    show.add_argument("run_dir", metavar="RUN", type=Path, help="a run's output directory")
    show.add_argument("--step", type=int, metavar="N", help="the step that they were trained in (default: the newest)")
    order = show.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="the highest reward first")
    order.add_argument("--worst", action="store_true", help="the lowest reward first, failed ones before all")
    show.add_argument("-n", type=int, default=None, metavar="K", help="how many (default: 8; with --json all)")
    show.add_argument("--full", action="store_true", help="print texts whole instead of their ends")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)
    return parser


def _show(arguments: argparse.Namespace) -> int:
    from trainer.rl.records import read_rollouts

    if arguments.n is not None and arguments.n < 1:
        raise ConfigError(f"-n {arguments.n}: expected at least 1")
    rows = read_rollouts(arguments.run_dir, arguments.step)
    found = _ordered(rows, best=arguments.best, worst=arguments.worst)
    if arguments.json:
        print_json(found[: arguments.n])
        return 0
    _print_table(rows, found[: arguments.n or 8], whole=arguments.full)
    return 0


def _ordered(rows: list[dict[str, Any]], *, best: bool, worst: bool) -> list[dict[str, Any]]:
    if best:
        return sorted(rows, key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0)))
    if worst:
        return sorted(rows, key=lambda row: (row["reward"] is not None, row["reward"] or 0.0))
    return rows


def _print_table(rows: list[dict[str, Any]], shown: list[dict[str, Any]], *, whole: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    failed = len(rows) - len(rewards)
    mean = f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    step = f"step {rows[0]['step']}: " if rows else ""
    print(f"{step}{len(rows)} rollouts{mean}{f', {failed} failed' if failed else ''}; {len(shown)} shown")
    table = Table("prompt", "reward", "advantage", "tokens", "end", "text", box=None, pad_edge=False, show_lines=False)
    for row in shown:
        reward = Text("failed", style="red") if row["reward"] is None else Text(f"{row['reward']:.4g}")
        advantage = "" if row["advantage"] is None else f"{row['advantage']:+.3f}"
        name = f"{row['env']} {row['prompt_id']}.{row['sample']}"
        table.add_row(name, reward, advantage, str(row["length_tokens"]), row["finish_reason"], _text(row, whole))
    out.print(table)


def _text(row: dict[str, Any], whole: bool) -> Any:
    from rich.text import Text

    text = Text(_line(row["prompt"], whole), style="dim")
    text.append(" → ", style="dim")
    text.append(_line(row["completion"], whole), style="bold")
    if row["parts"]:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in row["parts"].items())
        text.append(f"  ({parts})", style="dim")
    if row["error"]:
        text.append(f"  {_line(row['error'], True)}", style="red")
    return text


def _line(text: str, whole: bool) -> str:
    """On one line, control characters shown: what a model wrote must not steer the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if whole or len(shown) <= _SHOWN_CHARS else f"…{shown[-_SHOWN_CHARS:]}"
