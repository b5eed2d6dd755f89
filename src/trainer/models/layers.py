"""The parts of a decoder block. Module and parameter names are those of transformers.

Weights are float32 masters (or arrive in the compute dtype from FSDP); every use casts them to the dtype of the
activations, which is a no-op when they agree.
"""

import torch
from torch import Tensor, nn

from trainer.kernels.attention import AttentionPlan
from trainer.kernels.products import linear
from trainer.kernels.rms_norm import rms_norm
from trainer.kernels.rotary import rotate
from trainer.kernels.swiglu import swiglu
from trainer.models.spec import DecoderSpec


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias if self.bias is None else self.bias.to(input.dtype)
        return linear(input, self.weight.to(input.dtype), bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; `plan` says which tokens see each other."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, queries, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, keys, bias=spec.qkv_bias)
        self.o_proj = Linear(queries, spec.hidden_size, bias=spec.output_bias)
        self.qk_norm = spec.qk_norm
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        """Returns [rows, T, hidden] for x of that shape; cos, sin: [rows, T, 1, head_dim]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(plan(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, plan)
        return x + self.mlp(self.post_attention_layernorm(x))
