"""silu(gate) * up (Shazeer, 2020, https://arxiv.org/abs/2002.05202) that keeps its inputs only.

Written with torch's operators it keeps silu(gate) as well: a quarter of what an MLP keeps at its intermediate size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up. Result and gradients have the bits of `swiglu_reference`.

    Args:
        gate, up: the same shape, dtype and device.
    """
    if torch.compiler.is_compiling():  # a compiler decides by itself what it keeps
        return swiglu_reference(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return F.silu(gate).mul_(up)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the same, operator by operator."""
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
