"""Which checkpoints may go: a pure function of what is on disk, so that it can be tested, and shown before it acts."""

from collections.abc import Iterable

from trainer.checkpoint.discovery import Candidate, Status


def plan_removals(
    candidates: Iterable[Candidate], *, keep_last: int | None, keep_every: int | None = None
) -> list[Candidate]:
    """Returns the checkpoints to remove, oldest first.

    Only resumable ones count and only resumable ones are removed: an incomplete, corrupt or foreign directory neither
    takes a place among the newest `keep_last` nor is touched. The newest resumable checkpoint is never in the answer.

    keep_last: the newest N stay; None = all stay. keep_every: steps that are multiples of it stay for good.

    With a checkpoint of each of the steps 1..5, keep_last = 1 and keep_every = 2: 2, 4 and 5 stay.
    """
    if keep_last is None:
        return []
    if keep_last < 1:
        raise ValueError(f"keep_last = {keep_last} would remove the last resumable checkpoint")
    steps = {c.step: c for c in candidates if c.status is Status.COMMITTED and c.step is not None}
    older = sorted(steps)[:-keep_last]
    return [steps[step] for step in older if not (keep_every and step % keep_every == 0)]
