"""A micro-batch of rollouts: a micro-batch of tokens with what the objective knows about each."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trainer.data.batch import MicroBatch


@dataclass
class RolloutMicroBatch(MicroBatch):
    """One rank's rows of rollouts in one micro-step. A rollout is one document; it lies whole in one row.

    `labels` are the trained tokens, and no others: a rollout that is left out has -100 throughout. Everything else is
    aligned with them: position t speaks of the token labels[t]; it may hold anything where labels[t] is -100.
    """

    advantages: Tensor
    """float32 [rows, T]."""
    old_logprobs: Tensor
    """float32 [rows, T], denominator of the ratio."""
    engine_logprobs: Tensor
    """float32 [rows, T], at the sampling temperature."""
    weights: Tensor
    """float32 [rows, T], see `trainer.rl.objective.aggregation`."""
    ref_logprobs: Tensor | None = None
    """float32 [rows, T], of the reference model, where the objective has a KL penalty."""
    teacher_logprobs: Tensor | None = None
    """float32 [rows, T], of the teacher, where the objective distils."""

    def to(self, device: torch.device | str) -> "RolloutMicroBatch":
        """Returns the same micro-batch on `device`; the copy does not block where the tensors are pinned."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        return RolloutMicroBatch(**moved)
