import pytest
import torch
from torch import Tensor

from support.memory import largest_allocation
from trainer.kernels.linear_cross_entropy import IGNORED
from trainer.kernels.linear_logprobs import linear_logprobs, linear_logprobs_reference


def _inputs(
    tokens: int = 37, hidden: int = 8, vocab: int = 50, ignored: float = 0.4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), targets


def _fast(x: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int | None = None):
    return linear_logprobs(x, weight, targets, temperature=temperature, entropy=True, chunk_tokens=chunk_tokens)


def _slow(x: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int | None = None):
    return linear_logprobs_reference(x, weight, targets, temperature=temperature)


def _with_gradients(function, x: Tensor, weight: Tensor, targets: Tensor, *options) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of a sum in which every one has another weight."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logprobs, entropy = function(x, weight, targets, *options)
    scales = torch.linspace(-1, 2, len(targets), dtype=logprobs.dtype)
    (logprobs * scales + entropy * scales.flip(0)).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000, None])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_full_logits_for_every_chunk_size(chunk_tokens, ignored, temperature):
    inputs = _inputs(ignored=ignored)
    expected = _with_gradients(_slow, *inputs, temperature)
    actual = _with_gradients(_fast, *inputs, temperature, chunk_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_values_equal_log_softmax():
    x, weight, targets = _inputs(ignored=0.0, dtype=torch.float32)
    logprobs, none = linear_logprobs(x, weight, targets, temperature=0.6, entropy=False)
    expected = ((x @ weight.T) / 0.6).log_softmax(dim=1)[torch.arange(len(targets)), targets]
    assert none is None and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_hand_worked_distribution():
    """Logits ln 3 and 0 at temperature 1: probabilities 3/4 and 1/4."""
    weight = torch.tensor([[1.0986122886681098], [0.0]], dtype=torch.float64)
    x = torch.ones(2, 1, dtype=torch.float64)
    logprobs, entropy = _fast(x, weight, torch.tensor([0, 1]), 1.0)
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy is not None and entropy.tolist() == pytest.approx([0.5623351446188083] * 2)
    half, _ = _fast(x, weight, torch.tensor([0, 1]), 0.5)  # ln 9 and 0
    assert half.exp().tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradients_equal_finite_differences(chunk_tokens):
    x, weight, targets = _inputs(tokens=6, hidden=3, vocab=5)
    assert torch.autograd.gradcheck(lambda a, b: _fast(a, b, targets, 0.7, chunk_tokens), (x, weight))
    assert torch.autograd.gradcheck(
        lambda a, b: linear_logprobs(a, b, targets, temperature=0.7, entropy=False, chunk_tokens=2)[0], (x, weight)
    )


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_alone_has_its_own_gradient(used):
    x, weight, targets = _inputs()
    fast = torch.autograd.grad(_fast(x, weight, targets, 0.8, 8)[used].sum(), (x, weight))
    slow = torch.autograd.grad(_slow(x, weight, targets, 0.8)[used].sum(), (x, weight))
    torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)


def test_ignored_rows_contribute_nothing_whatever_they_hold():
    x, weight, targets = _inputs()
    poisoned = x.detach().clone()
    poisoned[targets == IGNORED] = float("nan")
    found = _with_gradients(_fast, poisoned, weight, targets, 0.6)
    clean = _with_gradients(_fast, x, weight, targets, 0.6)
    torch.testing.assert_close(found, clean, rtol=0, atol=0)
    logprobs, entropy, grad_x, _ = found
    for values in (logprobs, entropy, grad_x.abs().sum(dim=1)):
        assert (values[targets == IGNORED] == 0).all() and (values[targets != IGNORED] != 0).all()


def test_nothing_to_predict_gives_zero_and_zero_gradients():
    x, weight, targets = _inputs()
    found = _with_gradients(_fast, x, weight, torch.full_like(targets, IGNORED), 0.6)
    assert all((values == 0).all() for values in found)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_that_are_needed(frozen):
    x, weight, targets = _inputs()
    expected = torch.autograd.grad(_slow(x, weight, targets, 0.6)[0].sum(), (x, weight))
    {"hidden": x, "weight": weight}[frozen].requires_grad_(False)
    _fast(x, weight, targets, 0.6)[0].sum().backward()
    left, gone = (weight, x) if frozen == "hidden" else (x, weight)
    assert gone.grad is None
    torch.testing.assert_close(left.grad, expected[1 if frozen == "hidden" else 0])


def test_without_grad_the_values_are_the_same_bits_and_hold_no_graph():
    x, weight, targets = _inputs(dtype=torch.float32)
    with_graph, _ = _fast(x, weight, targets, 0.6, 4)
    with torch.no_grad():
        logprobs, entropy = linear_logprobs(x, weight, targets, temperature=0.6, entropy=False, chunk_tokens=4)
    assert logprobs.grad_fn is None and entropy is None
    assert with_graph.grad_fn is not None and torch.equal(logprobs, with_graph)


def test_large_logits_stay_finite():
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    x = torch.tensor([[300.0], [90.0]], requires_grad=True)
    logprobs, entropy = _fast(x, weight, torch.tensor([1, 0]), 1.0)
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert logprobs.tolist() == [-600.0, 0.0]  # softmax itself underflows to 0 here
    assert x.grad is not None and x.grad.isfinite().all() and entropy.isfinite().all()


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_bfloat16_rounds_the_products_only(chunk_tokens):
    x, weight, targets = _inputs(tokens=64, hidden=16, vocab=9000, ignored=0.1, dtype=torch.bfloat16)
    found = _with_gradients(_fast, x, weight, targets, 0.6, chunk_tokens)
    full = (x @ weight.T).float() / 0.6  # the rounding of an engine that samples in bfloat16
    kept = targets != IGNORED
    expected = full.log_softmax(dim=1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)[kept]
    torch.testing.assert_close(found[0][kept], expected.detach(), rtol=1e-5, atol=1e-5)
    exact = _with_gradients(_slow, x.double(), weight.double(), targets, 0.6)
    assert found[0].dtype == found[1].dtype == torch.float32 and found[2].dtype == found[3].dtype == torch.bfloat16
    for actual, wanted in zip(found[2:], exact[2:], strict=True):
        assert (actual - wanted).norm() / wanted.norm() < 2e-2


def test_the_weight_gradient_is_accumulated_in_float32():
    # 512 equal contributions of a bfloat16 number: a bfloat16 sum stops growing at 256 times the addend.
    x = torch.ones(512, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    _fast(x, weight, torch.zeros(512, dtype=torch.long), 1.0, 1)[0].sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[256.0], [-256.0]]


def test_full_logits_are_never_allocated():
    tokens, vocab, chunk = 512, 4096, 32
    x, weight, targets = _inputs(tokens, 4, vocab, 0.1, torch.float32)

    def run():
        logprobs, entropy = _fast(x, weight, targets, 0.6, chunk)
        (logprobs + entropy).sum().backward()

    assert largest_allocation(run) == chunk * vocab
