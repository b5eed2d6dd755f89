"""What lies in a checkpoints directory. Resume, retention and `trainer ckpt ls` all see it through `discover`.

In a run only rank 0 calls this; the choice is agreed. Only manifests and file sizes are read here.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainer.checkpoint.importers.recognise import recognise
from trainer.checkpoint.manifest import Manifest, check_sizes, read_manifest
from trainer.checkpoint.paths import (
    CHECKPOINTS,
    MANIFEST,
    SUPERSEDED,
    is_our_file,
    is_removed,
    is_temporary,
    os_errors,
    replaced_step_of,
    step_name,
    step_of,
)
from trainer.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint


class Status(StrEnum):
    COMMITTED = "committed"
    """Whole, and a run can go on from it."""
    NOT_RESUMABLE = "not resumable"
    """Whole, but its writer marked it as no place to go on from."""
    MID_CYCLE = "mid-cycle"
    """Whole, but taken between two updates without the gradients so far."""
    INCOMPLETE = "incomplete"
    """Never committed, or on its way out."""
    CORRUPT = "corrupt"
    """Committed once; now a file is missing or differs."""
    SUPERSEDED = "superseded"
    """Set aside when the run went back to an older step."""
    FOREIGN = "foreign"
    """Not written by this trainer, or by a newer version of it."""


WHOLE = frozenset({Status.COMMITTED, Status.NOT_RESUMABLE, Status.MID_CYCLE})
"""Statuses of what was committed and is as it was."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was chosen to resume from; the same on every rank."""

    path: Path
    step: int
    manifest: Manifest


@dataclass(frozen=True)
class Candidate:
    """One entry of a checkpoints directory."""

    path: Path
    step: int | None
    """From its name; None where the name has none."""
    status: Status
    reason: str = ""
    manifest: Manifest | None = None

    def checkpoint(self) -> Checkpoint:
        """Returns it as a checkpoint; only for one that is whole."""
        if self.manifest is None:
            raise CheckpointError(f"{self.path} is {self.status}: {self.reason}")
        return Checkpoint(self.path, self.manifest.step, self.manifest)


def discover(checkpoints: Path, *, superseded: bool = False) -> list[Candidate]:
    """Returns every entry of a run's checkpoints directory, by step; those without a step come last.

    `superseded` also lists what was set aside. A directory that does not exist has no entries.

    Raises:
        CheckpointError: it cannot be read.
    """
    with os_errors("cannot list the checkpoints"):
        entries = _entries(checkpoints)
        aside = _entries(checkpoints / SUPERSEDED) if superseded else []
    names = {entry.name for entry in entries}
    found = [_inspect(entry, names) for entry in entries if entry.name != SUPERSEDED]
    for candidate in (_inspect(entry, set()) for entry in aside):
        if candidate.status in WHOLE:
            reason = "the run was resumed from an older step"
            candidate = Candidate(candidate.path, candidate.step, Status.SUPERSEDED, reason, candidate.manifest)
        found.append(candidate)
    return sorted(found, key=lambda c: (c.step is None, c.step or 0, c.path.name))


def _entries(directory: Path) -> list[os.DirEntry]:
    try:
        return list(os.scandir(directory))
    except FileNotFoundError:
        return []


def _inspect(entry: os.DirEntry, siblings: set[str]) -> Candidate:
    path = Path(entry.path)
    step = step_of(entry.name)
    if entry.is_symlink():
        return Candidate(path, step, Status.FOREIGN, "a symlink; give its target to --resume.dir if you mean it")
    if not entry.is_dir():
        return Candidate(path, None, Status.FOREIGN, "not a directory")
    if step is not None:
        return inspect_step(path, step)
    if is_temporary(entry.name):
        return Candidate(path, None, Status.INCOMPLETE, "a save in progress, or one that was interrupted")
    if is_removed(entry.name):
        return Candidate(path, None, Status.INCOMPLETE, "a removal in progress, or one that was interrupted")
    replaced = replaced_step_of(entry.name)
    if replaced is not None:
        if step_name(replaced) in siblings:
            return Candidate(path, None, Status.INCOMPLETE, "a replaced checkpoint whose removal was interrupted")
        step = replaced  # the rename that would have brought in its successor never happened: this one still counts
    else:
        step = _step_of_superseded(entry.name)
    if step is None:
        return Candidate(path, None, Status.FOREIGN, "its name is not step_ and eight digits")
    return inspect_step(path, step)


def _step_of_superseded(name: str) -> int | None:
    """ "step_00000012.2": a second checkpoint of that step was set aside."""
    head, _, tail = name.partition(".")
    return step_of(head) if tail.isdigit() else None


def inspect_step(path: Path, step: int | None = None) -> Candidate:
    """Returns what a single directory is; `step` is the one its name promises (None: the name does not matter)."""
    try:
        manifest = read_manifest(path)
    except IncompleteCheckpoint as error:
        foreign = _why_foreign(path)
        return Candidate(path, step, Status.FOREIGN if foreign else Status.INCOMPLETE, foreign or str(error))
    except CorruptCheckpoint as error:
        return Candidate(path, step, Status.CORRUPT, str(error))
    except CheckpointError as error:
        return Candidate(path, step, Status.FOREIGN, str(error))
    if step is not None and manifest.step != step:
        reason = f"its {MANIFEST} is of step {manifest.step}: the directory was renamed or its manifest exchanged"
        return Candidate(path, step, Status.CORRUPT, reason, manifest)
    try:
        check_sizes(path, manifest)
    except CorruptCheckpoint as error:
        return Candidate(path, manifest.step, Status.CORRUPT, str(error), manifest)
    if not manifest.resumable:
        return Candidate(path, manifest.step, Status.NOT_RESUMABLE, manifest.reason, manifest)
    if manifest.micro_step != (manifest.pending or {}).get("micro_step", 0):
        reason = (
            f"taken after micro-step {manifest.micro_step} of a cycle, without the gradients so far: going on from it "
            "would lose these micro-batches or train on them twice"
        )
        return Candidate(path, manifest.step, Status.MID_CYCLE, reason, manifest)
    return Candidate(path, manifest.step, Status.COMMITTED, "", manifest)


def _why_foreign(path: Path) -> str:
    """Returns whose directory this is, judged by the names in it; "" if all could be ours."""
    try:
        names = {entry.name for entry in os.scandir(path)}
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    recognised = recognise(path)
    if recognised is not None and not all(is_our_file(name) for name in names):
        return recognised.reason
    others = sorted(name for name in names if not is_our_file(name))
    return f"it has no {MANIFEST}, and files that this trainer never writes: {', '.join(others[:3])}" if others else ""


def newest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted((c for c in candidates if c.step is not None), key=lambda c: c.step or 0, reverse=True)


def locate(text: str | Path) -> tuple[Path, bool]:
    """Returns (directory, is_run) for a path that a user gave: a step directory, or a run's checkpoints directory.

    A run may be given as its output directory or as the `checkpoints` directory inside. The path's own symlinks are
    followed; symlinks inside a checkpoint never are.

    Raises:
        CheckpointError: there is nothing, or something else; model directories are told apart.
    """
    path = Path(os.path.realpath(text))
    if not path.is_dir():
        raise CheckpointError(f"{text} is not a directory; give a step directory or a run's output directory")
    if os.path.lexists(path / MANIFEST) or step_of(path.name) is not None:
        return path, False
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS, True
    if path.name == CHECKPOINTS:
        return path, True
    whose = _why_foreign(path)
    if whose.startswith("a model directory"):
        raise CheckpointError(
            f"{text} is a model directory: it has weights, but no optimizer state, schedule or data position to resume "
            f"from; to start from its weights at step 0 use --model.name {text}"
        )
    detail = f" ({whose})" if whose else ""
    raise CheckpointError(f"{text} holds no checkpoint of this trainer{detail}: neither {MANIFEST} nor {CHECKPOINTS}/")
