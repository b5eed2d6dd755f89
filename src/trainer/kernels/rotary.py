"""The rotation of rotary position embedding, in place on one new tensor."""

import torch
from torch import Tensor

_VECTOR_BYTES = 64
"""Of a CPU's vector register. The halves of a head are turned apart, and loops over less than a vector run one by one."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with pair (i, i + head_dim / 2) turned by its angle (the Hugging Face layout of Su et al., 2021,
    https://arxiv.org/abs/2104.09864). Result and gradient have the bits of `rotate_reference`.

    Args:
        x: [..., heads, head_dim].
        cos, sin: [..., 1, head_dim] in x's dtype, without gradients; both halves of the last dimension are equal.
    """
    is_short = x.shape[-1] // 2 * x.element_size() < _VECTOR_BYTES
    if is_short or torch.compiler.is_compiling():  # a compiler fuses operators by itself
        return rotate_reference(x, cos, sin)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos, sin)
    return _turned(x, cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the same, operator by operator."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, back=True), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Returns x turned by the angles, or by their negatives."""
    y = x * cos
    (x1, x2), (y1, y2) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    if back:
        x1, x2, y1, y2 = x2, x1, y2, y1
    half_sin = sin.chunk(2, dim=-1)[0]
    y1.sub_(x2 * half_sin)
    y2.add_(x1 * half_sin)
    return y
