"""Repairs what can be repaired without guessing: a learning rate that its own schedule contradicts.

Trainers that lost their param groups on a resume wrote checkpoints whose groups hold the lr of a fresh optimizer (5e-13
in the middle of a run). The schedule and initial_lr beside it say what it must be. Changed bytes and weights that are not
finite cannot be mended: such a checkpoint is refused, with every finding.
"""

import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trainer.checkpoint.manifest import Manifest, read_manifest
from trainer.checkpoint.rewrite import write_copy
from trainer.checkpoint.tables import read_tables
from trainer.checkpoint.verify import require_sound, saved_schedule, verify
from trainer.errors import CheckpointError

REPAIRABLE = frozenset({"learning rates"})


@dataclass(frozen=True)
class Repair:
    path: Path | None
    """The repaired copy; None where nothing had to be changed."""
    changes: list[str]
    """"optimizer.groups[0].entries.lr: 5e-13 -> 5e-05"."""


def repair(source: Path, checkpoints: Path) -> Repair:
    """Writes a copy of the checkpoint `source` into the directory `checkpoints` with every lr its schedule's.

    `source` is only read. The copy's manifest names it as its parent and lists the changes.

    Raises:
        CheckpointError: it has damage that cannot be repaired, or the copy cannot be written.
    """
    report = verify(source)
    require_sound(report, but=REPAIRABLE)
    manifest = read_manifest(source)
    layout, leaves = read_tables(source)
    mended = copy.deepcopy(leaves)
    schedule = saved_schedule(leaves)
    if report.sound or schedule is None:
        return Repair(None, [])
    changes, factor = [], schedule.factor(manifest.step)
    for index, group in enumerate(mended["optimizer"]["groups"]):
        entries, initial_lr = group["entries"], group["entries"].get("initial_lr")
        if not isinstance(initial_lr, int | float):
            raise CheckpointError(
                f"{source}: group {group['name']!r} has initial_lr {initial_lr!r}, so its lr cannot be restored; "
                "resume with --resume.override optim.lr, which takes both from the config"
            )
        lr = initial_lr * factor
        if entries.get("lr") != lr:
            changes.append(f"optimizer.groups[{index}].entries.lr: {entries.get('lr')!r} -> {lr!r}")
            entries["lr"] = lr
    path, _ = write_copy(source, layout, mended, _manifest(source, manifest, changes), checkpoints)
    return Repair(path, changes)


def _manifest(source: Path, manifest: Manifest, changes: list[str]) -> Manifest:
    return replace(
        manifest,
        parent={"path": str(source), "step": manifest.step, "checksum": manifest.checksum},
        run={**manifest.run, "repaired": changes},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
