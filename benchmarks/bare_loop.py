"""The training loop that one would write by hand, with nothing around it.

The same model, rows, loss and optimizer as ours. Its batches are given to it as tensors, it writes no metrics, has no
schedule, counts nothing and derives no seeds: what ours adds to it is overhead.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.run import SFTConfig
from trainer.core.distributed import World
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.data.build import build_data
from trainer.data.loader import BatchLoader
from trainer.kernels.linear_cross_entropy import linear_cross_entropy
from trainer.models.build import build_model


def chunked_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The sum of the token losses, by our chunked kernel."""
    labels = batch.labels.flatten()
    return model(
        batch.input_ids,
        batch.position_ids,
        batch.document_ids,
        head=lambda hidden, weight: linear_cross_entropy(hidden.flatten(0, 1), weight, labels),
    )


def full_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The same sum from full logits, in float32 as every full-logits trainer has them."""
    logits = model(batch.input_ids, batch.position_ids, batch.document_ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="sum")


def batches_in_order(config: SFTConfig, seed: int) -> BatchLoader:
    """Returns the batches of our run's documents in the order that another seed gives."""
    world = World(rank=0, local_rank=0, size=1, local_size=1)
    data = build_data(config.data, tokenizer=None, seed=config.seed, world=world)
    return BatchLoader(data.train, config.data, seed=seed, rank=0, world_size=1)


class BareLoop:
    """Trains a model of its own."""

    def __init__(self, config: SFTConfig, loss_function: Callable[[nn.Module, MicroBatch], Tensor]):
        self._loss_function = loss_function
        self._model = build_model(config.model, mesh=None, device=torch.device("cpu"), seed=config.seed)
        self._model.train()
        self._parameters = list(self._model.parameters())
        o = config.optim
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
        self._max_norm = o.max_norm or float("inf")

    def step(self, batch: GlobalBatch) -> float:
        """One update; returns the mean loss."""
        total = 0.0
        for micro_batch in batch.micro_batches:
            loss = self._loss_function(self._model, micro_batch) / batch.supervised_tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total
