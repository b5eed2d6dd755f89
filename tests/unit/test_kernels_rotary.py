import pytest
import torch
from torch import Tensor

from trainer.kernels.rotary import rotate, rotate_reference


def _inputs(head_dim: int, dtype: torch.dtype, heads: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, cos, sin and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 5, heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    angles = torch.rand(2, 5, 1, head_dim // 2, generator=generator) * 6.3
    angles = torch.cat((angles, angles), dim=-1)
    return x, angles.cos().to(dtype), angles.sin().to(dtype), grad


def _with_gradient(function, x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x, cos, sin)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_dim", [2, 16, 32, 128])
def test_result_and_gradient_have_the_bits_of_the_reference(head_dim, dtype):
    inputs = _inputs(head_dim, dtype)
    expected = _with_gradient(rotate_reference, *inputs)
    actual = _with_gradient(rotate, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(rotate(*inputs[:3]), expected[0])


def test_a_pair_turns_by_its_angle_and_back():
    x, cos, sin, _ = _inputs(64, torch.float64)
    y = rotate(x, cos, sin)
    pairs = torch.complex(x[..., :32], x[..., 32:]) * torch.complex(cos, sin)[..., :32]
    torch.testing.assert_close(y, torch.cat((pairs.real, pairs.imag), dim=-1), rtol=1e-12, atol=1e-12)
    back, _ = _with_gradient(rotate, y, cos, -sin, torch.zeros_like(y))
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)


def test_the_input_is_left_as_it_was_and_strides_do_not_matter():
    x, cos, sin, grad = _inputs(32, torch.float32)
    expected = _with_gradient(rotate, x.clone(), cos, sin, grad)
    kept, turned = x.clone(), x.transpose(1, 2).contiguous().transpose(1, 2)
    actual = _with_gradient(rotate, turned, cos, sin, grad.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(turned, kept)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_backward_keeps_nothing_of_x():
    x, cos, sin, _ = _inputs(32, torch.float32)
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rotate(x.requires_grad_(), cos, sin)
    assert kept == {cos.data_ptr(), sin.data_ptr()}
