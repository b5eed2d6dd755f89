"""A picture of one or more runs from their metrics.jsonl. No torch; matplotlib is imported when a picture is drawn."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DataError
from trainer.train.metrics import EVENTS_FILE, METRICS_FILE
from trainer.train.sinks.jsonl import Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_KEYS = ("reward", "loss", "lr", "grad_norm", "entropy", "completion_tokens", "tokens_per_second")
"""Drawn where a run has them; reward, entropy and lengths are those of reinforcement learning."""
_HELD_OUT = {"loss": "val_loss", "reward": "eval_reward"}
"""What is marked in the panel of what it is the held-out counterpart of."""
_TITLES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "step_seconds": "seconds per step",
    "peak_memory_gib": "peak memory (GiB)",
    "val_loss": "validation loss",
    "completion_tokens": "tokens per completion",
}
_COLORS = ("#2f6db5", "#d1495b", "#2a9d8f", "#e08e0b", "#7b5ea7", "#57606a")
_MANY_ROWS = 80  # more than this: thinner lines, no dots
_INK, _GRID, _BAD = "#24292f", "#e6e8eb", "#b00020"


@dataclass
class RunHistory:
    """What the files of a run say."""

    path: Path
    label: str
    rows: list[Row]
    superseded: dict[int, list[Row]] = field(default_factory=dict)
    """Rows that a resume repeated, by the generation that wrote them."""
    resumed_at: list[int] = field(default_factory=list)
    """Steps that a process resumed after."""


def load_run(run: Path, label: str | None = None) -> RunHistory:
    """Read a run directory. Raises ``DataError`` if it is not one or has no rows yet."""
    metrics = run / METRICS_FILE
    if not metrics.is_file():
        what = "has no metrics.jsonl" if run.is_dir() else "is not a directory"
        raise DataError(f"{run} {what}; give the directory of a run (its output_dir), such as runs/default")
    rows = read_rows(metrics)
    if not rows:
        raise DataError(f"{metrics} has no rows yet: the run has not finished its first step")
    if any(type(row.get("step")) is not int for row in rows):
        raise DataError(f"{metrics} has rows without a step: no run of this trainer has written them")
    superseded: dict[int, list[Row]] = defaultdict(list)
    if (old := metrics.with_suffix(".superseded.jsonl")).exists():
        for row in read_rows(old):
            superseded[row.get("generation", 0)].append(row)
    events = read_rows(run / EVENTS_FILE) if (run / EVENTS_FILE).exists() else []
    return RunHistory(run, label or run.resolve().name, rows, dict(superseded), _resumes(events))


def _resumes(events: list[Row]) -> list[int]:
    """Where the rows that are left change hands: a resume from an older step takes back those after it."""
    resumes: set[int] = set()
    for row in events:
        if row.get("event") == "start":
            step = -1 if row.get("fresh") else row["step"]
            resumes = {earlier for earlier in resumes if earlier < step} | ({step} if step >= 0 else set())
    return sorted(resumes)


def plot_runs(
    runs: Sequence[Path | str],
    out: Path | str,
    *,
    keys: Sequence[str] = DEFAULT_KEYS,
    superseded: bool = False,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw one panel per key into the PNG ``out`` and return it; values on held-out data are marked beside those of training.

    The first of several runs is a broad pale line and the others thin lines on top of it, so that runs that coincide
    are seen to. Vertical lines mark resumes; crosses mark steps whose value is NaN or infinite. ``superseded`` adds the
    rows that a resume repeated.

    Raises ``DataError`` for a run without metrics, a key that no run has, or an ``out`` that cannot be written.
    """
    out, places = Path(out), [Path(run) for run in runs]
    names = labels if labels is not None else _labels(places)
    histories = [load_run(run, name) for run, name in zip(places, names, strict=True)]
    keys = _present(keys, histories)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 9.5,
        "axes.edgecolor": "#b8bec5",
        "axes.labelcolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "text.color": _INK,
        "xtick.color": "#57606a",
        "ytick.color": "#57606a",
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
    }
    with plt.rc_context(style):
        figure, panels = _panels(keys)
        for key, axes in panels.items():
            for index, history in enumerate(histories):
                _draw(axes, key, history, index, several=len(histories) > 1, superseded=superseded)
            _finish(axes, key, histories)
        _mark_resumes(panels, histories)
        _legend(next(iter(panels.values())), histories, keys, superseded=superseded)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=150, facecolor="white")
        except OSError as error:
            raise DataError(
                f"cannot write the picture {out}: {error.strerror}; choose another place with -o"
            ) from error
        finally:
            plt.close(figure)
    return out


def _labels(runs: Sequence[Path]) -> list[str]:
    """Directory names; whole paths where two of them are the same."""
    names = [Path(run).resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]


def _present(keys: Sequence[str], histories: list[RunHistory]) -> list[str]:
    known = {key for run in histories for row in run.rows for key, value in row.items() if _is_number(value)}
    if tuple(keys) == DEFAULT_KEYS:
        keys = [key for key in keys if key in known] or sorted(known - {"step"})[:1]
    for key in keys:
        if key not in known:
            raise DataError(f"no run has the metric {key!r}; there are: {', '.join(sorted(known - {'step'}))}")
    return list(dict.fromkeys(keys))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _panels(keys: list[str]) -> tuple["Figure", dict[str, "Axes"]]:
    """The first key across the whole width, the others in rows of up to three below it."""
    import matplotlib.pyplot as plt

    rest = keys[1:]
    columns = min(len(rest), 3) or 1
    rows = math.ceil(len(rest) / columns)
    figure = plt.figure(figsize=(11, 3.9 + 2.4 * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.65] + [1.0] * rows)
    panels = {keys[0]: figure.add_subplot(grid[0, :])}
    for number, key in enumerate(rest):
        panels[key] = figure.add_subplot(grid[1 + number // columns, number % columns])
    return figure, panels


def _line_look(run: RunHistory, index: int, *, several: bool) -> dict[str, Any]:
    """How the run's line is drawn, in the panels and in the legend alike."""
    many = len(run.rows) > _MANY_ROWS
    look: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)]}
    if several and index == 0:
        return look | {"linewidth": 5.0 if many else 6.5, "alpha": 0.32}
    dashes = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)))[index % 4] if several else "-"
    marker = {} if many else {"marker": "o", "markersize": 3.2}
    return look | {"linewidth": 1.1 if many else 1.5, "linestyle": dashes} | marker


def _draw(axes: "Axes", key: str, run: RunHistory, index: int, *, several: bool, superseded: bool) -> None:
    look = _line_look(run, index, several=several)
    if superseded:
        for rows in run.superseded.values():
            axes.plot(*_series(rows, key), color=look["color"], linewidth=1.0, linestyle=":", alpha=0.6, zorder=2)
    axes.plot(*_series(run.rows, key), zorder=3 + index, **look)
    if key in _HELD_OUT:
        _draw_validation(axes, run, _HELD_OUT[key], index, look["color"], broad=several and index == 0)
    if bad := _bad_steps(run.rows, key):
        at_bottom = axes.get_xaxis_transform()
        axes.plot(bad, [0.02] * len(bad), "x", color=_BAD, markersize=6, transform=at_bottom, clip_on=False, zorder=30)


def _draw_validation(axes: "Axes", run: RunHistory, key: str, index: int, color: str, *, broad: bool) -> None:
    steps, values = _series(run.rows, key)
    size = 6.5 if len(steps) <= 30 else 4.0
    look: dict[str, Any] = {"alpha": 0.45} if broad else {"markeredgecolor": "white", "markeredgewidth": size / 8}
    axes.plot(
        steps,
        values,
        color=color,
        linestyle="",
        marker="D",
        markersize=size * (1.7 if broad else 1.0),
        zorder=12 + index,
        **look,
    )


def _series(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have the key; what is not finite is NaN, a gap in the line."""
    points = [(row["step"], float(row[key])) for row in rows if _is_number(row.get(key))]
    return [step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points]


def _bad_steps(rows: list[Row], key: str) -> list[int]:
    return [row["step"] for row in rows if _is_number(row.get(key)) and not math.isfinite(row[key])]


def _finish(axes: "Axes", key: str, histories: list[RunHistory]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_title(_TITLES.get(key, key), loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    first, last = min(run.rows[0]["step"] for run in histories), max(run.rows[-1]["step"] for run in histories)
    margin = max(last - first, 1) * 0.02
    axes.set_xlim(first - margin, last + margin)  # the same in every panel
    if key == "lr":  # an offset such as x10^-4 above the axis would push the title up
        axes.yaxis.set_major_formatter(lambda value, _: _scientific(value))
    if key in ("tokens_per_second", "tokens", "samples"):
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if key in ("tokens_per_second", "lr", "step_seconds", "peak_memory_gib"):
        axes.set_ylim(bottom=0)


def _scientific(value: float) -> str:
    """2.5e-5; plain digits from 0.01 up."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _mark_resumes(panels: dict[str, "Axes"], histories: list[RunHistory]) -> None:
    for index, run in enumerate(histories):
        color = _COLORS[index % len(_COLORS)]
        for step in run.resumed_at:
            for axes in panels.values():
                axes.axvline(step, color=color, linewidth=1.1, linestyle=(0, (4, 3)), alpha=0.75, zorder=1)


def _legend(axes: "Axes", histories: list[RunHistory], keys: list[str], *, superseded: bool) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for index, run in enumerate(histories):
        label = run.label
        if run.resumed_at:
            label += f" (resumed after step {_listed(run.resumed_at)})"
        handles.append(Line2D([], [], label=label, **_line_look(run, index, several=len(histories) > 1)))
    shown = {held_out for key, held_out in _HELD_OUT.items() if key in keys}
    if any(shown & row.keys() for run in histories for row in run.rows):
        handles.append(Line2D([], [], color="#57606a", linestyle="", marker="D", markersize=6, label="validation"))
    if any(run.resumed_at for run in histories):
        handles.append(Line2D([], [], color="#57606a", linewidth=1.1, linestyle=(0, (4, 3)), label="resume"))
    if superseded and any(run.superseded for run in histories):
        handles.append(Line2D([], [], color="#57606a", linewidth=1.0, linestyle=":", label="superseded"))
    if any(_bad_steps(run.rows, key) for run in histories for key in keys):
        handles.append(Line2D([], [], color=_BAD, linestyle="", marker="x", markersize=6, label="NaN or infinite"))
    few = sum(len(run.rows) for run in histories) < 5000  # "best" looks at every point
    axes.legend(
        handles=handles,
        loc="best" if few else "upper right",
        frameon=True,
        framealpha=0.9,
        edgecolor="none",
        fontsize=9.5,
    )


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:3])) + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")
