"""Is a checkpoint sound? Everything that can be said about one without the run that wrote it. Needs numpy, not torch.

What a load checks as well (manifest, sizes, checksums, tables) comes first; then what a load takes on trust: that the
step counters agree, that the learning rates are those of the schedule, and that every weight is a number.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.checkpoint.layout import ITEM_BYTES, Chunk, Layout, owner_of
from trainer.checkpoint.manifest import Manifest, check_bytes, check_sizes, read_manifest
from trainer.checkpoint.paths import LOCK, MANIFEST, open_inside, os_errors, read_exactly, step_of
from trainer.checkpoint.tables import JSON_TENSOR, read_tables
from trainer.errors import CheckpointError, CorruptCheckpoint
from trainer.optim.schedule import Schedule, lr_problems

Leaves = Mapping[str, Mapping[str, Any]]
Outcome = Literal["ok", "damaged", "note", "skipped"]

READ_BYTES = 64 << 20  # of a tensor at once

# Where the exponent of a float lies; a number whose exponent bits are all set is an infinity or NaN.
_EXPONENTS = {"F64": 0x7FF0000000000000, "F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}


@dataclass(frozen=True)
class Check:
    name: str
    outcome: Outcome
    text: str
    """What was found; for "damaged" one line for each problem."""


@dataclass
class Report:
    """What `verify` found out about one checkpoint."""

    path: Path
    step: int | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return all(check.outcome != "damaged" for check in self.checks)

    def damaged(self) -> list[Check]:
        return [check for check in self.checks if check.outcome == "damaged"]


def verify(path: Path) -> Report:
    """Checks the checkpoint in a step directory; every byte is read.

    Checks that build on one that failed are "skipped".

    Raises:
        IncompleteCheckpoint: there is no manifest, so there is no checkpoint that could be damaged.
        CheckpointError: it was written by a newer version of this trainer.
    """
    report = Report(path, step_of(path.name))
    manifest = _attempt(report, "manifest", lambda: _manifest(path))
    if manifest is None:
        _skip(report, "sizes", "checksums", "tables", "counters", "learning rates", "values")
        return report
    report.step = manifest.step
    whole = _attempt(report, "sizes", lambda: _sizes(path, manifest)) is not None
    if whole:
        _attempt(report, "checksums", lambda: _checksums(path, manifest))
    else:
        _skip(report, "checksums")
    tables = _attempt(report, "tables", lambda: _tables(path)) if whole else _skip(report, "tables")
    if tables is None:
        _skip(report, "counters", "learning rates", "values")
        return report
    layout, leaves = tables
    _attempt(report, "counters", lambda: _counters(manifest, leaves))
    _attempt(report, "learning rates", lambda: _learning_rates(manifest, leaves))
    _attempt(report, "values", lambda: _values(path, layout))
    return report


def saved_groups(leaves: Leaves) -> list[dict[str, Any]]:
    """Returns the entries of the optimizer's saved groups, each with its "name"; [] where a checkpoint has none.

    Raises:
        CorruptCheckpoint: they are no list of tables.
    """
    groups = leaves.get("optimizer", {}).get("groups", [])
    tables = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    if not tables or not all(isinstance(group.get("entries"), dict) for group in groups):
        raise CorruptCheckpoint("optimizer.groups is no list of groups with entries")
    return [{**group["entries"], "name": group.get("name")} for group in groups]


def saved_schedule(leaves: Leaves) -> Schedule | None:
    """Returns the saved schedule; None where a checkpoint has none.

    Raises:
        CorruptCheckpoint: its entries are not those of a schedule.
    """
    if "schedule" not in leaves:
        return None
    try:
        schedule = Schedule(**leaves["schedule"])
        schedule.factor(0)
    except (TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"the saved schedule cannot be read: {error}") from error
    return schedule


class _Note(Exception):
    """Something worth saying that is no damage."""


def _attempt(report: Report, name: str, check: Callable[[], tuple[str, Any]]) -> Any:
    """Adds the outcome of one check: its text, or what a CorruptCheckpoint says. Returns its result, None if damaged."""
    try:
        text, result = check()
    except CorruptCheckpoint as error:
        report.checks.append(Check(name, "damaged", str(error)))
        return None
    except _Note as note:
        report.checks.append(Check(name, "note", str(note)))
        return None
    report.checks.append(Check(name, "ok", text))
    return result


def _skip(report: Report, *names: str) -> None:
    report.checks += [Check(name, "skipped", "") for name in names]


def _manifest(path: Path) -> tuple[str, Manifest]:
    manifest = read_manifest(path)
    promised = step_of(path.name)
    if promised is not None and promised != manifest.step:
        raise CorruptCheckpoint(f"{path.name} holds the manifest of step {manifest.step}")
    state = "resumable" if manifest.resumable else f"not resumable: {manifest.reason}"
    return f"step {manifest.step}, {state}", manifest


def _sizes(path: Path, manifest: Manifest) -> tuple[str, bool]:
    check_sizes(path, manifest)
    with os_errors(f"cannot list {path}"):
        present = {entry.name for entry in path.iterdir()}
    surplus = sorted(present - manifest.files.keys() - {MANIFEST, LOCK})
    text = f"{len(manifest.files)} files, {manifest.size_bytes:,} bytes"
    return f"{text}; beside them {', '.join(surplus[:3])}" if surplus else text, True


def _checksums(path: Path, manifest: Manifest) -> tuple[str, bool]:
    problems = []
    for name in manifest.files:
        try:
            check_bytes(path, manifest, [name])
        except CorruptCheckpoint as error:
            problems.append(str(error))
    if problems:
        raise CorruptCheckpoint("\n".join(problems))
    return "xxh3-64 of every file", True


def _tables(path: Path) -> tuple[str, tuple[Layout, Leaves]]:
    layout, leaves = read_tables(path)
    counts = Counter(owner_of(name) for name in layout if name != JSON_TENSOR)
    tensors = ", ".join(f"{owner} {count}" for owner, count in counts.items())
    return f"{len(layout) - 1} tensors ({tensors}); entries of {', '.join(leaves)}", (layout, leaves)


def _counters(manifest: Manifest, leaves: Leaves) -> tuple[str, bool]:
    progress = leaves.get("progress")
    if progress is None:
        raise _Note("no counters are saved")
    step = progress.get("step")
    if step != manifest.step:
        raise CorruptCheckpoint(f"progress.step is {step!r}, the manifest is of step {manifest.step}")
    counts = {name: value for name, value in progress.items() if name in ("tokens", "samples")}
    if any(type(value) is not int or value < 0 for value in counts.values()):
        raise CorruptCheckpoint(f"progress holds {counts}, no counts")
    return ", ".join([f"step {step}", *(f"{value:,} {name}" for name, value in counts.items())]), True


def _learning_rates(manifest: Manifest, leaves: Leaves) -> tuple[str, bool]:
    schedule, groups = saved_schedule(leaves), saved_groups(leaves)
    if schedule is None or not groups:
        raise _Note("no schedule or no group entries are saved")
    problems = lr_problems(schedule, groups, manifest.step)
    if problems:
        raise CorruptCheckpoint(
            "\n".join(line.strip() for line in problems)
            + "\n`trainer ckpt repair STEP_DIR OUT` writes a copy with the schedule's values"
        )
    rates = dict.fromkeys(f"{group['lr']:.6g}" for group in groups)
    return f"{', '.join(rates)}: what the schedule gives at step {manifest.step}", True


def _values(path: Path, layout: Layout) -> tuple[str, bool]:
    count, problems = 0, []
    for name, tensor in layout.items():
        if name == JSON_TENSOR or tensor.dtype not in _EXPONENTS:
            continue
        count += 1
        bad = sum(_not_finite(path, chunk, tensor.dtype) for chunk in tensor.chunks)
        if bad:
            problems.append(f"{name}: {bad} of {tensor.size_bytes // ITEM_BYTES[tensor.dtype]} values are not finite")
    if problems:
        raise CorruptCheckpoint("\n".join(problems))
    return f"all finite in {count} tensors", True


def _not_finite(path: Path, chunk: Chunk, dtype: str) -> int:
    item, exponent = np.dtype(f"u{ITEM_BYTES[dtype]}"), _EXPONENTS[dtype]
    bad, position, left = 0, chunk.start, chunk.size_bytes
    if not left:
        return 0
    fd = open_inside(path, chunk.file)
    with os_errors(f"cannot read {path / chunk.file}"), open(fd, "rb", buffering=0):
        while left:
            piece = np.empty(min(left, READ_BYTES) // item.itemsize, item)
            read_exactly(fd, piece.view(np.uint8).data, position, path / chunk.file)
            bad += int(np.count_nonzero((piece & item.type(exponent)) == exponent))
            position, left = position + piece.nbytes, left - piece.nbytes
    return bad


def require_sound(report: Report, *, but: frozenset[str] = frozenset()) -> None:
    """Raises CheckpointError if anything but the checks named in `but` found damage."""
    damage = [f"  {check.name}: {check.text}" for check in report.damaged() if check.name not in but]
    if damage:
        raise CheckpointError("\n".join([f"{report.path} is damaged:", *damage]))
