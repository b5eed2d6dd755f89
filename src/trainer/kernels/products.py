"""Products of activations and a weight, in float32 on CPU by either of the two libraries that torch carries.

torch multiplies float32 matrices by MKL, and has oneDNN for other dtypes. On AMD's processors with AVX-512, oneDNN takes less
time for large float32 products, too (`python -m benchmarks products`). It compiles each new shape, and writes its result into
a tensor of its own.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_WORK = 2**27
"""Multiplications of a product, for each thread, from where on oneDNN pays; small products take longer with it."""
SHAPE_ROWS = 64
"""oneDNN compiles each new shape, so it gets a multiple of this many rows: packed rows, and chunks that were filled up to it
(`padded_rows`), but not every length that padded batches come in."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias.

    Args:
        x: [..., D].
        weight: [V, D], same dtype and device.
        bias: [V].

    Returns:
        [..., V]. Where oneDNN multiplies, result and gradients differ from `F.linear`'s by rounding.
    """
    if not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T, [M, V], without a graph: in the first rows of `buffer`, or new if that is None or oneDNN multiplies.

    Args:
        x: [M, D].
        weight: [V, D], of any strides.
        buffer: at least M rows of V.
    """
    if uses_onednn(x, weight):
        return _onednn(x, weight)
    return torch.mm(x, weight.t(), out=None if buffer is None else buffer[: len(x)])


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies x [..., D] by weight [V, D]."""
    if torch.compiler.is_compiling():  # a compiler chooses by itself
        return False
    rows = x.numel() // max(1, x.shape[-1])
    return x.dtype == weight.dtype and rows % SHAPE_ROWS == 0 and _is_large(rows, weight) and prefers_onednn(weight)


def prefers_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by weights of this dtype and device, if the product is large."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and onednn_is_faster()


def _is_large(rows: int, weight: Tensor) -> bool:
    return rows * weight.numel() >= LEAST_WORK * torch.get_num_threads()


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN is the faster library for float32 here: an AMD processor with AVX-512."""
    processor = torch.cpu.get_capabilities()
    return (
        bool(OPERATORS)
        and bool(processor.get("avx512_f"))
        and str(processor.get("cpu_name", "")).startswith("AMD")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
    )


def padded_rows(rows: int, weight: Tensor) -> int:
    """Returns how many rows a product with `weight` is given: more where oneDNN multiplies, which compiles each new shape. On CPU
    it has all products in half precision."""
    filled = -(-rows // SHAPE_ROWS) * SHAPE_ROWS
    is_half = weight.device.type == "cpu" and weight.dtype.itemsize == 2
    return filled if is_half or (_is_large(filled, weight) and prefers_onednn(weight)) else rows


def _operators() -> tuple[Any, ...]:
    # What torch's compiler calls, too; it has no public name.
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return () if operator is None else (operator.default,)


OPERATORS = _operators()
"""What multiplies here besides the operators that torch chooses by itself."""


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return OPERATORS[0](x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = multiply(rows, weight.t()).view(x.shape) if need_x else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None
        return grad_x, grad_weight, rows.sum(0) if need_bias else None
