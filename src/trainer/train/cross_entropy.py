"""Next-token cross-entropy over supervised tokens: the loss of fine-tuning, and what reinforcement learning may mix in."""

from functools import partial

from torch import Tensor, nn

from trainer.data.batch import MicroBatch
from trainer.kernels.linear_cross_entropy import linear_cross_entropy


def cross_entropy(model: nn.Module, micro_batch: MicroBatch, *, chunk_tokens: int | None = None) -> Tensor:
    """Returns the summed token loss of `micro_batch`: 0-dim, float32. The caller divides by the global token count."""
    head = partial(_head, labels=micro_batch.labels, chunk_tokens=chunk_tokens)
    return model(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids, head=head)


def _head(hidden: Tensor, weight: Tensor, *, labels: Tensor, chunk_tokens: int | None) -> Tensor:
    """hidden [rows, T, d] and weight [vocab, d] in the compute dtype; labels int64 [rows, T], -100 = unsupervised."""
    return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), chunk_tokens=chunk_tokens)
