"""Drawing tokens from logits, each from a uniform number that its address alone decides."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.rl.types import Sampling

_BLOCK = 64  # tokens
_BELOW_ONE = 1.0 - 2.0**-53


def uniforms(seed: int, count: int) -> npt.NDArray[np.float64]:
    """Returns the first `count` numbers in [0, 1) that belong to a request's seed: float64 [count].

    From a counter-based generator (Philox: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405), so number j is
    the same whatever the count.
    """
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count)


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the drawn tokens, int64 [rows], and their log-probabilities, float32 [rows].

    A token is drawn by inverting the cumulative distribution, so it depends on its row alone. The log-probability is that
    of the whole vocabulary at the sampling temperature (at 1 for greedy decoding).

    Args:
        logits: [rows, vocab] float32.
        uniform: [rows] float64 in [0, 1), on the logits' device.
    """
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    if sampling.temperature and not sampling.top_k and sampling.top_p == 1:
        return _draw_from_all(logits, uniform)
    logprobs = logits.log_softmax(-1)
    if sampling.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:
        ids = _draw_from_top(logprobs, sampling, uniform[:, None])
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def _draw_from_all(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw` from the whole vocabulary. One pass makes the weights, a second sums them by blocks; the running sum is
    only ever taken over the blocks and within a single one."""
    rows, vocab = logits.shape
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)
    own = sums.gather(-1, block)
    # What is left of the uniform number within the block; by its own sum, so that rounding cannot lead past its end.
    rest = ((target - (cumulative.gather(-1, block) - own)) / own).clamp_(0.0, _BELOW_ONE)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    ids = (block * _BLOCK + _invert(inside, rest)).clamp_(max=vocab - 1)
    logprobs = (logits.gather(-1, ids) - largest).double() - total.log()
    return ids.squeeze(-1), logprobs.float().squeeze(-1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns where the running sum of `weights` [rows, n] first exceeds uniform [rows, 1] of the total: [rows, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return place.clamp_(max=weights.shape[-1] - 1)


def _draw_from_top(logprobs: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[:, : sampling.top_k], ids[:, : sampling.top_k]
    weights = ordered.exp()
    if sampling.top_p < 1:  # of what top_k leaves; the first token always stays
        share = weights.double() / weights.sum(-1, keepdim=True, dtype=torch.float64)
        weights = weights.masked_fill(share.cumsum(-1) - share >= sampling.top_p, 0.0)
    return ids.gather(-1, _invert(weights, uniform))
