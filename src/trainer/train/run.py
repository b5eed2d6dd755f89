"""A run that is ready to train: every part that the loop touches, in one place."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.retention import BEST_METRIC
from trainer.config.run import RunConfig
from trainer.core.distributed import World, gather_objects
from trainer.data.batch import GlobalBatch, global_row_ids
from trainer.data.loader import BatchLoader
from trainer.models.base import CausalLM
from trainer.optim.schedule import ScheduleState
from trainer.train.metrics import MetricsLog
from trainer.train.progress import Progress
from trainer.train.step import LossFunction


@dataclass
class Run:
    """Made by `setup.start`.

    Attributes:
        last_step: where this process stops: max_steps or stop_step.
        resumed_from: the step a checkpoint was loaded at, or None for a fresh start.
        validation: this rank's held-out batches, always the same.
        validated: the step of the last validation by this process, and its loss.
    """

    config: RunConfig
    run_dir: Path
    world: World
    device: torch.device
    model: CausalLM
    optimizer: Optimizer
    schedule: ScheduleState
    loss_function: LossFunction
    loader: BatchLoader
    validation: list[GlobalBatch]
    progress: Progress
    checkpoints: CheckpointManager
    metrics: MetricsLog
    max_steps: int
    last_step: int
    resumed_from: int | None
    validated: tuple[int, float] | None = None

    def log_samples(self, batch: GlobalBatch) -> None:
        """Writes the ids that the ranks really trained on, gathered from all of them, in the order of the global batch."""
        if not self.config.data.log_ids:
            return
        per_rank = gather_objects([micro_batch.ids for micro_batch in batch.micro_batches])
        rows = global_row_ids(per_rank)
        self.metrics.log_samples(self.progress.step, batch.epoch, rows)

    def save(self) -> None:
        """Commits a checkpoint of the current step, or with `ckpt.async` begins to."""
        self.metrics.sync()  # rows first: after a power cut a checkpoint must not be ahead of metrics.jsonl
        step, measured = self.progress.step, {}
        if self.validated is not None and self.validated[0] == step:
            measured = {BEST_METRIC: self.validated[1]}
        self.checkpoints.save(step, metrics=measured)
