"""oneDNN's products: tested on every CPU that has oneDNN, also where MKL is the faster one and is used."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.kernels import products
from trainer.kernels.linear_cross_entropy import (
    default_chunk_tokens,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from trainer.kernels.linear_logprobs import linear_logprobs, linear_logprobs_reference
from trainer.kernels.products import linear, multiply, padded_rows, uses_onednn
from trainer.models.layers import Linear
from trainer.models.parallelize import _keep_products

ROWS, IN, OUT = 512, 256, 520


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the products of these tests large ones, with any number of threads."""
    monkeypatch.setattr(products, "LEAST_WORK", 2**26 // torch.get_num_threads())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Lets oneDNN multiply, and collects the shapes of its results."""
    operator = products.OPERATORS[0]
    found = []

    def counted(*args):
        result = operator(*args)
        found.append(tuple(result.shape))
        return result

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "OPERATORS", (counted,))
    return found


def _inputs(*shape: int, out: int = OUT) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((*shape, IN), (out, IN), (out,)))
    return x, weight, bias


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    result = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, wanted, torch.ones_like(result) / 7)]


def _close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(ROWS,), (4, ROWS // 4), (2, 2, ROWS // 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_result_and_gradients_are_those_of_torch(shape, with_bias, calls):
    x, weight, bias = _inputs(*shape)
    inputs = (x, weight, bias) if with_bias else (x, weight)
    _close(_with_gradients(linear, *inputs), _with_gradients(F.linear, *inputs))
    assert calls == [(*shape, OUT), (ROWS, IN)]
    with torch.no_grad():
        torch.testing.assert_close(linear(*inputs), F.linear(*inputs), rtol=1e-5, atol=1e-3)


def test_the_same_inputs_give_the_same_bits(calls):
    first, again = (_with_gradients(linear, *_inputs(ROWS)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and len(calls) == 4


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_wants_no_gradient_gets_none(frozen, calls):
    inputs = [t.requires_grad_(index != frozen) for index, t in enumerate(_inputs(ROWS))]
    linear(*inputs).sum().backward()
    assert [t.grad is None for t in inputs] == [index == frozen for index in range(3)]
    assert len(calls) == (1 if frozen == 0 else 2)


def test_strides_do_not_matter(calls):
    x, weight, bias = _inputs(ROWS)
    turned = (x.t().contiguous().t(), weight.t().contiguous().t(), bias)
    _close(_with_gradients(linear, *turned), _with_gradients(F.linear, x, weight, bias))
    assert len(calls) == 2


def test_small_products_odd_lengths_and_other_dtypes_stay_with_torch(calls):
    x, weight, _ = _inputs(ROWS)
    for rows, columns, dtype in ((64, 64, torch.float32), (ROWS - 1, OUT, torch.float32), (ROWS, OUT, torch.float64)):
        given = (x[:rows].to(dtype), weight[:columns].to(dtype))
        assert torch.equal(linear(*given), F.linear(*given))
    assert torch.equal(linear(x.bfloat16(), weight.bfloat16()), F.linear(x.bfloat16(), weight.bfloat16()))
    assert calls == []
    assert uses_onednn(x, weight) and not uses_onednn(x[:0], weight)


@pytest.mark.parametrize(
    ("name", "has_avx512", "expected"),
    [
        ("AMD EPYC", True, True),
        ("AMD EPYC", False, False),
        ("Intel(R) Xeon(R) Processor", True, False),
        ("", True, False),
    ],
)
def test_onednn_multiplies_on_amd_with_avx512_only(name, has_avx512, expected, monkeypatch: pytest.MonkeyPatch):
    found = {"avx512_f": has_avx512, "cpu_name": name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert products.onednn_is_faster.__wrapped__() == expected  # behind its cache


def test_more_threads_want_larger_products(calls, monkeypatch: pytest.MonkeyPatch):
    x, weight, _ = _inputs(ROWS)
    monkeypatch.setattr(products, "LEAST_WORK", 2**26)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert uses_onednn(x, weight) == (threads == 1)


def test_multiply_takes_the_buffer_only_from_torch(calls, monkeypatch: pytest.MonkeyPatch):
    x, weight, _ = _inputs(ROWS)
    buffer = torch.zeros(ROWS + 1, OUT)
    own = multiply(x, weight, buffer)
    assert not buffer.any() and len(calls) == 1
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    there = multiply(x, weight, buffer)
    assert there.data_ptr() == buffer.data_ptr() and len(calls) == 1
    torch.testing.assert_close(there, own, rtol=1e-5, atol=1e-3)


def test_rows_are_filled_up_only_where_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch):
    large, small = torch.empty(2**14, 64), torch.empty(16, 16)
    for faster in (True, False):
        monkeypatch.setattr(products, "onednn_is_faster", lambda faster=faster: faster)
        assert padded_rows(65, large) == (128 if faster else 65)
        assert padded_rows(65, small) == 65
        assert padded_rows(65, small.bfloat16()) == 128
        assert padded_rows(128, large) == 128


@pytest.mark.parametrize("tokens", [ROWS, ROWS - 30])
def test_the_loss_is_that_of_full_logits(tokens, calls):
    vocab = 2000
    x, weight, _ = _inputs(tokens, out=vocab)
    labels = torch.arange(tokens) % vocab
    labels[5] = -100
    loss = partial(linear_cross_entropy, chunk_tokens=256)
    _close(
        _with_gradients(lambda x, w: loss(x, w / 16, labels), x, weight),
        _with_gradients(lambda x, w: linear_cross_entropy_reference(x, w / 16, labels), x, weight),
    )
    assert calls == [(256, vocab), (256, IN)] * 2  # the last rows are filled up


def test_log_probabilities_are_those_of_full_logits(calls):
    vocab = 2000
    x, weight, _ = _inputs(ROWS - 30, out=vocab)
    targets = torch.arange(ROWS - 30) % vocab
    targets[5] = -100

    def ours(x: Tensor, w: Tensor) -> Tensor:
        found = linear_logprobs(x, w / 16, targets, temperature=0.9, entropy=True, chunk_tokens=256)
        return torch.stack([t for t in found if t is not None])

    def full(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack(linear_logprobs_reference(x, w / 16, targets, temperature=0.9))

    _close(_with_gradients(ours, x, weight), _with_gradients(full, x, weight))
    assert calls == [(256, vocab)] * 2 + [(256, vocab), (256, IN)] * 2


def test_the_logits_of_one_chunk_at_a_time(calls, monkeypatch: pytest.MonkeyPatch):
    vocab, operator, made, alive = 8192, products.OPERATORS[0], [], []

    def watched(x: Tensor, weight: Tensor, *rest) -> Tensor:
        if len(weight) == vocab:
            alive.append(sum(logits() is not None for logits in made))
        result = operator(x, weight, *rest)
        if len(weight) == vocab:
            made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(products, "OPERATORS", (watched,))
    x, weight, _ = _inputs(3 * 448, out=vocab)
    assert default_chunk_tokens(weight) == 448
    x.requires_grad_()
    linear_cross_entropy(x, weight, torch.arange(len(x))).backward()
    linear_logprobs(x, weight, torch.arange(len(x)), temperature=1.0, entropy=True)[0].sum().backward()
    assert alive == [0] * 9 and calls.count((448, vocab)) == 9


class _Products(TorchDispatchMode):
    """Counts the products that really run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func == products.OPERATORS[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("selective", "expected"), [(True, 2), (False, 3)])
def test_selective_recomputation_keeps_the_products(selective, expected, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    layer = Linear(IN, OUT, bias=False)
    nn.init.normal_(layer.weight)
    x = _inputs(ROWS)[0].requires_grad_()
    options: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)} if selective else {}
    )
    with _Products() as ran:
        result = checkpoint(lambda x: torch.sin(layer(x)), x, use_reentrant=False, **options)
        assert isinstance(result, Tensor)
        result.sum().backward()
    assert ran.count == expected  # forward, its repetition, the gradient of x
