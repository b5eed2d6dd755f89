"""The training loop that one would write by hand, with nothing around it.

The same model, rows, loss and optimizer as ours. Its batches lie ready in memory as tensors before the first step, it
writes no metrics, has no schedule, counts nothing and derives no seeds: what ours adds to it is overhead.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

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

PREPARED_BATCHES = 32


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


def prepared_batches(config: SFTConfig) -> list[GlobalBatch]:
    """Returns the batches that our run begins with."""
    world = World(rank=0, local_rank=0, size=1, local_size=1)
    data = build_data(config.data, tokenizer=None, seed=config.seed, world=world)
    loader = BatchLoader(data.train, config.data, seed=config.seed, rank=0, world_size=1)
    return [loader.next_batch() for _ in range(PREPARED_BATCHES)]


def bare_steps(
    config: SFTConfig, batches: Sequence[GlobalBatch], loss_function: Callable[[nn.Module, MicroBatch], Tensor]
) -> Iterator[int]:
    """Trains a model of its own for ever, a step at a time; yields the useful tokens of each."""
    model = build_model(config.model, mesh=None, device=torch.device("cpu"), seed=config.seed)
    parameters = list(model.parameters())
    o = config.optim
    optimizer = torch.optim.AdamW(
        parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    max_norm = o.max_norm or float("inf")
    model.train()
    for batch in itertools.cycle(batches):
        total = 0.0
        for micro_batch in batch.micro_batches:
            loss = loss_function(model, micro_batch) / batch.supervised_tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield batch.tokens
