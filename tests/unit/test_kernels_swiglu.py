from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from trainer.kernels.swiglu import swiglu, swiglu_reference
from trainer.models import layers
from trainer.models.spec import DecoderSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gate, up and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(shape, generator=generator).mul_(3).to(dtype) for _ in range(3))
    return gate, up, grad


def _with_gradients(function, gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (gate, up)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 300, 129), (0, 8)])
def test_result_and_gradients_have_the_bits_of_the_reference(shape, dtype):
    inputs = _inputs(*shape, dtype=dtype)
    expected = _with_gradients(swiglu_reference, *inputs)
    actual = _with_gradients(swiglu, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(swiglu(*inputs[:2]), expected[0])


def test_gradients_are_those_of_finite_differences():
    gate, up, _ = _inputs(4, 6)
    assert torch.autograd.gradcheck(swiglu, (gate.requires_grad_(), up.requires_grad_()))


def test_strides_do_not_matter_and_inputs_stay_as_they_were():
    inputs = _inputs(6, 16, dtype=torch.float32)
    expected = _with_gradients(swiglu_reference, *inputs)
    turned = [x.t().contiguous().t() for x in inputs]
    actual = _with_gradients(swiglu, *turned)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(turned, inputs, strict=True))


@pytest.mark.parametrize("wanted", [0, 1])
def test_an_input_without_gradient_gets_none(wanted):
    gate, up, grad = _inputs(3, 8)
    expected = _with_gradients(swiglu, gate, up, grad)[1 + wanted]
    leaves = [gate, up]
    leaves[wanted].requires_grad_()
    swiglu(*leaves).backward(grad)
    found = leaves[wanted].grad
    assert found is not None and torch.equal(found, expected)
    assert leaves[1 - wanted].grad is None


def _kept(run: Callable[[], Tensor]) -> list[int]:
    """Returns the number of elements of each tensor that the result's graph keeps."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert run().requires_grad
    return [tensor.numel() for tensor in kept.values()]


@pytest.mark.parametrize("function, tensors", [(swiglu, 2), (swiglu_reference, 3)])
def test_backward_keeps_the_inputs_and_nothing_else(function, tensors):
    gate, up, _ = (x.requires_grad_() for x in _inputs(32, 16, dtype=torch.float32))
    assert _kept(lambda: function(gate, up)) == [32 * 16] * tensors


@pytest.mark.parametrize("function, tensors", [(swiglu, 3), (swiglu_reference, 4)])
def test_an_mlp_keeps_three_tensors_of_its_intermediate_size(monkeypatch, function, tensors):
    monkeypatch.setattr(layers, "swiglu", function)
    spec = cast(DecoderSpec, SimpleNamespace(hidden_size=8, intermediate_size=24, mlp_bias=False))
    mlp, x = layers.MLP(spec), torch.ones(5, 8)
    assert _kept(lambda: mlp(x)).count(5 * 24) == tensors
