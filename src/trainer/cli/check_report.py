"""What ``trainer check resume`` shows: how far the runs are, then the steps side by side, then the verdict."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from trainer.cli.check_resume import Plan, Result
    from trainer.train.comparison import Value

SHOWN_STEPS = 24  # of a longer check the beginning, the surroundings of the signal and the end are shown

_COLUMNS = ("reward", "loss", "grad_norm", "lr", "ids", "counters", "measures", "val")
_MARKS = {"equal": ("=", "green"), "close": ("≈", "yellow"), "different": ("✗", "bold red")}


class Report:
    """Progress goes to standard error, the result to standard output; `quiet` (--json) shows neither."""

    def __init__(self, plan: "Plan", *, quiet: bool = False):
        from rich.console import Console

        self.plan, self.quiet = plan, quiet
        wide = None if sys.stdout.isatty() else 130  # a pipe has no width of its own
        self.console = Console(highlight=False, width=wide)
        self._bars: Any = None
        self._task: Any = None

    # -- while it runs -------------------------------------------------------------------------------------------------

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Shows a bar for each run, live on a terminal, else a line as each run ends."""
        if self.quiet:
            yield
            return
        self._heading()
        if not self.console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            SpinnerColumn(finished_text="[green]●[/]"),
            TextColumn("{task.description:<21}"),
            BarColumn(bar_width=32, complete_style="blue", finished_style="green"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=self.console,
        )
        with self._bars:
            yield

    def _heading(self) -> None:
        from rich.text import Text

        plan = self.plan
        name = signal.Signals(plan.signal).name
        ranks = "1 process" if plan.nproc == 1 else f"{plan.nproc} processes"
        if plan.resume_nproc != plan.nproc:
            ranks += f", resumed on {plan.resume_nproc}"
        of = f" of {plan.config.max_steps}" if plan.config.max_steps else ""
        what = f"{Path(plan.config.model.name).name}: {plan.steps}{of} steps, {name} after step {plan.at}, {ranks}"
        self.console.print(Text.assemble(("check resume  ", "bold"), what))
        self.console.print()

    @contextmanager
    def phase(self, label: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes the newest step of one run."""
        started, last = time.monotonic(), 0
        self._note = ""
        task = self._bars.add_task(label, total=self.plan.steps, note="") if self._bars else None
        self._task = task

        def step(number: int) -> None:
            nonlocal last
            last = number
            if task is not None:
                self._bars.update(task, completed=number)

        yield step
        if task is not None:
            self._bars.stop_task(task)
        elif not self.quiet:
            note = f"  {self._note}" if self._note else ""
            seconds = time.monotonic() - started
            self.console.print(f"  {label:<21} {last}/{self.plan.steps} steps  {seconds:.1f} s{note}", markup=False)

    def interrupted(self, last_step: int, code: int) -> None:
        """Notes where the signal met the run that is going on."""
        name = signal.Signals(self.plan.signal).name
        left = "" if code == -self.plan.signal else f", left with exit code {code}"
        self._note = f"{name} in step {last_step + 1}{left}"
        if self._task is not None:
            self._bars.update(self._task, note=self._note)

    # -- the result ----------------------------------------------------------------------------------------------------

    def result(self, result: "Result") -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        self.console.print()
        self.console.print(_table(result))
        self.console.print()
        self.console.print(_states(result))
        for difference in result.states.differences[:5]:
            self.console.print(Text(f"    {difference.key}: {difference.text}", style="red"))
        more = len(result.states.differences) - 5
        if more > 0:
            self.console.print(Text(f"    ... and {more} more", style="red"))
        self.console.print()
        diagnosis = result.diagnosis
        if diagnosis is None:
            self.console.print(Panel(_success(result), border_style="green", expand=False))
        else:
            text = Group(
                Text.assemble(("not exact", "bold red")),
                Text(diagnosis.what),
                Text.assemble(("likely cause  ", "bold"), diagnosis.cause),
            )
            self.console.print(Panel(text, border_style="red", expand=False))
        if result.directory is not None:
            runs = ", ".join(sorted(path.name for path in result.directory.iterdir() if path.is_dir()))
            self.console.print(Text(f"runs kept in {result.directory}: {runs}", style="dim"))


def _success(result: "Result") -> "Text":
    from rich.text import Text

    plan, met = result.plan, result.interruption
    story = f"killed in step {met.last_step + 1}, resumed from step {met.resumed_from}"
    if plan.signal != signal.SIGKILL:
        story = f"asked to leave in step {met.last_step + 1}, resumed from step {met.resumed_from}"
    twice = "; two uninterrupted runs are equal, too" if result.repeated else ""
    if not plan.bound:
        promise = f"{story}, and bit for bit the run that never stopped{twice}"
        return Text.assemble(("exact  ", "bold green"), promise)
    far = max([abs(v.a - v.b) / max(abs(v.a), abs(v.b)) for v in result.values if v.verdict == "close"], default=0.0)
    bound = f"{plan.bound:.2g}"
    if result.measured is not None:
        bound += (
            f", which was measured: the number of processes alone, without a resume, moves something by {result.measured:.2g}. "
            "A smaller fault would not be seen here; check with the same number of processes, too"
        )
    return Text.assemble(
        ("exact  ", "bold green"),
        f"{story} on {plan.resume_nproc} instead of {plan.nproc} processes: sample ids, learning rates, counters and entries "
        f"are equal; losses and norms lie within {far:.1g} relative, inside the bound of {bound}{twice}",
    )


def _states(result: "Result") -> "Text":
    from rich.text import Text

    states = result.states
    head = f"  checkpoint of step {result.plan.steps}: {states.tensors} tensors, "
    if states.differences:
        return Text.assemble(head, (f"{len(states.differences)} differences", "bold red"))
    if not states.worst:
        return Text.assemble(head, ("bit for bit equal", "green"), ", and so is every entry, counter and cursor")
    far = ", ".join(f"{owner} within {distance.relative:.1g}" for owner, distance in states.worst.items())
    return Text.assemble(head, (far, "yellow"), " relative; every entry, counter and cursor is equal")


def _table(result: "Result") -> "Table":
    """One row a step: the loss in full, and for the resumed run and each other value a mark, or what differs."""
    from rich.table import Table
    from rich.text import Text

    by_step: dict[int, dict[str, list[Value]]] = {}
    for value in result.values:
        by_step.setdefault(value.step, {}).setdefault(_column(value), []).append(value)
    found = dict.fromkeys(column for values in by_step.values() for column in values if column != "step")
    columns = sorted(found, key=lambda column: (_COLUMNS + (column,)).index(column))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("  step", justify="right")
    for column in columns:
        name = {"loss": "loss, never stopped"}.get(column, column.replace("_", " "))
        table.add_column(name, justify="left" if column == "loss" else "center", no_wrap=True)
        if column == "loss":
            table.add_column("resumed", justify="left", no_wrap=True)
    table.add_column("")
    met = result.interruption
    previous = None
    for step in _shown(sorted(by_step), result):
        if previous is not None and step != previous + 1:
            table.add_row(Text("…", style="dim"))
        previous, cells = step, []
        for column in columns:
            values = by_step[step].get(column, [])
            cells += _losses(values) if column == "loss" else [_mark(values)]
        note = "← checkpoint" if step == met.resumed_from else ""
        if step == met.last_step + 1:
            note = f"← {signal.Signals(result.plan.signal).name} in it"
        table.add_row(str(step), *cells, Text(note, style="dim"))
    return table


def _column(value: "Value") -> str:
    """Counters share a column, and so do what validation gives, rates of several groups, and what else was measured."""
    if value.key.startswith(("val_", "eval")):
        return "val"
    if value.key.startswith("lr"):
        return "lr"
    if value.key in _COLUMNS or value.key == "step":
        return value.key
    return "counters" if isinstance(value.a, int) else "measures"


def _shown(steps: list[int], result: "Result") -> list[int]:
    """Returns the steps to show: all, or those around what matters."""
    if len(steps) <= SHOWN_STEPS:
        return steps
    first = result.diagnosis.first.step if result.diagnosis and result.diagnosis.first else steps[-1]
    centers = (steps[0], result.interruption.resumed_from, result.interruption.last_step, first, steps[-1])
    return [step for step in steps if any(abs(step - center) <= 2 for center in centers)]


def _losses(values: "list[Value]") -> "list[Text]":
    """The loss in full, and the resumed run's: a mark if it is the same, else all of it, from where it differs marked."""
    from rich.text import Text

    if not values:
        return [Text(""), Text("")]
    (value,) = values
    texts = ["" if number is None else repr(number) for number in (value.a, value.b)]
    if value.verdict == "equal":
        return [Text(texts[0]), _mark(values)]
    same = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
    style = _MARKS[value.verdict][1]
    return [Text(texts[0]), Text.assemble(texts[1][:same], (texts[1][same:] or "none", style))]


def _mark(values: "list[Value]") -> "Text":
    """One mark for several values: the worst."""
    from rich.text import Text

    verdicts = {value.verdict for value in values}
    worst = next((verdict for verdict in ("different", "close", "equal") if verdict in verdicts), None)
    if worst is None:
        return Text("")
    mark, style = _MARKS[worst]
    return Text(mark, style=style)
