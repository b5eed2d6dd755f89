"""What a save between two boundaries adds to the state of the last one.

Weights, optimizer, counters and data position of such a checkpoint are those of the last boundary: within a cycle only
gradients and the sum of the losses have grown, and during a validation nothing has. So it can always be resumed from;
what is pending only saves doing it again.
"""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from trainer.config.run import RunConfig
from trainer.core.distributed import World
from trainer.optim.gradients import all_gradients, set_gradients

OWNER = "pending"

Row = dict[str, Any]


class Pending:
    """Owner of an unfinished cycle (its gradients) or of an unfinished row of metrics (its validation is to come).

    Attributes:
        micro_step: micro-steps of the cycle that are done; 0 at a boundary.
        loss_sums: each rank's sum of losses over them.
        row: the metrics of the last step, if its validation has not ended.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self.clear()

    def clear(self) -> None:
        """Notes that the run stands at a boundary with nothing left to do."""
        self.micro_step = 0
        self.loss_sums: list[float] = []
        self.row: Row | None = None

    def expect(self, micro_step: int) -> None:
        """Before a load: whether there are gradients to load (`micro_step` > 0)."""
        self.micro_step = micro_step

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"micro_step": self.micro_step, "loss_sums": list(self.loss_sums), "row": self.row}
        if self.micro_step:
            found, absent = all_gradients(self._optimizer)
            state |= {"gradients": found, "absent": absent}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_step, self.loss_sums, self.row = state["micro_step"], list(state["loss_sums"]), state["row"]
        if self.micro_step:
            absent = set(state["absent"])
            set_gradients(self._optimizer, {n: g for n, g in state["gradients"].items() if n not in absent})


@dataclass(frozen=True)
class Fixed:
    """Owner of a state that is only saved."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("this owner only stands in for another while a checkpoint is written")


def cut_of(config: RunConfig, world: World) -> dict[str, int]:
    """Returns what decides which rows are in a micro-step, and in which order gradients are summed up."""
    return {
        "ranks": world.size,
        "micro_batch_size": config.data.micro_batch_size,
        "dp_replicate": config.parallel.dp_replicate,
    }


def keeps_gradients(config: RunConfig) -> bool:
    """Whether the gradients of a cycle under way can be saved.

    With replica groups (HSDP) they cannot: until the last micro-step each group has its own sum, inside FSDP.
    """
    return config.parallel.dp_replicate == 1
