"""The one training step: micro-batches in, one update out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainer.core.distributed import sum_over_ranks
from trainer.core.rng import seed_micro_step
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.optim.clip import clip_gradients
from trainer.optim.offload.base import OffloadOptimizer, updated_parameters


class Measures(Protocol):
    """What a loss measures beside its value."""

    def __add__(self, other: Self) -> Self:
        """Joins what two micro-batches have measured."""
        ...

    def over_ranks(self) -> dict[str, float]:
        """Returns what goes into the step's row of metrics, from what all ranks have. Collective."""
        ...


LossFunction = Callable[[nn.Module, MicroBatch], Tensor | tuple[Tensor, Measures]]
"""Returns the sum of the loss over a micro-batch's supervised tokens: 0-dim, float32, differentiable. It may return what
it measured as well; all micro-batches of a step must do the same."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured, equal on all ranks.

    Attributes:
        loss: the summed loss over the batch's denominator (its supervised tokens), before the update.
        grad_norm: global L2 norm before clipping.
        finite: both are finite; when not, no update was applied (but see `early` of `train_step`).
        measures: what the loss measured beside its value.
    """

    loss: float
    grad_norm: float
    finite: bool
    measures: dict[str, float] = field(default_factory=dict)


Pause = Callable[[int, Tensor], bool]
"""Called between two micro-steps with the number done and this rank's loss sum over them (0-dim, float64); the cycle is
broken off where it returns True. Collective."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_function: LossFunction,
    batch: GlobalBatch,
    *,
    step: int,
    seed: int,
    rank: int,
    device: torch.device,
    max_norm: float | None,
    early: bool = False,
    done: int = 0,
    loss_sum: float = 0.0,
    pause: Pause | None = None,
) -> StepResult | None:
    """Runs forward and backward over this rank's micro-batches, then clips and updates.

    Every micro-batch's loss sum is divided by the supervised tokens of the *whole global batch*, and gradients are summed
    over ranks and micro-steps. So the same batch gives the same gradient however it is cut up.

    Args:
        step: updates done before this one; addresses the random draws.
        early: the update may begin in the last backward pass (mode "full", without `max_norm`). A step that is not finite is
            then in the weights in part, and its optimizer refuses to go on: for callers that end the run there.
        done: micro-steps of this cycle whose gradients are there already; they are left out.
        loss_sum: this rank's sum of losses over them.

    Returns:
        What was measured; None if `pause` broke the cycle off, which leaves the gradients where they are.
    """
    denominator, measures = batch.denominator, []
    total = torch.full((), loss_sum, dtype=torch.float64, device=device)
    for micro_step, micro_batch in enumerate(batch.micro_batches):
        if micro_step < done:
            continue
        if pause is not None and micro_step > done and pause(micro_step, total):
            return None
        is_last = micro_step == len(batch.micro_batches) - 1
        _reduce_over_replicas(model, is_last)
        seed_micro_step(seed, step, micro_step, rank)
        loss, measured = _loss_of(loss_function(model, micro_batch.to(device)))
        if is_last and early and max_norm is None and isinstance(optimizer, OffloadOptimizer):
            optimizer.begin_update()
        (loss / denominator).backward()
        measures += measured
        total += loss.detach()
    mean_loss = sum_over_ranks(total.item())[0] / denominator
    if isinstance(optimizer, OffloadOptimizer):
        grad_norm = optimizer.clip_gradients(max_norm, within_step=True).item()  # they may have left the device
    else:
        grad_norm = clip_gradients(updated_parameters(optimizer), max_norm).item()
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss=mean_loss, grad_norm=grad_norm, finite=finite, measures=_joined(measures))


def _loss_of(output: Tensor | tuple[Tensor, Measures]) -> tuple[Tensor, list[Measures]]:
    return (output[0], [output[1]]) if isinstance(output, tuple) else (output, [])


def _joined(measures: list[Measures]) -> dict[str, float]:
    """Returns the measures of all micro-steps and ranks; ranks run equally many micro-steps. Collective if there are any."""
    if not measures:
        return {}
    return reduce(add, measures).over_ranks()


def _reduce_over_replicas(model: nn.Module, is_last: bool) -> None:
    """Reduce-scatters after every micro-step, so accumulated gradients stay sharded; HSDP's replicas reduce once."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    batches: list[GlobalBatch],
    *,
    device: torch.device,
    pause: Callable[[], bool] | None = None,
) -> tuple[float, int] | None:
    """Returns (mean loss per supervised token, supervised tokens) over `batches`, without touching any state.

    `pause` is called before each batch, on all ranks; None is returned where it answers True.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for batch in batches:
        if pause is not None and pause():
            model.train(was_training)
            return None
        for micro_batch in batch.micro_batches:
            total += _loss_of(loss_function(model, micro_batch.to(device)))[0]
    model.train(was_training)
    tokens = sum(batch.supervised_tokens for batch in batches)
    return sum_over_ranks(total.item())[0] / max(1, tokens), tokens
