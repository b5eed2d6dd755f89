"""Rotary position embedding: frequencies of every scaling type."""

import math

import torch
from torch import Tensor, nn

from trainer.models.spec import DecoderSpec, RopeSpec


class Rotary(nn.Module):
    """The cosines and sines of a micro-batch, computed once and shared by all layers.

    The frequencies are a function of the config, not state: a buffer outside `state_dict`, held in float32.
    """

    inv_freq: Tensor

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        inv_freq, self.scale = inverse_frequencies(spec)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def reset(self) -> None:
        """Fills the buffer again (after `to_empty`, which leaves it undefined)."""
        self.inv_freq.copy_(inverse_frequencies(self.spec)[0])

    def forward(self, position_ids: Tensor, document_ids: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [rows, T, 1, head_dim] in `dtype`, for [rows, T] integer positions."""
        positions = position_ids[..., None].float()
        if self.spec.rope.type == "dynamic":
            angles = positions * self._dynamic_frequencies(position_ids, document_ids)
        else:
            angles = positions * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)

    def _dynamic_frequencies(self, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Returns [rows, T, head_dim / 2]: the base grows with the length of the token's own document beyond the
        context length of pretraining, so what it is packed with does not matter."""
        rows, tokens = position_ids.shape
        row = torch.arange(rows, device=position_ids.device)[:, None]
        documents = torch.zeros_like(position_ids) if document_ids is None else document_ids.long() + 1
        key = (row * (tokens + 1) + documents).flatten()
        lengths = position_ids.new_zeros(rows * (tokens + 1)).scatter_reduce_(
            0, key, position_ids.flatten() + 1, "amax"
        )
        length = lengths[key].view(rows, tokens, 1).clamp(min=self.spec.max_positions)
        dim = self.spec.head_dim
        factor = self.spec.rope.factor
        base = self.spec.rope.theta * (factor * length / self.spec.max_positions - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / base ** (_pairs(dim).to(position_ids.device) / dim)


def inverse_frequencies(spec: DecoderSpec) -> tuple[Tensor, float]:
    """Returns ([head_dim / 2] float32 on CPU, the factor of cos and sin) as transformers computes them."""
    rope, dim = spec.rope, spec.head_dim
    inv_freq = 1.0 / rope.theta ** (_pairs(dim) / dim)
    if rope.type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.type == "yarn":
        return _yarn(inv_freq, rope, dim), _yarn_scale(rope)
    return inv_freq, 1.0  # "default", and "dynamic" up to the context length of pretraining


def _pairs(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")  # also under torch.device("meta")


def _llama3(inv_freq: Tensor, rope: RopeSpec) -> Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, (1 - smooth) * scaled / rope.factor + smooth * scaled, scaled)


def _yarn(inv_freq: Tensor, rope: RopeSpec, dim: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dimensions between interpolation and extrapolation."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_scale(rope: RopeSpec) -> float:
    def grown(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)
