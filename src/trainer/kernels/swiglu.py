"""silu(gate) * up (Shazeer, 2020, https://arxiv.org/abs/2002.05202) that keeps its inputs only.

Written with torch's operators it keeps silu(gate) as well: a quarter of what an MLP keeps for its backward.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_BYTES = 2**19
"""On CPU the passes go over this much of each tensor at a time: they then hit the cache, not memory."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up. Result and gradients have the bits of `swiglu_reference`.

    Args:
        gate, up: the same shape, dtype and device.
    """
    if torch.compiler.is_compiling():  # a compiler fuses operators by itself
        return swiglu_reference(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return _forward(gate, up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the same, operator by operator."""
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        for part_gate, part_up, part_grad, to_gate, to_up in _blocks(gate, up, grad, grad_gate, grad_up):
            torch.ops.aten.silu.out(part_gate, out=to_up).mul_(part_grad)
            torch.ops.aten.silu_backward.grad_input(part_grad * part_up, part_gate, grad_input=to_gate)
        return grad_gate, grad_up


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    result = gate.new_empty(gate.shape)
    for part_gate, part_up, to in _blocks(gate, up, result):
        torch.ops.aten.silu.out(part_gate, out=to).mul_(part_up)
    return result


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Returns the tensors in pieces, on CPU of `_BLOCK_BYTES` a thread. What is written to must be contiguous."""
    first = tensors[0]
    size = max(1, first.numel())
    if first.device.type == "cpu":
        size = torch.get_num_threads() * _BLOCK_BYTES // first.element_size()
    return zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)
