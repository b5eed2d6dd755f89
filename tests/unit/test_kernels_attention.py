import pytest
import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.kernels.attention import (
    AttentionShape,
    CausalPlan,
    DocumentsPlan,
    MaskPlan,
    attention_reference,
    call_dtype,
    plan_attention,
)

SHAPE = AttentionShape(heads=4, head_dim=8, dtype=torch.float32)
WIDE = AttentionShape(heads=64, head_dim=128, dtype=torch.float32)  # so large that a call per document always pays


def _documents(*rows: list[int], tokens: int) -> Tensor:
    ids = torch.full((len(rows), tokens), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            ids[row, start : start + length] = number
            start += length
    return ids


def _qkv(rows: int, tokens: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _run(function, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> list[Tensor]:
    """Output at real tokens and the gradients of a weighted sum of it."""
    q.grad = k.grad = v.grad = None
    output = function(q, k, v)
    assert output.isfinite().all()
    chosen = output[real]
    (chosen * torch.arange(chosen.numel()).view(chosen.shape).sin()).sum().backward()
    return [chosen.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


CASES = {
    "one document": ([[12]], 12, CausalPlan),
    "one document and padding": ([[12], [7]], 12, CausalPlan),
    "an all-padding row": ([[12], []], 12, CausalPlan),
    "packed": ([[5, 7], [3, 3, 6]], 12, DocumentsPlan),
    "packed with padding": ([[5, 4], [12], [1, 1], []], 12, DocumentsPlan),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_plan_equals_explicit_scores(case, kv_heads):
    rows, tokens, expected_plan = CASES[case]
    documents = _documents(*rows, tokens=tokens)
    real = documents >= 0
    q, k, v = _qkv(len(rows), tokens, kv_heads)
    reference = _run(lambda *x: attention_reference(*x, documents), q, k, v, real)
    chosen = plan_attention(documents, WIDE)
    assert isinstance(chosen, expected_plan)
    masked = plan_attention(documents, SHAPE, static=True)
    for plan in (chosen, masked):
        torch.testing.assert_close(_run(plan, q, k, v, real), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_sliding_window_equals_explicit_scores(window):
    documents = _documents([5, 7], [12], tokens=12)
    q, k, v = _qkv(2, 12)
    plan = plan_attention(documents, WIDE, window=window)
    assert isinstance(plan, MaskPlan)
    reference = _run(lambda *x: attention_reference(*x, documents, window), q, k, v, documents >= 0)
    torch.testing.assert_close(_run(plan, q, k, v, documents >= 0), reference, rtol=1e-4, atol=1e-5)


def test_a_window_no_document_exceeds_costs_nothing():
    assert plan_attention(_documents([7], tokens=12), SHAPE, window=7) == CausalPlan()
    assert isinstance(plan_attention(_documents([5, 7], tokens=12), WIDE, window=7), DocumentsPlan)


def test_short_rows_take_one_call_with_a_mask_and_long_ones_a_call_per_document():
    small = AttentionShape(heads=4, head_dim=16, dtype=torch.float32)
    assert isinstance(plan_attention(_documents([20, 20, 20], tokens=64), small), MaskPlan)
    assert isinstance(plan_attention(_documents([128] * 4, tokens=512), small), DocumentsPlan)


def test_documents_with_padding_between_rows_never_mix_up_their_lengths():
    plan = plan_attention(_documents([5, 4], [12], tokens=12), WIDE)
    assert plan == DocumentsPlan(lengths=(5, 4, 3, 12), padding=(False, False, True, False))


def test_padding_in_front_is_not_taken_for_a_causal_row():
    documents = torch.tensor([[-1, -1, 0, 0, 0]], dtype=torch.int32)
    assert not isinstance(plan_attention(documents, SHAPE), CausalPlan)


@pytest.mark.parametrize("tokens, plan", [(12, CausalPlan), (12, MaskPlan), (60, DocumentsPlan)])
def test_short_calls_in_16_bits_are_rounded_once(tokens, plan):
    """They run in float32 on CPU: the result is the exact one, rounded, and so are the gradients."""
    rows = [[tokens]] if plan is CausalPlan else [[tokens // 3, tokens - tokens // 3]]
    documents = _documents(*rows, tokens=tokens)
    heads = AttentionShape(heads=256 if plan is DocumentsPlan else 4, head_dim=8, dtype=torch.bfloat16)
    chosen = plan_attention(documents, heads)
    assert isinstance(chosen, plan)
    narrow = [x.detach().bfloat16().requires_grad_() for x in _qkv(1, tokens)]
    exact = [x.detach().float().requires_grad_() for x in narrow]
    found = _run(chosen, *narrow, documents >= 0)
    assert all(x.dtype == torch.bfloat16 for x in found)

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, documents).bfloat16()

    for mine, expected in zip(found, _run(rounded, *exact, documents >= 0), strict=True):
        torch.testing.assert_close(mine.float(), expected.float(), rtol=2**-8, atol=1e-6)


def test_only_short_calls_in_16_bits_on_cpu_run_in_float32():
    cpu, half = torch.device("cpu"), torch.bfloat16
    assert call_dtype(cpu, half, 512, 32) == call_dtype(cpu, torch.float16, 128, 128) == torch.float32
    assert call_dtype(cpu, half, 1024, 32) == call_dtype(cpu, half, 512, 64) == half
    assert call_dtype(torch.device("cuda"), half, 16, 32) == half
    assert call_dtype(cpu, torch.float64, 16, 32) == torch.float64


def test_varlen_without_a_gpu_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match='needs a GPU.*model.attention = "auto"'):
        plan_attention(_documents([5], tokens=5), SHAPE, choice="varlen")


@pytest.mark.gpu
def test_varlen_equals_explicit_scores_on_the_gpu():
    documents = _documents([50, 4, 70], [128], tokens=128).cuda()
    shape = AttentionShape(heads=4, head_dim=64, dtype=torch.bfloat16)
    q, k, v = (torch.randn(2, 128, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    real = documents >= 0
    for window in (None, 16):
        output = plan_attention(documents, shape, window=window)(q, k, v)
        expected = attention_reference(q.float(), k.float(), v.float(), documents, window)
        torch.testing.assert_close(output[real].float(), expected[real], rtol=3e-2, atol=3e-2)
