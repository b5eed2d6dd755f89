"""Learning-rate schedules: pure functions of the number of updates done.

``factor(n)`` multiplies every group's own ``initial_lr`` and holds for update n + 1. The shapes equal torch's chained
LinearLR, CosineAnnealingLR and SequentialLR; here nothing is chained, so there is nothing to fast-forward on a resume.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainer.errors import CheckpointMismatch

SMALLEST_START_FACTOR = 1e-8  # torch's LinearLR refuses a start factor of zero
LR_TOLERANCE = 1e-6  # relative; what a faithful save can differ by is rounding, far below it


@dataclass(frozen=True)
class Schedule:
    """One schedule. All lengths are in optimizer steps.

    Attributes:
        type: "constant", "linear" (warmup, plateau, linear decay) or "cosine" (warmup, then a half cosine).
        total_steps: the horizon; from there on the factor stays at its last value.
        warmup_steps: linear warmup from max(min_factor, 1e-8) to 1.
        decay_steps: length of the linear decay at the end of the horizon; its last step, update `total_steps`, runs
            at `min_factor`, so the fall is spread over decay_steps - 1 equal parts. None: all that follows the warmup.
        min_factor: min_lr / lr.
        decay_shape: of "linear"'s decay: the factor falls with the decayed fraction x, or with its root:
            1 - (1 - min_factor) sqrt(x), the cooldown of Hägele et al., https://arxiv.org/abs/2405.18392.
        start_step: updates of the run before the schedule begins; all lengths count from there.
    """

    type: Literal["constant", "linear", "cosine"]
    total_steps: int
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_factor: float = 0.0
    decay_shape: Literal["linear", "sqrt"] = "linear"
    start_step: int = 0

    def factor(self, step: int) -> float:
        """Returns lr / initial_lr after `step` updates."""
        step = max(0, step - self.start_step)
        if step < self.warmup_steps:
            start = max(self.min_factor, SMALLEST_START_FACTOR)
            return start + (1.0 - start) * step / self.warmup_steps
        if self.type == "linear":
            return self._linear(step)
        if self.type == "cosine":
            return self._cosine(step)
        return 1.0

    def _linear(self, step: int) -> float:
        longest = max(0, self.total_steps - self.warmup_steps)
        decay = longest if self.decay_steps is None else min(self.decay_steps, longest)
        into = step - (self.total_steps - decay)
        if decay == 0 or into <= 0:
            return 1.0
        fraction = min(1.0, into / max(1, decay - 1))
        if self.decay_shape == "sqrt":
            fraction = math.sqrt(fraction)
        return 1.0 + (self.min_factor - 1.0) * fraction

    def _cosine(self, step: int) -> float:
        length = self.total_steps - self.warmup_steps
        if length <= 0:
            return 1.0
        fraction = min(1.0, (step - self.warmup_steps) / length)
        return self.min_factor + (1.0 - self.min_factor) * (1.0 + math.cos(math.pi * fraction)) / 2


class ScheduleState:
    """Owns the run's schedule and writes lr into live param groups; keeps no position of its own."""

    def __init__(
        self,
        schedule: Schedule,
        groups: Iterable[dict[str, Any]],
        *,
        overridden: bool = False,
        keeps_floor: bool = False,
    ):
        """
        overridden: keep this schedule when a checkpoint is loaded (resume.override names the scheduler).
        keeps_floor: keep this one's `min_factor`: the peak is not the checkpoint's (resume.override names optim.lr), and
            min_lr, which is a learning rate and no fraction of the peak, shall be what it was.
        """
        self.schedule = schedule
        self.overridden = overridden
        self.keeps_floor = keeps_floor
        self._groups = groups

    def apply(self, step: int) -> None:
        """Writes the lr that follows `step` updates into every group, in place."""
        factor = self.schedule.factor(step)
        for group in self._groups:
            group["lr"] = group["initial_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.schedule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.overridden:
            return
        state = {"start_step": 0, **state}  # older checkpoints do not have it
        if set(state) != set(asdict(self.schedule)):
            raise CheckpointMismatch(
                f"the checkpoint's schedule has the entries {sorted(state)}, this version knows "
                f"{sorted(asdict(self.schedule))}; take the config's with --resume.override scheduler"
            )
        kept = {"min_factor": self.schedule.min_factor} if self.keeps_floor else {}
        self.schedule = Schedule(**{**state, **kept})

    def verify(self, saved: dict[str, Any]) -> list[str]:
        """Returns what differs from the loaded state; nothing does when the config's schedule was asked for."""
        saved = {"start_step": 0, **saved}
        live = {
            key: value for key, value in self.state_dict().items() if not (key == "min_factor" and self.keeps_floor)
        }
        return [] if self.overridden else [key for key, value in live.items() if value != saved[key]]

    def check_lr(self, step: int) -> None:
        """Holds the groups' lr against the schedule.

        Raises:
            CheckpointMismatch: a group's lr differs by more than 1e-6 relative. Checkpoints written by trainers that
                lost their param groups carry such values (5e-13 after a warmup) and train on as if healthy.
        """
        problems = lr_problems(self.schedule, self._groups, step)
        if problems:
            raise CheckpointMismatch(
                "\n".join(["the checkpoint's learning rates are not those of its own schedule:", *problems])
                + "\nTake the config's with --resume.override optim.lr, or write a repaired copy with "
                "trainer ckpt repair STEP_DIR OUT"
            )


def lr_problems(schedule: Schedule, groups: Iterable[Mapping[str, Any]], step: int) -> list[str]:
    """Returns one line for each group whose lr is not what `schedule` gives after `step` updates, beyond 1e-6 relative.

    groups: live param groups, or the entries of saved ones; "lr" and "initial_lr" are read, "name" is shown.
    """
    problems, factor = [], schedule.factor(step)
    for group in groups:
        name, lr, initial_lr = group.get("name"), group.get("lr"), group.get("initial_lr")
        if not isinstance(lr, int | float) or not isinstance(initial_lr, int | float):
            problems.append(f"  group {name!r} has lr {lr!r} and initial_lr {initial_lr!r}; both must be numbers")
            continue
        expected = initial_lr * factor
        if not math.isclose(lr, expected, rel_tol=LR_TOLERANCE, abs_tol=1e-14 * abs(initial_lr)):
            problems.append(f"  group {name!r} has lr {lr:.8g}, but the schedule gives {expected:.8g} at step {step}")
    return problems
