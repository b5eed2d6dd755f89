"""The loss of a micro-batch of rollouts, and log-probabilities of its tokens under any model."""

import torch
from torch import Tensor, nn

from trainer.config.rl import ObjectiveConfig
from trainer.data.batch import IGNORE, MicroBatch
from trainer.kernels.linear_logprobs import linear_logprobs
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.measures import Measures
from trainer.rl.objective import TokenBatch, objective


def policy_loss(
    model: nn.Module,
    micro_batch: RolloutMicroBatch,
    config: ObjectiveConfig,
    temperature: float,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Measures]:
    """Returns the sum of the weighted token losses of `micro_batch` (0-dim, float32) and what was measured.

    The caller divides by the global batch's denominator (`trainer.rl.objective.aggregation`).

    Args:
        model: forward(input_ids, position_ids, document_ids, head=...), as every `CausalLM`.
        temperature: the one that the tokens were sampled with.
        chunk_tokens: see `linear_logprobs`.
    """
    labels = micro_batch.labels.flatten()
    measured: list[Measures] = []

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropy = linear_logprobs(
            hidden.flatten(0, 1), weight, labels, temperature=temperature, entropy=True, chunk_tokens=chunk_tokens
        )
        assert entropy is not None
        entropy = entropy if config.entropy else entropy.detach()  # its gradient costs a pass over the logits
        loss, measures = objective(_token_batch(micro_batch, logprobs, entropy), config)
        measured.append(measures)
        return loss

    loss = model(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids, head=head)
    return loss, measured[0]


@torch.no_grad()
def token_logprobs(
    model: nn.Module, micro_batch: MicroBatch, temperature: float, chunk_tokens: int | None = None
) -> Tensor:
    """Returns the log-probability of each label under `model`: float32 [rows, T], 0 where the label is -100, no gradient.

    The products are those of `policy_loss` on the same micro-batch: with the same weights and without dropout, the same
    numbers.
    """
    labels = micro_batch.labels

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprobs(
            hidden.flatten(0, 1),
            weight,
            labels.flatten(),
            temperature=temperature,
            entropy=False,
            chunk_tokens=chunk_tokens,
        )[0]

    found = model(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids, head=head)
    return found.view(labels.shape)


def _token_batch(micro_batch: RolloutMicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenBatch:
    rows, width = micro_batch.labels.shape
    first = torch.arange(rows, device=logprobs.device)[:, None] * width
    optional = {
        name: None if value is None else value.flatten()
        for name in ("ref_logprobs", "teacher_logprobs")
        for value in [getattr(micro_batch, name)]
    }
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=micro_batch.old_logprobs.flatten(),
        engine_logprobs=micro_batch.engine_logprobs.flatten(),
        advantages=micro_batch.advantages.flatten(),
        weights=micro_batch.weights.flatten(),
        mask=micro_batch.labels.flatten() != IGNORE,
        sequence=(first + micro_batch.document_ids.clamp(min=0)).flatten(),
        entropy=entropy,
        **optional,
    )
