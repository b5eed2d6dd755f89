"""What supervised fine-tuning and reinforcement learning bring to the one loop: batches, a loss, a measurement."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from trainer.config.run import RunConfig
from trainer.core.distributed import World
from trainer.data.batch import GlobalBatch
from trainer.train.boundary import Boundaries
from trainer.train.step import LossFunction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerFast

    from trainer.train.run import Run

C = TypeVar("C", bound=RunConfig)


class BatchSource(Protocol):
    """An endless sequence of global batches, and this rank's part of each. An owner of state: the place in it."""

    def next_batch(self) -> GlobalBatch:
        """Returns this rank's part of the next global batch. Collective where making it is."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the place after the last returned batch."""
        ...

    def state_before(self) -> dict[str, Any]:
        """Returns the state as it was before the last batch was taken: loaded, that batch comes again."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...

    def settle(self) -> None:
        """Called on all ranks before a checkpoint: what is under way beside the training comes to a recordable state."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place(Generic[C]):
    """Where a run is built.

    Attributes:
        config: of the run, the checkpoint's values in it where they win.
        allow: config keys whose difference to the checkpoint's data state is wanted.
        tokenizer: None for synthetic data.
    """

    config: C
    world: World
    device: torch.device
    mesh: "DeviceMesh | None"
    run_dir: Path
    tokenizer: "PreTrainedTokenizerFast | None"
    allow: Set[str]


class Supply(ABC):
    """Made before the model is, so that what is wrong with the data is told before weights are read.

    Attributes:
        batches: where batches come from.
        loss_function: their loss.
        keeps_cycles: a checkpoint in the middle of a step can keep the step's gradients; else the step is done again.
        max_steps: steps of the whole run.
    """

    batches: BatchSource
    loss_function: LossFunction
    keeps_cycles: bool
    max_steps: int

    @abstractmethod
    def boundaries(self) -> Boundaries:
        """Returns where updates happen, counted in micro-steps."""

    def attach(self, run: "Run") -> None:
        """Called once, when the model is built and its state loaded, before the first batch. Collective."""
        del run

    @abstractmethod
    def measure(self, run: "Run", pause: Callable[[], bool]) -> dict[str, float] | None:
        """Returns what was measured on held-out data, for the step's row; None if `pause` answered True. Collective.

        It leaves no trace in the training. `pause` is called between two parts of the work.
        """

    def close(self) -> None:
        """Ends what was started; called once, whatever happened."""
        self.batches.close()


Recipe = Callable[[Place], Supply]
