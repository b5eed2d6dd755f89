"""A model's weights as generation reads them: those in training themselves, or one plain copy that is filled anew."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.models.decoder import Decoder
from trainer.models.hf_model import HFModel
from trainer.models.layers import Block

Affine = tuple[Tensor, Tensor | None]
"""(weight [out, in], bias [out] or None)"""


@dataclass
class LayerWeights:
    """One block's weights in the compute dtype. `qkv` and `gate_up` have one entry where they are fused, else 3 and 2."""

    input_norm: Tensor
    qkv: list[Affine]
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Affine
    post_norm: Tensor
    gate_up: list[Affine]
    down: Affine


@dataclass
class DecoderWeights:
    """All weights of a `Decoder`.

    Attributes:
        embedding: [vocab, d].
        norm: [d], the final norm's.
        head: [vocab, d]; the same tensor as `embedding` where they are tied.
        targets: parameter name -> where its value goes; empty where the weights are the parameters themselves.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    targets: dict[str, Tensor] = field(default_factory=dict)


def is_plain(model: nn.Module) -> bool:
    """Whether this process has every parameter whole and may read it at any time."""
    return not any(isinstance(module, FSDPModule) for module in model.modules()) and not any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


@torch.no_grad()
def copy_whole(model: nn.Module, targets: dict[str, Tensor]) -> None:
    """Copies every parameter, whole, to where `targets` says, and buffers that are there too. Collective over sharded
    parameters, one at a time."""
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in targets]
    for name, tensor in [*model.named_parameters(), *buffers]:
        value, target = tensor.detach(), targets[name]
        if isinstance(value, DTensor):
            rounded = value.to(target.dtype)  # before it is sent: half the bytes in bfloat16
            value = cast(DTensor, rounded).full_tensor()
        target.copy_(value)


def shared_weights(model: Decoder) -> DecoderWeights:
    """Returns the model's own parameters, which must be plain and have the compute dtype."""
    layers = []
    for block in cast(Iterable[Block], model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        layers.append(
            LayerWeights(
                input_norm=block.input_layernorm.weight,
                qkv=[_affine(attention.q_proj), _affine(attention.k_proj), _affine(attention.v_proj)],
                q_norm=attention.q_norm.weight if attention.qk_norm else None,
                k_norm=attention.k_norm.weight if attention.qk_norm else None,
                out=_affine(attention.o_proj),
                post_norm=block.post_attention_layernorm.weight,
                gate_up=[_affine(mlp.gate_proj), _affine(mlp.up_proj)],
                down=_affine(mlp.down_proj),
            )
        )
    return DecoderWeights(model.embedding.weight, layers, model.model.norm.weight, model.output.weight)


def packed_weights(model: Decoder, device: torch.device) -> DecoderWeights:
    """Returns memory for all weights in the compute dtype, q, k, v in one matrix and gate and up in one.

    Fewer and larger products: at the batch sizes of decoding they are bound by reading the weights and by their number.
    """
    packer = _Packer(model, device)
    embedding = packer.take("model.embed_tokens.weight")
    layers = [packer.layer(f"model.layers.{number}") for number in range(model.spec.num_layers)]
    norm = packer.take("model.norm.weight")
    head = embedding if model.tied else packer.take("lm_head.weight", turned=True)
    return DecoderWeights(embedding, layers, norm, head, packer.targets)


class _Packer:
    def __init__(self, model: Decoder, device: torch.device):
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._dtype, self._device = model.compute_dtype, device
        self.targets: dict[str, Tensor] = {}

    def layer(self, prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        has_qk_norm = f"{attention}.q_norm.weight" in self._shapes
        return LayerWeights(
            input_norm=self.take(f"{prefix}.input_layernorm.weight"),
            qkv=[self._affine([f"{attention}.{name}_proj" for name in "qkv"])],
            q_norm=self.take(f"{attention}.q_norm.weight") if has_qk_norm else None,
            k_norm=self.take(f"{attention}.k_norm.weight") if has_qk_norm else None,
            out=self._affine([f"{attention}.o_proj"]),
            post_norm=self.take(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=[self._affine([f"{mlp}.gate_proj", f"{mlp}.up_proj"])],
            down=self._affine([f"{mlp}.down_proj"]),
        )

    def take(self, *names: str, turned: bool = False) -> Tensor:
        """Returns memory for the named parameters one above the other, and enters their places as targets.

        turned: on CPU, the memory of the transposed matrix.
        """
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        if turned and self._device.type == "cpu":  # the layout that products with few rows are faster with
            shape = shape[::-1]
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        if turned and self._device.type == "cpu":
            whole = whole.t()
        self.targets |= dict(zip(names, whole.split(rows), strict=True))
        return whole

    def _affine(self, modules: list[str]) -> Affine:
        weight = self.take(*(f"{module}.weight" for module in modules), turned=True)
        biases = [f"{module}.bias" for module in modules]
        return weight, self.take(*biases) if biases[0] in self._shapes else None


def _affine(module: nn.Linear) -> Affine:
    return module.weight, module.bias


def hf_copy(model: HFModel) -> HFModel:
    """Returns an empty model like `model`, plain, for evaluation, with parameters in the compute dtype."""
    copy = HFModel(model.model_dir, model.compute_dtype, model.vocab_size)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(model.compute_dtype)
    copy.to_empty(device=next(model.parameters()).device)
    copy.tie_weights()
    return copy.requires_grad_(False).eval()
