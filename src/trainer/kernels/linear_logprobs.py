"""Log-probabilities of given tokens under `softmax(hidden @ weight.T / temperature)`, and the entropy, without [N, V] logits.

Forward walks the tokens in chunks and keeps two numbers per token (log-normaliser and entropy). What the log-probabilities
are multiplied with is not known yet, so backward walks the chunks again: logits are computed twice and stored never.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.kernels.linear_cross_entropy import (
    IGNORED,
    accumulate_weight_gradient,
    accumulation_dtype,
    block_tokens,
    default_chunk_tokens,
    gather_rows,
    logits_buffer,
)
from trainer.kernels.products import multiply, padded_rows


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy: bool,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    Matrix products run in the inputs' dtype, as in an engine that samples; softmax, entropy and the weight gradient's
    accumulation in float32 (float64 for float64 inputs). Rows whose target is -100 cost nothing.

    Args:
        hidden: [N, D], float32, bfloat16 or float64.
        weight: [V, D], same dtype and device as `hidden`.
        targets: [N] int64 in [0, V), or -100.
        temperature: positive; the one that tokens were sampled with.
        entropy: compute the second result.
        chunk_tokens: tokens whose logits are held at once; by default `default_chunk_tokens`.
            It changes the results by rounding only.

    Returns:
        logprobs [N] and, if asked for, entropy [N] in nats, else None; float32 (float64 for float64 inputs), 0 where the
        target is -100. Differentiable once in `hidden` and `weight`.
    """
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(weight)
    return _LinearLogprobs.apply(hidden, weight, targets, temperature, entropy, chunk_tokens)


def linear_logprobs_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns the same two results, from the full logits."""
    logits = F.linear(hidden, weight).to(accumulation_dtype(hidden.dtype)) / temperature
    logprobs = logits.log_softmax(dim=1)
    kept = targets != IGNORED
    picked = logprobs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1)
    return torch.where(kept, picked, 0.0), torch.where(kept, entropy, 0.0)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        rows = (targets != IGNORED).nonzero().squeeze(1)
        wanted = targets[rows]
        results = torch.zeros(3, rows.numel(), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        buffer = logits_buffer(padded_rows(min(chunk_tokens, rows.numel()), weight), weight)
        for start in range(0, rows.numel(), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            inputs = gather_rows(hidden, rows[chunk], weight)
            logits = multiply(inputs, weight, buffer)
            target = wanted[chunk, None]
            _normalise(logits[: len(target)], target, temperature, results[:, chunk], entropy)
            del logits  # before the next ones are made

        ctx.save_for_backward(hidden, weight, rows, wanted, results)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        logprobs, _, entropies = (_spread(result, rows, targets.numel()) for result in results)
        return logprobs, entropies if entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, rows, wanted, results = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        tokens = rows.numel()
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.empty(weight.shape, dtype=results.dtype, device=weight.device) if need_weight else None
        if grad_weight is not None and tokens == 0:
            grad_weight.zero_()
        by_logprob = results.new_zeros(tokens) if grad_logprobs is None else grad_logprobs[rows]
        by_entropy = None if grad_entropy is None else grad_entropy[rows]
        buffer = logits_buffer(padded_rows(min(ctx.chunk_tokens, tokens), weight), weight)
        for start in range(0, tokens, ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            inputs = gather_rows(hidden, rows[chunk], weight)
            logits = multiply(inputs, weight, buffer)
            target = wanted[chunk, None]
            grads = (by_logprob[chunk], None if by_entropy is None else by_entropy[chunk])
            _differentiate(logits[: len(target)], target, ctx.temperature, results[:, chunk], *grads)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, rows[chunk], multiply(logits, weight.t())[: len(target)])
            if grad_weight is not None:
                accumulate_weight_gradient(grad_weight, logits, inputs, first=start == 0)
            del logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _normalise(logits: Tensor, targets: Tensor, temperature: float, results: Tensor, entropy: bool) -> None:
    """Writes a chunk's log-probabilities, log-normalisers and entropies into `results` [3, chunk]; spoils `logits`."""
    block = block_tokens(logits, results.dtype)
    for part, target, result in zip(
        logits.split(block), targets.split(block), results.split(block, dim=1), strict=True
    ):
        values = _scaled(part, temperature, results.dtype)
        top = values.amax(dim=1, keepdim=True)
        picked = values.gather(1, target) - top
        values -= top
        exps = values.exp() if entropy else values.exp_()
        total = exps.sum(dim=1)
        log_total = total.log()
        result[0] = picked.squeeze(1) - log_total
        result[1] = log_total + top.squeeze(1)
        if entropy:
            result[2] = log_total - exps.mul_(values).sum(dim=1) / total


def _differentiate(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    results: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
) -> None:
    """Turns a chunk's `logits` [chunk, V] into the gradient by them, in place.

    With p = softmax(z): d logprob / dz = onehot - p, d entropy / dz = -p (log p + entropy).
    """
    block = block_tokens(logits, results.dtype)
    for start in range(0, len(logits), block):
        span = slice(start, start + block)
        part, by_target = logits[span], by_logprob[span, None]
        log_probs = _scaled(part, temperature, results.dtype).sub_(results[1, span, None])
        if by_entropy is None:
            grads = log_probs.exp_().mul_(-by_target)
        else:
            probs = log_probs.exp()
            slope = log_probs.add_(results[2, span, None]).mul_(by_entropy[span, None]).add_(by_target)
            grads = probs.mul_(slope).neg_()
        grads.scatter_add_(1, targets[span], by_target)
        torch.div(grads, temperature, out=part)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Returns logits / temperature in `dtype`; in place where the dtype is that already."""
    return logits.div_(temperature) if logits.dtype == dtype else logits.to(dtype).div_(temperature)


def _spread(values: Tensor, rows: Tensor, tokens: int) -> Tensor:
    return values.new_zeros(tokens).index_copy_(0, rows, values)
