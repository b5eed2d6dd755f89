"""A run that is ready to train: every part that the loop touches, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer.checkpoint.app_state import Stateful
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.run import RunConfig
from trainer.core.distributed import World, agree, gather_objects
from trainer.core.signals import Requests
from trainer.data.batch import GlobalBatch, global_row_ids
from trainer.models.base import CausalLM
from trainer.optim.schedule import ScheduleState
from trainer.train.boundary import Boundaries
from trainer.train.metrics import MetricsLog
from trainer.train.pending import OWNER, Fixed, Pending, cut_of, keeps_gradients
from trainer.train.progress import Progress
from trainer.train.step import LossFunction
from trainer.train.supply import BatchSource, Supply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Run:
    """Made by `setup.start`.

    Attributes:
        last_step: where this process stops: max_steps or stop_step.
        resumed_from: the step a checkpoint was loaded at, or None for a fresh start.
        tokenizer: of the model; None for synthetic data.
        weights: owner of the float32 weights, wherever they are.
        supply: where batches, loss and measurements come from.
        pending: what the checkpoint resumed from left to be finished before the next step.
        validated: the step of the last validation by this process, and what `keep_best` goes by.
    """

    config: RunConfig
    run_dir: Path
    world: World
    device: torch.device
    model: CausalLM
    tokenizer: "PreTrainedTokenizerFast | None"
    weights: Stateful
    optimizer: Optimizer
    schedule: ScheduleState
    supply: Supply
    progress: Progress
    checkpoints: CheckpointManager
    pending: Pending
    boundaries: Boundaries
    requests: Requests
    metrics: MetricsLog
    max_steps: int
    last_step: int
    resumed_from: int | None
    validated: tuple[int, dict[str, float]] | None = None

    @property
    def loader(self) -> BatchSource:
        """Where the batches come from."""
        return self.supply.batches

    @property
    def loss_function(self) -> LossFunction:
        return self.supply.loss_function

    def log_samples(self, batch: GlobalBatch) -> None:
        """Writes the ids that the ranks really trained on, gathered from all of them, in the order of the global batch."""
        if not self.config.data.log_ids:
            return
        per_rank = gather_objects([micro_batch.ids for micro_batch in batch.micro_batches])
        rows = global_row_ids(per_rank)
        self.metrics.log_samples(self.progress.step, batch.epoch, rows)

    def save_is_due(self) -> bool:
        """Whether the config wants a checkpoint of the present step."""
        step, micro_interval = self.progress.step, self.config.ckpt.micro_interval
        by_micro_step = micro_interval > 0 and self.boundaries.serves(step, micro_interval)
        return by_micro_step or self.checkpoints.due(step, self.max_steps)

    def save(self) -> None:
        """Commits a checkpoint of the current step, or with `ckpt.async` begins to."""
        self._save({})

    def save_in_cycle(self, micro_step: int, loss_sum: float) -> None:
        """Commits a checkpoint after `micro_step` micro-steps of the next step.

        It is the state of the last boundary and, beside it, the cycle's gradients; where these cannot be had, the cycle
        is done again after a resume.
        """
        before: dict[str, Stateful] = {"data": Fixed(self.loader.state_before())}
        if not (keeps_gradients(self.config) and self.supply.keeps_cycles):
            self._save(before)
            return
        self.pending.micro_step, self.pending.loss_sums = micro_step, gather_objects(loss_sum)
        about = {"micro_step": micro_step, "cut": cut_of(self.config, self.world)}
        self._save(before | {OWNER: self.pending}, micro_step, about)
        self.pending.clear()

    def save_before_validation(self, row: dict[str, Any]) -> None:
        """Commits a checkpoint of the current step, whose row of metrics lacks its validation: a resume completes it."""
        self.pending.row = agree(row)  # timings differ between ranks
        self._save({OWNER: self.pending}, pending={"row": row["step"]})
        self.pending.row = None

    def _save(
        self, owners: Mapping[str, Stateful], micro_step: int = 0, pending: Mapping[str, Any] | None = None
    ) -> None:
        self.metrics.sync()  # rows first: after a power cut a checkpoint must not be ahead of metrics.jsonl
        self.loader.settle()
        step, measured = self.progress.step, {}
        if self.validated is not None and self.validated[0] == step:
            measured = self.validated[1]
        with self.requests.saving(), self.checkpoints.app.joined_by(owners):
            self.checkpoints.save(step, micro_step=micro_step, pending=pending, metrics=measured)
            if self.requests.stopping:  # nothing goes on beside the last one, and the grace period must not cut it off
                self.checkpoints.wait()
        self.requests.saved()
