"""Token cross-entropy of `hidden @ weight.T` that never holds the [tokens, vocab] logits.

The tokens are walked in chunks. While a chunk's logits are at hand, its gradients are computed too (the loss is a sum,
so they do not depend on what follows); backward only scales them.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.kernels.products import SHAPE_ROWS, multiply, padded_rows, prefers_onednn

IGNORED = -100
"""Label of a token that is not supervised (torch's default `ignore_index`)."""

_CHUNK_BYTES = 28 * 2**20
"""Under 32 MiB, from where on glibc maps an allocation anew each time and the kernel zeroes its pages. Half of it where every
chunk's logits are such an allocation."""
_MIN_CHUNK_TOKENS = 256
"""Each chunk reads `weight` twice and updates its gradient once; below this many tokens that traffic costs more time
than the matrix products (measured at V = 131072, D = 512: 0.83 of the full loss's time at 64 tokens, 0.7 at 256)."""
_CACHE_BYTES = 2**20
"""On CPU several passes over a chunk take this much at a time for each thread: they then hit the cache, not memory."""
_TILE_ROWS = 8192
"""Rows of the weight gradient computed at once where its products are not in the accumulation dtype."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
    """Returns the sum over supervised tokens of the cross-entropy of `hidden @ weight.T` against `labels`.

    Matrix products run in the inputs' dtype; softmax, loss and the weight gradient's accumulation in float32 (float64
    for float64 inputs). Rows whose label is -100 cost nothing: they are left out before the first product. Without any
    supervised row the loss is 0 and so are the gradients.

    Args:
        hidden: [N, D], float32, bfloat16 or float64.
        weight: [V, D], same dtype and device as `hidden`.
        labels: [N] int64 in [0, V), or -100.
        chunk_tokens: tokens whose logits are held at once; by default `default_chunk_tokens`.
            It changes the result by rounding only.

    Returns:
        scalar, float32 (float64 for float64 inputs). Its graph can be run backward once.
    """
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(weight)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens)
    with torch.no_grad():
        return _walk(hidden, weight, labels, chunk_tokens, need_hidden=False, need_weight=False)[0]


def default_chunk_tokens(weight: Tensor) -> int:
    """Returns how many tokens' logits are held at once: as many as give a 28 MiB buffer in float32 (14 MiB where no buffer is
    reused), at least 256."""
    held = _CHUNK_BYTES // 2 if prefers_onednn(weight) else _CHUNK_BYTES
    return max(_MIN_CHUNK_TOKENS, held // (4 * weight.shape[0]) // SHAPE_ROWS * SHAPE_ROWS)


def logits_buffer(rows: int, weight: Tensor) -> Tensor | None:
    """Returns room for the logits of `rows` rows that every chunk reuses; None where each chunk has its own (`multiply`)."""
    return None if prefers_onednn(weight) else weight.new_empty((rows, weight.shape[0]))


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns the same sum, from the full logits."""
    logits = F.linear(hidden, weight).to(accumulation_dtype(hidden.dtype))
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        loss, *ctx.grads = _walk(hidden, weight, labels, chunk_tokens, need_hidden=need_hidden, need_weight=need_weight)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor):
        if ctx.grads is None:
            raise RuntimeError("linear_cross_entropy: backward was already run once and its gradients were handed over")
        # Scaled in place and given away: a copy of the [V, D] gradient would double the peak.
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_loss)
        return (*grads, None, None)


def _walk(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, *, need_hidden: bool, need_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss and, where needed, the gradients of the sum by `hidden` and `weight`."""
    dtype = accumulation_dtype(hidden.dtype)
    loss = torch.zeros((), dtype=dtype, device=hidden.device)
    rows = (labels != IGNORED).nonzero().squeeze(1)
    tokens = rows.numel()
    if tokens == 0:
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        return loss, grad_hidden, torch.zeros_like(weight) if need_weight else None

    all_supervised = tokens == labels.numel()
    inputs, targets = (hidden, labels) if all_supervised else (gather_rows(hidden, rows, weight), labels[rows])
    grad_inputs = torch.empty_like(inputs) if need_hidden else None
    grad_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device) if need_weight else None
    buffer = logits_buffer(min(chunk_tokens, len(inputs)), weight)
    for start in range(0, tokens, chunk_tokens):
        stop = min(start + chunk_tokens, len(inputs))
        logits = multiply(inputs[start:stop], weight, buffer)
        target = targets[start:stop, None]
        again = partial(_logits_of, inputs[start : start + len(target)], weight)
        loss += _softmax_loss(logits[: len(target)], target, dtype, need_grad=need_hidden or need_weight, again=again)
        if grad_inputs is not None:
            grad_inputs[start:stop] = multiply(logits, weight.t())
        if grad_weight is not None:
            accumulate_weight_gradient(grad_weight, logits, inputs[start:stop], first=start == 0)
        del logits  # before the next ones are made

    if grad_inputs is not None and not all_supervised:
        grad_inputs = torch.zeros_like(hidden).index_copy_(0, rows, grad_inputs[:tokens])
    return loss, grad_inputs, None if grad_weight is None else grad_weight.to(weight.dtype)


def _logits_of(inputs: Tensor, weight: Tensor, which: Tensor) -> Tensor:
    return torch.mm(inputs[which], weight.t())


def _softmax_loss(
    logits: Tensor, targets: Tensor, dtype: torch.dtype, *, need_grad: bool, again: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the chunk's loss and turns `logits` [chunk, V] into their gradient, softmax - onehot, in place.

    `again` computes the logits of some of the rows (a mask [chunk]) once more.
    """
    if logits.device.type != "cpu":
        return _loss_in_passes(logits, targets, dtype, need_grad=need_grad)
    probabilities = _loss_gradient(logits, targets, dtype, need_grad=need_grad)
    losses = probabilities.log().neg_()
    is_far = probabilities.squeeze(1) < torch.finfo(dtype).tiny  # too small a number to tell how small: 0, or nearly
    if is_far.any():
        losses[is_far] = F.cross_entropy(again(is_far).to(dtype), targets[is_far, 0], reduction="none")[:, None]
    return losses.sum()


def _loss_gradient(logits: Tensor, targets: Tensor, dtype: torch.dtype, *, need_grad: bool) -> Tensor:
    """Returns the targets' probabilities [chunk, 1] and turns `logits` into the gradient, by torch's softmax on CPU: it goes
    over a row while that is in the cache, and reads it before it writes it, so it works in place."""
    if logits.dtype == dtype:
        return _probabilities(logits, targets, need_grad=need_grad)
    block = block_tokens(logits, dtype)
    wide = logits.new_empty((min(block, len(logits)), logits.shape[1]), dtype=dtype)
    found = []
    for part, target in zip(logits.split(block), targets.split(block), strict=True):
        values = wide[: len(part)].copy_(part)
        found.append(_probabilities(values, target, need_grad=need_grad))
        if need_grad:
            part.copy_(values)
    return torch.cat(found)


def _probabilities(logits: Tensor, targets: Tensor, *, need_grad: bool) -> Tensor:
    values = torch.softmax(logits, 1, out=logits)
    found = values.gather(1, targets)
    if need_grad:
        values.scatter_(1, targets, found - 1)
    return found


def _loss_in_passes(logits: Tensor, targets: Tensor, dtype: torch.dtype, *, need_grad: bool) -> Tensor:
    """The same without a look at a value, which would make a GPU wait."""
    values = logits.to(dtype)
    top = values.amax(dim=1, keepdim=True)
    gaps = top - values.gather(1, targets)
    exps = values.sub_(top).exp_()
    totals = exps.sum(dim=1, keepdim=True)
    if need_grad:
        exps.scatter_(1, targets, exps.gather(1, targets) - totals)
        torch.mul(exps, totals.reciprocal(), out=logits)
    # Added in this order, or small losses drown in the rounding of `top`.
    return totals.log_().add_(gaps).sum()


def gather_rows(hidden: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Returns `hidden[rows]` with rows of zeros behind them, [padded_rows(len(rows), weight), D].

    The logits of rows of zeros are zeros: left as they are, they add nothing to the gradient of the weight.
    """
    padded = padded_rows(len(rows), weight)
    if padded == len(rows):
        return hidden[rows]
    gathered = hidden.new_zeros((padded, hidden.shape[1]))
    torch.index_select(hidden, 0, rows, out=gathered[: len(rows)])
    return gathered


def block_tokens(logits: Tensor, dtype: torch.dtype) -> int:
    """Returns over how many rows of `logits` [tokens, vocab] one pass in `dtype` goes: `_CACHE_BYTES` a thread, on a GPU all."""
    tokens, vocab = logits.shape
    if logits.device.type != "cpu":
        return max(1, tokens)
    return torch.get_num_threads() * max(1, _CACHE_BYTES // (dtype.itemsize * vocab))


def accumulate_weight_gradient(grad_weight: Tensor, grad_logits: Tensor, inputs: Tensor, *, first: bool) -> None:
    """Adds grad_logits.T @ inputs ([V, D]) to `grad_weight`; `first` overwrites, so it needs no zeroing."""
    if grad_logits.dtype == grad_weight.dtype:
        if first:
            torch.mm(grad_logits.t(), inputs, out=grad_weight)
        else:
            grad_weight.addmm_(grad_logits.t(), inputs)
        return
    for start in range(0, grad_weight.shape[0], _TILE_ROWS):
        rows = slice(start, start + _TILE_ROWS)
        tile = torch.mm(grad_logits[:, rows].t(), inputs)
        if first:
            grad_weight[rows].copy_(tile)
        else:
            grad_weight[rows].add_(tile)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)
