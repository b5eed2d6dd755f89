import pytest
import torch
from torch import Tensor

from trainer.kernels.rms_norm import rms_norm, rms_norm_reference


def _inputs(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, weight and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator, dtype=torch.float64).to(dtype) + 0.5
    return x, weight, grad


def _with_gradients(function, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, 1e-5)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("shape", [(5,), (1, 1), (3, 7, 16), (2, 5, 3, 33)])
def test_result_and_gradients_equal_the_reference(shape):
    expected = _with_gradients(rms_norm_reference, *_inputs(*shape))
    actual = _with_gradients(rms_norm, *_inputs(*shape))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences():
    x, weight, _ = _inputs(4, 6)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), inputs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_in_the_dtypes_of_training_it_equals_the_float64_reference(dtype, tolerance):
    x, weight, grad = _inputs(64, 256, dtype=dtype)
    expected = _with_gradients(rms_norm_reference, x.double(), weight.double(), grad.double())
    actual = _with_gradients(rms_norm, x, weight, grad)
    assert {value.dtype for value in actual} == {dtype}
    for value, wanted in zip(actual, expected, strict=True):
        assert (value.double() - wanted).norm() <= tolerance * wanted.norm()


def test_a_float32_weight_is_used_in_the_dtype_of_x_and_its_gradient_is_not_rounded_to_it():
    x, _, grad = _inputs(512, 8, dtype=torch.bfloat16)
    weight = torch.linspace(0.5, 1.5, 8) + 1e-4  # no bfloat16 numbers
    y, _, grad_weight = _with_gradients(rms_norm, x, weight, grad)
    assert torch.equal(y, rms_norm(x, weight.bfloat16(), 1e-5))
    expected = (grad.double() * rms_norm_reference(x.double(), torch.ones(8).double(), 1e-5)).sum(0)
    torch.testing.assert_close(grad_weight.double(), expected, rtol=1e-4, atol=1e-4)


def test_strides_of_the_input_and_of_the_gradient_do_not_matter():
    x, weight, grad = _inputs(2, 6, 4, 16)
    expected = _with_gradients(rms_norm, x, weight, grad)
    turned, turned_grad = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, grad))
    assert not turned.is_contiguous()
    torch.testing.assert_close(_with_gradients(rms_norm, turned, weight, turned_grad), expected, rtol=1e-12, atol=1e-12)


def test_a_row_of_zeros_is_zero_and_its_gradient_finite():
    x, weight, grad = _inputs(3, 8, dtype=torch.float32)
    x[1] = 0.0
    y, grad_x, grad_weight = _with_gradients(rms_norm, x, weight, grad)
    assert torch.equal(y[1], torch.zeros(8))
    torch.testing.assert_close(grad_x[1], grad[1] * weight * 1e-5**-0.5)
    assert grad_weight.isfinite().all()


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_gradients_that_are_wanted_are_computed(wanted):
    x, weight, grad = _inputs(3, 8)
    _, grad_x, grad_weight = _with_gradients(rms_norm, x, weight, grad)
    (x if wanted == "x" else weight).requires_grad_()
    rms_norm(x, weight, 1e-5).backward(grad)
    found, expected, other = (x.grad, grad_x, weight.grad) if wanted == "x" else (weight.grad, grad_weight, x.grad)
    assert found is not None and torch.equal(found, expected) and other is None


@pytest.mark.parametrize("function, of_its_size", [(rms_norm, 1), (rms_norm_reference, 2)])
def test_backward_keeps_the_input_once_and_one_number_per_row(function, of_its_size):
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    x, weight, _ = (t.requires_grad_() for t in _inputs(32, 16, dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = function(x, weight, 1e-5)
    assert y.requires_grad
    assert sorted(kept.values()) == [16, 32, *[32 * 16] * of_its_size]
