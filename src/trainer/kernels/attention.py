"""Attention over packed rows: one place decides how, once per micro-batch.

Tokens attend causally within their own document. `plan_attention` looks at the document ids and returns a callable
that every layer uses, so masks and lengths are never rebuilt inside the model:

    CausalPlan      every row is one document (padding behind it): no mask at all
    DocumentsPlan   one small causal call per document: work falls from T^2 to the sum of the documents' squares
    MaskPlan        one call with a block mask: for rows so short that the calls would cost more than they save,
                    for sliding windows, and under torch.compile (the lengths would be compiled in)
    VarlenPlan      flash attention over cumulative lengths, on GPUs in 16-bit dtypes
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ModelError

_PAIRS_PER_CALL = 2**17
"""A separate call per document pays when it saves this many query-key pairs x heads x head_dim (about 60 us of a core,
the cost of the call's forward and backward)."""

_WIDE_CALL = 2**14
"""On CPU a call over at most this many tokens x head_dim runs in float32 even where the model does not: in 16 bits forward
and backward take 1.1 to 3.5 times as long there, and no longer at twice as many (`python -m benchmarks attention`)."""


class AttentionPlan(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns [rows, T, heads, head_dim] for q of that shape and k, v of [rows, T, kv_heads, head_dim]."""
        ...


@dataclass(frozen=True)
class AttentionShape:
    """What a plan needs to know about the layer, besides the batch."""

    heads: int
    head_dim: int
    dtype: torch.dtype


def plan_attention(
    document_ids: Tensor,
    shape: AttentionShape,
    *,
    window: int | None = None,
    choice: Literal["auto", "sdpa", "varlen"] = "auto",
    static: bool = False,
) -> AttentionPlan:
    """Returns the attention of one micro-batch.

    Args:
        document_ids: [rows, T] integer; ascending within a row, -1 = padding behind the last document.
        shape: heads, head dimension and dtype of the queries.
        window: a token sees itself and the `window - 1` positions before it; None = all before it.
        choice: `model.attention`.
        static: the plan must not depend on the documents' lengths in Python (torch.compile).

    Raises:
        ModelError: "varlen" was asked for where it cannot run.
    """
    if _use_varlen(document_ids, shape, choice):
        return _varlen_plan(document_ids, window)
    starts, lengths, padding = _segments(document_ids)
    rows, row_tokens = document_ids.shape
    documents = [length for length, pad in zip(lengths, padding, strict=True) if not pad]
    if window is not None and max(documents, default=0) <= window:
        window = None
    if window is None and all(pad or start % row_tokens == 0 for start, pad in zip(starts, padding, strict=True)):
        return CausalPlan()
    if window is None and not static and document_ids.device.type == "cpu":
        pairs = rows * row_tokens**2 - sum(length**2 for length in documents) // 2
        if pairs * shape.heads * shape.head_dim > _PAIRS_PER_CALL * len(lengths):
            return DocumentsPlan(tuple(lengths), tuple(padding))
    dtype = call_dtype(document_ids.device, shape.dtype, row_tokens, shape.head_dim)
    return MaskPlan(_additive_mask(document_ids, window, dtype))


@dataclass(frozen=True)
class CausalPlan:
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k, v, is_causal=True)


@dataclass(frozen=True)
class MaskPlan:
    mask: Tensor
    """[rows, 1, T, T], added to the scores: 0 or -inf, in the dtype of the call."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k, v, attn_mask=self.mask)


@dataclass(frozen=True)
class DocumentsPlan:
    lengths: tuple[int, ...]
    """Tokens of each segment (document or padding), over all rows in order."""
    padding: tuple[bool, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # split and cat, because their backward is one copy; slicing would add up a full-size gradient per document.
        parts = zip(*(x.flatten(0, 1).split(self.lengths) for x in (q, k, v)), self.padding, strict=True)
        outputs = [
            torch.zeros_like(qi) if pad else _sdpa(qi[None], ki[None], vi[None], is_causal=True)[0]
            for qi, ki, vi, pad in parts
        ]
        return torch.cat(outputs).view(q.shape)


@dataclass(frozen=True)
class VarlenPlan:
    boundaries: Tensor
    """[segments + 1] int32: where each document (or padding) starts in the flattened tokens, and their end."""
    longest: int
    """Upper bound of a segment's length, in tokens."""
    window: int | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            self.boundaries,
            self.boundaries,
            self.longest,
            self.longest,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=q.shape[2] != k.shape[2],
        )
        assert isinstance(output, Tensor)
        return output.view(q.shape)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, window: int | None = None) -> Tensor:
    """Returns the same as any plan, from explicit scores: [rows, T, heads, head_dim]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~_visible(document_ids, window)[:, None], float("-inf"))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), v)


def call_dtype(device: torch.device, dtype: torch.dtype, tokens: int, head_dim: int) -> torch.dtype:
    """Returns the dtype that attention over rows of `tokens` runs in; its inputs and its result have the dtype `dtype`."""
    is_wide = device.type == "cpu" and dtype.itemsize == 2 and tokens * head_dim <= _WIDE_CALL
    return torch.float32 if is_wide else dtype


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    dtype = call_dtype(q.device, q.dtype, q.shape[1], q.shape[3])
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2).to(dtype),
        k.transpose(1, 2).to(dtype),
        v.transpose(1, 2).to(dtype),
        attn_mask=None if attn_mask is None else attn_mask.to(dtype),  # FSDP casts what blocks are given
        is_causal=is_causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return output.transpose(1, 2).to(q.dtype)


def _use_varlen(document_ids: Tensor, shape: AttentionShape, choice: str) -> bool:
    if choice == "sdpa":
        return False
    possible = document_ids.is_cuda and shape.dtype in (torch.bfloat16, torch.float16)
    if choice == "varlen" and not possible:
        raise ModelError(
            f'model.attention = "varlen" needs a GPU and 16-bit compute (found {document_ids.device.type}, '
            f'{shape.dtype}); set model.attention = "auto" or model.dtype = "bfloat16"'
        )
    return possible


def _varlen_plan(document_ids: Tensor, window: int | None) -> VarlenPlan:
    rows, row_tokens = document_ids.shape
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    end = starts.new_full((1,), rows * row_tokens)
    return VarlenPlan(torch.cat([starts, end]).to(torch.int32), row_tokens, window)


def _segments(document_ids: Tensor) -> tuple[list[int], list[int], list[bool]]:
    """Returns each segment's first token, its length in tokens and whether it is padding, over all rows in order."""
    flat = document_ids.flatten().cpu().numpy()  # numpy: these few operations run once per micro-batch
    begins = np.empty(flat.size, dtype=bool)
    np.not_equal(flat[1:], flat[:-1], out=begins[1:])
    begins[:: document_ids.shape[1]] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=flat.size)
    return starts.tolist(), lengths.tolist(), (flat[starts] < 0).tolist()


def _visible(document_ids: Tensor, window: int | None) -> Tensor:
    """Returns [rows, T, T] bool: True where a query (dim 1) sees a key (dim 2). A token always sees itself."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    distance = position[:, None] - position[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & (document_ids[:, :, None] == document_ids[:, None, :])


def _additive_mask(document_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    # Additive, since a bool mask is turned into this by every call. Padding forms a document of its own: no row of the
    # mask is all -inf, so nothing becomes NaN.
    visible = _visible(document_ids, window)[:, None]
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
