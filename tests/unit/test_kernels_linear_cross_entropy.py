import pytest
import torch
from torch import Tensor

import trainer.kernels.linear_cross_entropy as kernel
from support.memory import largest_allocation
from trainer.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy, linear_cross_entropy_reference


def _inputs(
    tokens: int = 37, hidden: int = 8, vocab: int = 50, ignored: float = 0.4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), labels


def _with_gradients(function, x: Tensor, weight: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = function(x, weight, labels, **options)
    (loss / 7).backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 37, 1000, None])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_loss_and_gradients_equal_the_full_logits_for_every_chunk_size(chunk_tokens, ignored):
    inputs = _inputs(ignored=ignored)
    expected = _with_gradients(linear_cross_entropy_reference, *inputs)
    actual = _with_gradients(linear_cross_entropy, *inputs, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gradients_equal_finite_differences():
    x, weight, labels = _inputs(tokens=6, hidden=3, vocab=5)
    loss = linear_cross_entropy(x, weight, labels, chunk_tokens=2)
    loss.backward()
    for tensor in (x, weight):
        assert tensor.grad is not None
        numeric = torch.zeros_like(tensor)
        with torch.no_grad():
            for index in range(tensor.numel()):
                flat = tensor.view(-1)
                saved, ends = flat[index].item(), []
                for shift in (1e-6, -1e-6):
                    flat[index] = saved + shift
                    ends.append(linear_cross_entropy(x, weight, labels).item())
                flat[index] = saved
                numeric.view(-1)[index] = (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(tensor.grad, numeric, rtol=1e-6, atol=1e-7)


def test_ignored_rows_contribute_nothing_whatever_they_hold():
    x, weight, labels = _inputs()
    poisoned = x.detach().clone()
    poisoned[labels == IGNORED] = float("nan")
    loss, grad_x, grad_weight = _with_gradients(linear_cross_entropy, poisoned, weight, labels)
    clean = _with_gradients(linear_cross_entropy, x, weight, labels)
    torch.testing.assert_close((loss, grad_x, grad_weight), clean, rtol=0, atol=0)
    assert (grad_x[labels == IGNORED] == 0).all() and (grad_x[labels != IGNORED] != 0).any(dim=1).all()


def test_nothing_supervised_gives_zero_and_zero_gradients():
    x, weight, labels = _inputs()
    loss, grad_x, grad_weight = _with_gradients(linear_cross_entropy, x, weight, torch.full_like(labels, IGNORED))
    assert loss == 0 and (grad_x == 0).all() and (grad_weight == 0).all()


def test_large_logits_and_improbable_labels_stay_exact():
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    x = torch.tensor([[300.0], [90.0]], requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == 600.0  # softmax itself underflows to 0 here
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_improbable_labels_among_others(dtype):
    """Some losses are beyond what a probability can tell; they stand in different chunks, between ordinary rows."""
    x, weight, labels = _inputs(tokens=33, dtype=dtype)
    with torch.no_grad():
        x[::5] *= 400
    exact = _with_gradients(linear_cross_entropy_reference, x.double(), weight.double(), labels)
    found = _with_gradients(linear_cross_entropy, x, weight, labels, chunk_tokens=4)
    assert exact[0] > 5000
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() / other.norm() < tolerance


def test_a_loss_that_is_not_finite_stays_so():
    x, weight, labels = _inputs(dtype=torch.float32)
    with torch.no_grad():
        x[3] = float("nan")
    labels[3] = 1
    assert linear_cross_entropy(x, weight, labels).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 1000, 8192, 70001])
def test_torchs_softmax_works_in_place(vocab, dtype):
    """Nothing promises it, and the loss on CPU relies on it."""
    logits = 5 * torch.randn(9, vocab, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(logits, 1)
    assert torch.equal(torch.softmax(logits, 1, out=logits), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_passes_of_a_gpu_say_the_same(dtype, monkeypatch):
    """They need no value on the host, which the CPU's softmax does for improbable labels."""
    x, weight, labels = _inputs(tokens=33, vocab=9000, dtype=dtype)
    with torch.no_grad():
        x[::5] *= 400
    on_cpu = _with_gradients(linear_cross_entropy, x, weight, labels, chunk_tokens=8)
    monkeypatch.setattr(
        kernel, "_softmax_loss", lambda *given, again, **options: kernel._loss_in_passes(*given, **options)
    )
    in_passes = _with_gradients(linear_cross_entropy, x, weight, labels, chunk_tokens=8)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(in_passes, on_cpu, strict=True):
        assert (one - other).norm() / other.norm() < tolerance


def test_small_losses_beside_large_logits_are_not_lost():
    """A text that the model knows by heart: with e^-14 as the others' share, the rounding of 40 is larger than the loss."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[40.0], [26.0]])
    exact = linear_cross_entropy_reference(hidden.double(), weight.double(), torch.tensor([0]))
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    torch.testing.assert_close(loss.double(), exact, rtol=0.1, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_that_are_needed(frozen):
    x, weight, labels = _inputs()
    expected = _with_gradients(linear_cross_entropy, x, weight, labels)
    {"hidden": x, "weight": weight}[frozen].requires_grad_(False)
    (linear_cross_entropy(x, weight, labels) / 7).backward()
    if frozen == "hidden":
        assert x.grad is None
        torch.testing.assert_close(weight.grad, expected[2])
    else:
        assert weight.grad is None
        torch.testing.assert_close(x.grad, expected[1])


def test_without_grad_the_loss_is_the_same_and_holds_no_graph():
    x, weight, labels = _inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels, chunk_tokens=4)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, linear_cross_entropy_reference(x, weight, labels).detach())


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_bfloat16_rounds_the_products_only(chunk_tokens):
    x, weight, labels = _inputs(tokens=64, hidden=16, vocab=9000, ignored=0.1, dtype=torch.bfloat16)
    loss, grad_x, grad_weight = _with_gradients(linear_cross_entropy, x, weight, labels, chunk_tokens=chunk_tokens)
    exact = _with_gradients(linear_cross_entropy_reference, x.double(), weight.double(), labels)
    assert loss.dtype == torch.float32 and grad_x.dtype == grad_weight.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-3, atol=0)
    for found, wanted in ((grad_x, exact[1]), (grad_weight, exact[2])):
        assert (found - wanted).norm() / wanted.norm() < 1e-2


def test_the_weight_gradient_is_accumulated_in_float32():
    # 512 equal contributions of a bfloat16 number: a bfloat16 sum stops growing at 256 times the addend.
    x = torch.ones(512, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(512, dtype=torch.long), chunk_tokens=1).backward()
    assert weight.grad is not None and weight.grad.tolist() == [[-256.0], [256.0]]


def test_float32_is_repeatable_bit_for_bit():
    inputs = _inputs(dtype=torch.float32)
    first = _with_gradients(linear_cross_entropy, *inputs, chunk_tokens=8)
    second = _with_gradients(linear_cross_entropy, *inputs, chunk_tokens=8)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_backward_is_an_error_not_a_wrong_gradient():
    x, weight, labels = _inputs()
    loss = linear_cross_entropy(x, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was already run"):
        loss.backward()


def test_full_logits_are_never_allocated():
    tokens, vocab, chunk = 512, 4096, 32
    x, weight, labels = _inputs(tokens, 4, vocab, 0.0, torch.float32)

    def run():
        linear_cross_entropy(x, weight, labels, chunk_tokens=chunk).backward()

    assert largest_allocation(run) == chunk * vocab
