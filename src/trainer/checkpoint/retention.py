"""Which checkpoints may go: a pure function of what is on disk, so that it can be tested, and shown before it acts."""

from collections.abc import Iterable, Mapping

from trainer.checkpoint.discovery import Candidate, Status
from trainer.checkpoint.paths import SUPERSEDED
from trainer.errors import CheckpointError

BEST_METRICS = {"val_loss": 1, "eval_reward": -1}
"""What `keep_best` goes by, times the factor that makes the lowest the best; a run measures one of them."""


def plan_removals(
    candidates: Iterable[Candidate],
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_best: int | None = None,
) -> list[Candidate]:
    """Returns the checkpoints to remove, oldest first.

    Only resumable ones count and only resumable ones are removed: an incomplete, corrupt or foreign directory neither
    takes a place among the newest `keep_last` or the best nor is touched. The newest resumable checkpoint is never in
    the answer.

    keep_last: the newest N stay; None = all stay. keep_every: steps that are multiples of it stay for good.
    keep_best: the N with the lowest `val_loss` (or highest `eval_reward`) stay, of two equal ones the newer; those of
    steps without a validation are not among them.

    With a checkpoint of each of the steps 1..5, keep_last = 1 and keep_every = 2: 2, 4 and 5 stay.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise ValueError(f"keep_last = {keep_last} would remove the last resumable checkpoint")
    steps = {c.step: c for c in candidates if c.status is Status.COMMITTED and c.step is not None}
    order = sorted(steps)
    kept = set(order[-keep_last:]) | {step for step in order if keep_every and step % keep_every == 0}
    kept.update(_best(steps, keep_best or 0))
    return [steps[step] for step in order if step not in kept]


def plan_superseded(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns what was set aside when the run went back to an older step, oldest first; what is foreign stays.

    Raises:
        CheckpointError: beside it the run has nothing to resume from.
    """
    candidates = list(candidates)
    doomed = [c for c in candidates if c.path.parent.name == SUPERSEDED and c.status is not Status.FOREIGN]
    if doomed and not any(c.status is Status.COMMITTED for c in candidates):
        raise CheckpointError(
            f"{doomed[0].path.parent} stays: the run has no other checkpoint to resume from "
            f"(--resume.dir {doomed[-1].path} takes this one)"
        )
    return doomed


def _best(steps: Mapping[int, Candidate], count: int) -> list[int]:
    measured = [
        (factor * c.manifest.metrics[name], -step)
        for step, c in steps.items()
        for name, factor in BEST_METRICS.items()
        if c.manifest is not None and name in c.manifest.metrics
    ]
    return [-step for _, step in sorted(measured)[:count]]
