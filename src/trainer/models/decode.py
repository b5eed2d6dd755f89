"""One token at a time: what a rollout engine needs of a model, for the native decoder and for any other.

A `Decoding` serves a fixed number of slots. Each holds one text; `prefill` reads its beginning, `copy` hands that on to
other slots, and every `step` reads one more token of the first slots and returns the logits that follow it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ModelError
from trainer.kernels.attention import AttentionShape, plan_attention
from trainer.kernels.rms_norm import rms_norm
from trainer.kernels.rotary import rotate
from trainer.kernels.swiglu import swiglu
from trainer.models.base import CausalLM
from trainer.models.decoder import Decoder
from trainer.models.hf_model import HFModel
from trainer.models.served import (
    Affine,
    DecoderWeights,
    LayerWeights,
    copy_whole,
    hf_copy,
    is_plain,
    packed_weights,
    shared_weights,
)

PREFILL_TOKENS = 8192
"""Prompts are read together up to this many tokens, padding included."""
PACK_BYTES = 2**28
"""Weights up to this size are copied into fused matrices even where those in training could be read: that is faster for
small models, and for large ones memory matters more."""
Integers = npt.NDArray[np.int64]


class Decoding(Protocol):
    """All calls run under `torch.no_grad` or `torch.inference_mode`, chosen by the implementation."""

    context_tokens: int | None
    """Longest text that the model can read; None = no limit is known."""

    def begin(self, slots: int, tokens: int) -> None:
        """Makes room for `slots` texts of up to `tokens` tokens; what was there before is gone."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Reads each of `prompts` (none is empty) from its beginning into its slot."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Gives slot `target` the first `tokens` tokens of slot `source`."""
        ...

    def step(self, ids: Integers, positions: Integers) -> Tensor:
        """Reads ids[i] at positions[i] of slot i, and returns the logits behind it: [len(ids), vocab] float32."""
        ...

    def forget(self) -> None:
        """Frees what `begin` made room for."""
        ...


def open_decoding(
    model: CausalLM, *, snapshot: bool = False, pack_bytes: int = PACK_BYTES
) -> tuple[Decoding, Callable[[], None]]:
    """Returns the decoding of `model`, and a function that makes it serve the present weights (it does not before).

    That function is collective over sharded parameters. Decoding itself is not, whatever the model's layout: where the
    parameters cannot be read as they are, there is a whole copy in the compute dtype on this rank's device.

    Args:
        snapshot: serve the weights of the last refresh even if training changes them meanwhile.
        pack_bytes: weights up to this size are copied in any case.
    """
    shares = is_plain(model) and not snapshot
    if isinstance(model, HFModel):
        if shares:
            return RereadDecoding(model), lambda: None
        copy = hf_copy(model)
        targets = dict(copy.named_parameters()) | dict(copy.named_buffers())
        return RereadDecoding(copy), lambda: copy_whole(model, targets)
    if not isinstance(model, Decoder):
        raise ModelError(
            f"{type(model).__name__} cannot generate in this process; expected a native or a transformers model"
        )
    dtype, parameters = model.compute_dtype, list(model.parameters())
    fits = all(parameter.dtype == dtype for parameter in parameters)
    if shares and fits and sum(parameter.numel() for parameter in parameters) * dtype.itemsize > pack_bytes:
        return CachedDecoding(model, shared_weights(model)), lambda: None
    weights = packed_weights(model, parameters[0].device)
    return CachedDecoding(model, weights), lambda: copy_whole(model, weights.targets)


class CachedDecoding(Decoding):
    """The native decoder over keys and values of what was read before.

    The layers are written out over `DecoderWeights` rather than taken from the modules: those may be sharded, compiled or
    recomputed, and with a single token per text every operation that is saved counts.
    """

    def __init__(self, model: Decoder, weights: DecoderWeights):
        """`weights`: read anew in every call, so their values may change in place in between."""
        self.context_tokens = model.spec.max_positions
        self._spec, self._rotary = model.spec, model.model.rotary_emb
        self._choice: Literal["auto", "sdpa", "varlen"] = model.attention
        self._weights = weights
        self._device, self._dtype = weights.embedding.device, model.compute_dtype
        # On CPU three products beat the fused kernel three times over, if keys lie with a head's positions side by side.
        self._by_products = self._device.type == "cpu" and self._dtype == torch.float32
        self._shape: tuple[int, ...] = ()
        self._storage = self._cache = self._keys = self._values = torch.empty(0)
        self._key_places = self._value_places = self._positions = self._cos = self._sin = torch.empty(0)

    @torch.inference_mode()
    def begin(self, slots: int, tokens: int) -> None:
        spec = self._spec
        tokens = -(-tokens // 16) * 16
        layers, heads, dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
        if self._shape == (slots, tokens):
            return
        size = 2 * layers * slots * heads * tokens * dim
        if self._storage.numel() < size:
            self.forget()  # freed before the larger one is asked for
            # Zeros: what is masked is multiplied by 0, and must be finite for that.
            self._storage = torch.zeros(size, dtype=self._dtype, device=self._device)
        # The shape follows from this call alone, and so do its bits, whatever was generated earlier.
        self._shape = slots, tokens
        self._cache = self._storage[:size].view(layers, 2, slots * heads * tokens * dim)
        keys, self._values = (self._cache[:, i].view(layers, slots, heads, tokens, dim) for i in range(2))
        if self._by_products:
            self._keys = keys.view(layers, slots, heads, dim, tokens)
        else:
            self._keys = keys.transpose(-1, -2)
        # Where position 0 of each head lies: elements of keys [slots, heads, dim], and rows of values [slots, heads].
        elements = torch.arange(slots * heads * tokens * dim, device=self._device)
        self._key_places = elements.as_strided(self._keys.shape[1:-1], self._keys.stride()[1:-1]).contiguous()
        self._value_places = elements[: slots * heads].view(slots, heads) * tokens
        self._positions = torch.arange(tokens, device=self._device)
        cos, sin = self._rotary(self._positions[None], None, self._dtype)
        self._cos, self._sin = cos[0], sin[0]

    def forget(self) -> None:
        """Frees the cache, and with it values that may not be finite."""
        self._shape = ()
        self._storage = self._cache = self._keys = self._values = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        while order:
            longest = len(prompts[order[-1]])
            rows = [order.pop()]
            # Together with those of a similar length: little padding, and one call of everything.
            while order and (len(rows) + 1) * longest <= PREFILL_TOKENS and 2 * len(prompts[order[-1]]) >= longest:
                rows.append(order.pop())
            self._read([prompts[i] for i in rows], [slots[i] for i in rows])

    def _read(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        spec, tokens = self._spec, len(prompts[0])
        rows = len(prompts)
        ids, documents = np.zeros((rows, tokens), np.int64), np.full((rows, tokens), -1, np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], documents[row, : len(prompt)] = prompt, 0
        document_ids = torch.from_numpy(documents).to(self._device)
        shape = AttentionShape(spec.num_heads, spec.head_dim, self._dtype)
        plans = {
            window: plan_attention(document_ids, shape, window=window, choice=self._choice)
            for window in dict.fromkeys(spec.windows)
        }
        cos, sin = (table[:tokens].repeat(rows, 1, 1) for table in (self._cos, self._sin))
        x = F.embedding(torch.from_numpy(ids).to(self._device).view(-1), self._weights.embedding).to(self._dtype)
        place = torch.tensor(slots, device=self._device)
        for number, (layer, window) in enumerate(zip(self._weights.layers, spec.windows, strict=True)):
            q, k, v = (part.unflatten(0, (rows, tokens)) for part in self._project(layer, x, cos, sin))
            self._keys[number][place, :, :, :tokens] = k.permute(0, 2, 3, 1)
            self._values[number][place, :, :tokens] = v.transpose(1, 2)
            if number < spec.num_layers - 1:  # nothing is asked of the last layer's output
                self._finish(layer, x, plans[window](q, k, v).reshape(rows * tokens, -1))

    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        self._keys[:, target, :, :, :tokens] = self._keys[:, source, :, :, :tokens]
        self._values[:, target, :, :tokens] = self._values[:, source, :, :tokens]

    @torch.inference_mode()
    def step(self, ids: Integers, positions: Integers) -> Tensor:
        spec, rows = self._spec, len(ids)
        longest = int(positions.max()) + 1
        if self._device.type != "cpu":
            longest = min(-(-longest // 64) * 64, self._shape[1])  # few shapes: kernels and memory are reused
        at = torch.from_numpy(positions).to(self._device)
        masks = {window: self._mask(at, positions, longest, window) for window in dict.fromkeys(spec.windows)}
        cos, sin = self._cos[at], self._sin[at]
        stride = self._keys.stride(-1)
        key_places = (self._key_places[:rows] + (at * stride)[:, None, None]).view(-1)
        value_places = (self._value_places[:rows] + at[:, None]).view(-1)
        x = F.embedding(torch.from_numpy(ids).to(self._device), self._weights.embedding).to(self._dtype)
        for number, (layer, window) in enumerate(zip(self._weights.layers, spec.windows, strict=True)):
            q, k, v = self._project(layer, x, cos, sin)
            keys, values = self._cache[number]
            keys.index_copy_(0, key_places, k.reshape(-1))
            values.view(-1, spec.head_dim).index_copy_(0, value_places, v.reshape(-1, spec.head_dim))
            keys, values = self._keys[number, :rows, :, :, :longest], self._values[number, :rows, :, :longest]
            self._finish(layer, x, self._attend(q, keys, values, masks[window]))
        x = _rms_norm(x, self._weights.norm, spec.norm_eps)
        return F.linear(x, self._weights.head).float()

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Returns [rows, heads * head_dim] for q [rows, heads, head_dim], keys [rows, kv_heads, head_dim, T] and values
        [rows, kv_heads, T, head_dim]."""
        rows, kv_heads, tokens, dim = values.shape
        # Queries that share a key head stand where other callers have a text's positions: nothing is repeated.
        q = q.reshape(rows, kv_heads, -1, dim)
        if not self._by_products:
            y = F.scaled_dot_product_attention(q, keys.transpose(-1, -2), values, attn_mask=mask)
            return y.reshape(rows, -1)
        scores = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1)).mul_(dim**-0.5)
        if mask is not None:
            scores.view(rows, kv_heads, -1, tokens).add_(mask)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, -1)

    def _mask(self, at: Tensor, positions: Integers, longest: int, window: int | None) -> Tensor | None:
        """Returns [rows, 1, 1, longest], added to the scores; None where every text sees all of it."""
        if longest == positions.min() + 1 and (window is None or longest <= window):
            return None
        distance = at[:, None] - self._positions[:longest]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated q [N, heads, head_dim], rotated k and v [N, kv_heads, head_dim] for x [N, d]."""
        spec = self._spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = _linear(_rms_norm(x, layer.input_norm, spec.norm_eps), layer.qkv).view(len(x), -1, spec.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            q, k = _rms_norm(q, layer.q_norm, spec.norm_eps), _rms_norm(k, layer.k_norm, spec.norm_eps)
            qk = torch.cat((q, k), dim=1)
        q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
        return q, k, v

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> None:
        """Adds the block's two outputs to x [N, d], in place."""
        _add_linear(x, attended, layer.out)
        hidden = _linear(_rms_norm(x, layer.post_norm, self._spec.norm_eps), layer.gate_up)
        gate, up = hidden.chunk(2, dim=-1)
        _add_linear(x, swiglu(gate, up), layer.down)


def _linear(x: Tensor, parts: list[Affine]) -> Tensor:
    outputs = [F.linear(x, weight, bias) for weight, bias in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _add_linear(x: Tensor, input: Tensor, affine: Affine) -> None:
    weight, bias = affine
    x.addmm_(input, weight.t())
    if bias is not None:
        x.add_(bias)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:  # in 16 bits it would round otherwise than the model
        return F.rms_norm(x, weight.shape, weight, eps)
    return rms_norm(x, weight, eps)


class RereadDecoding(Decoding):
    """Any causal language model, each text read again from its beginning for every token: slow, and right for all.

    What a model of transformers keeps between tokens is its own affair (keys, recurrent states, windows); this asks only
    that a token does not see those behind it.
    """

    def __init__(self, model: HFModel):
        """`model`: plain; its weights are read anew in every call."""
        self._model = model
        self.context_tokens = model.context_tokens
        self._texts = np.zeros((0, 0), np.int64)

    def begin(self, slots: int, tokens: int) -> None:
        self._texts = np.zeros((slots, tokens), np.int64)

    def forget(self) -> None:
        pass

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        for prompt, slot in zip(prompts, slots, strict=True):
            self._texts[slot, : len(prompt)] = prompt

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._texts[target, :tokens] = self._texts[source, :tokens]

    @torch.no_grad()  # not inference_mode: a model may keep a tensor that training reads later
    def step(self, ids: Integers, positions: Integers) -> Tensor:
        rows = np.arange(len(ids))
        self._texts[rows, positions] = ids
        device = self._model.embedding.weight.device
        texts = torch.from_numpy(self._texts[: len(ids), : int(positions.max()) + 1]).to(device)
        at = torch.from_numpy(positions).to(device)

        def last(hidden: Tensor, weight: Tensor) -> Tensor:
            return F.linear(hidden[torch.arange(len(at), device=device), at], weight).float()

        with _evaluation(self._model):
            return self._model(texts, head=last)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
