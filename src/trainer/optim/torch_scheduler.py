"""The face of a `Schedule` that code written for torch's schedulers expects."""

from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.optim.schedule import Schedule


class ScheduleLR(LRScheduler):
    """Steps, reports and saves like any torch scheduler; each lr is `initial_lr * schedule.factor(last_epoch)`.

    Nothing is chained: `last_epoch`, the number of updates, says all. Building one with `last_epoch = N` on restored groups,
    or building a fresh one and loading its state, gives the same learning rates.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1):
        """`last_epoch`: updates done minus what torch's constructor adds by itself; -1 = none."""
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        factor = self.schedule.factor(self.last_epoch)
        return [group["initial_lr"] * factor for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON-able values; the optimizer is not among them."""
        return {"last_epoch": self.last_epoch, "schedule": asdict(self.schedule), "last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position and the schedule, and writes the lr that belongs to them into the groups."""
        self.schedule = Schedule(**state_dict["schedule"])
        self.last_epoch = state_dict["last_epoch"]
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._last_lr = list[float | Tensor](self.get_lr())
