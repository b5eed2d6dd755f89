"""The native decoder: Llama, Qwen2 and Qwen3 in one class, read from a DecoderSpec."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.core.rng import torch_generator
from trainer.kernels.attention import AttentionShape, plan_attention
from trainer.models.base import CausalLM, Head
from trainer.models.layers import Block, Linear, RMSNorm
from trainer.models.rope import Rotary
from trainer.models.spec import DecoderSpec


class _Backbone(nn.Module):
    """Embedding, blocks and final norm: the modules that transformers keeps under `model.`"""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.rotary_emb = Rotary(spec)


class Decoder(CausalLM):
    """A Llama, Qwen2 or Qwen3 language model.

    Args:
        spec: sizes and features.
        compute_dtype: dtype of activations and of the weights at use.
        attention: `model.attention`.
        static_attention: build attention without Python numbers that change with the batch (torch.compile).
        rows_added: rows of `spec.vocab_size` that the model's files do not have.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        compute_dtype: torch.dtype = torch.float32,
        attention: Literal["auto", "sdpa", "varlen"] = "auto",
        static_attention: bool = False,
        rows_added: int = 0,
    ):
        super().__init__()
        self.spec = spec
        self.compute_dtype = compute_dtype
        self.tied = spec.tied
        self.vocab_size = spec.vocab_size
        self.rows_added = rows_added
        self.random_forward = False
        self.attention: Literal["auto", "sdpa", "varlen"] = attention
        self.static_attention = static_attention
        self.model = _Backbone(spec)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.tie_weights()

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    @property
    def output(self) -> nn.Linear:
        return self.lm_head

    @property
    def context_tokens(self) -> int | None:
        return self.spec.max_positions

    def reset_buffers(self) -> None:
        self.model.rotary_emb.reset()

    def initializer(self, seed: int) -> Callable[[str], Tensor]:
        """Biases 0, norms 1, matrices normal with the config's `initializer_range`."""

        def value(name: str) -> Tensor:
            shape = self.get_parameter(name).shape
            if name.endswith(".bias"):
                return torch.zeros(shape)
            if len(shape) == 1:
                return torch.ones(shape)
            return torch.empty(shape).normal_(0.0, self.spec.init_std, generator=torch_generator(seed, "init", name))

        return value

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        backbone, dtype = self.model, self.compute_dtype
        shape = AttentionShape(self.spec.num_heads, self.spec.head_dim, dtype)
        plans = {
            window: plan_attention(
                document_ids, shape, window=window, choice=self.attention, static=self.static_attention
            )
            for window in dict.fromkeys(self.spec.windows)
        }
        cos, sin = backbone.rotary_emb(position_ids, document_ids, dtype)
        x = F.embedding(input_ids, backbone.embed_tokens.weight).to(dtype)
        for block, window in zip(backbone.layers, self.spec.windows, strict=True):
            x = block(x, cos, sin, plans[window])
        x = backbone.norm(x)
        weight = self.lm_head.weight.to(dtype)
        return F.linear(x, weight) if head is None else head(x, weight)
