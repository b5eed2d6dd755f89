"""RMS norm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467) that keeps one number per row for its backward.

Written with torch's operators, the norm keeps two tensors of its input's size; here only the input itself.
"""

import torch
from torch import Tensor

from trainer.kernels.linear_cross_entropy import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension.

    The division runs in float32 (float64 for float64 inputs), the product with `weight` in x's dtype, as transformers rounds.

    Args:
        x: [..., D], any floating dtype.
        weight: [D], any floating dtype; used in x's.

    Returns:
        [..., D] in x's dtype. The gradient of `weight` is summed in float32, and returned in its dtype.
    """
    if torch.compiler.is_compiling():  # the compiler fuses operators by itself
        return rms_norm_reference(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)
    return _forward(x, weight, eps)[0]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the same, operator by operator."""
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        wide_x, wide_weight, wide_grad = (t.to(scale.dtype) for t in (x, weight, grad))
        products = (wide_grad * wide_x).reshape(-1, x.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # With s = 1 / rms(x):  grad_x = s * (grad * weight) - x * s^3 * mean(grad * weight * x)
            along_x = (products @ wide_weight).view(scale.shape).div_(x.shape[-1]).mul_(scale.pow(3))
            grad_x = (wide_grad * wide_weight).mul_(scale).addcmul_(wide_x, along_x, value=-1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (scale.view(-1) @ products).to(weight.dtype)
        return grad_x, grad_weight, None


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the result and 1 / rms(x), [..., 1]."""
    wide = x.to(accumulation_dtype(x.dtype))
    square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight.to(x.dtype)), scale
