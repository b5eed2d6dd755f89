"""Orthogonalisation: the fast forms against the polynomial applied to the singular values of an SVD."""

import pytest
import torch

from trainer.optim import newton_schulz
from trainer.optim.muon_reference import orthogonalize_reference
from trainer.optim.newton_schulz import completed_squares, multiplications, orthogonalize, polynomials, segments

SHAPES = [(8, 8), (32, 32), (48, 20), (20, 48), (64, 200), (5, 3), (1, 7), (7, 1), (1, 1)]
COEFFICIENTS = ["quintic", "polar_express"]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_polynomial_of_the_singular_values(shape, coefficients):
    given = matrix(*shape)
    expected = orthogonalize_reference(given, coefficients)
    # Rounding moves small singular values most: they grow by 3.4^5 (or more) relative to the largest.
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-4), (torch.bfloat16, 0.25)):
        result = orthogonalize(given.to(dtype)[None], coefficients)[0]
        assert result.dtype == dtype
        assert relative_error(result, expected) < bound


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7, 9])
def test_any_number_of_steps(steps, coefficients):
    for shape in ((24, 24), (12, 40), (40, 12)):
        expected = orthogonalize_reference(matrix(*shape), coefficients, steps)
        assert relative_error(orthogonalize(matrix(*shape)[None], coefficients, steps)[0], expected) < 1e-10


def test_singular_values_end_near_one():
    values = torch.linalg.svdvals(orthogonalize(matrix(4, 32, 80))).flatten()
    assert 0.65 < values.min() and values.max() < 1.25
    exact = orthogonalize(matrix(1, 32, 80), "polar_express", steps=9)[0]
    assert torch.allclose(exact @ exact.T, torch.eye(32, dtype=torch.float64), atol=1e-6)


def test_polar_express_covers_its_interval():
    """Five steps bring all of [1e-3, 1] within 0.15 of 1; the quintic leaves 0.47 at its lower end."""
    values = torch.logspace(-3, 0, 2001, dtype=torch.float64)
    worst = {}
    for name in COEFFICIENTS:
        x = values
        for a, b, c in polynomials(name, 5):
            x = a * x + b * x**3 + c * x**5
        worst[name] = (x - 1).abs().max().item()
    assert worst["polar_express"] < 0.15 < 0.5 < worst["quintic"]


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_completed_squares_are_the_polynomials(coefficients):
    steps = polynomials(coefficients, 5)
    start, squares = completed_squares(steps)
    value, scaled = 0.3, 0.3 * start
    for (a, b, c), (inner, outer) in zip(steps, squares, strict=True):
        scaled = ((scaled * scaled + inner) ** 2 + outer) * scaled
        value = a * value + b * value**3 + c * value**5
    assert scaled == pytest.approx(value, rel=1e-12)


def test_a_batch_is_its_matrices(monkeypatch):
    batch = matrix(7, 24, 60).to(torch.bfloat16)
    alone = torch.cat([orthogonalize(batch[i : i + 1]) for i in range(len(batch))])
    assert torch.equal(orthogonalize(batch), alone)
    two = 2 * batch[0].numel() * batch.element_size()
    monkeypatch.setattr(newton_schulz, "_CPU_BATCH_BYTES", two // torch.get_num_threads())
    assert torch.equal(orthogonalize(batch), alone)


def test_tall_is_wide_transposed():
    given = matrix(1, 20, 70)
    assert torch.allclose(orthogonalize(given.mT), orthogonalize(given).mT, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zero(dtype):
    assert not orthogonalize(torch.zeros(2, 6, 9, dtype=dtype)).any()
    some = matrix(1, 6, 9).to(dtype)
    some[:, 2:4] = 0
    result = orthogonalize(some)
    assert not result[:, 2:4].any() and result.isfinite().all()
    assert orthogonalize(torch.zeros(0, 6, 9, dtype=dtype)).shape == (0, 6, 9)
    assert orthogonalize(torch.zeros(2, 0, 9, dtype=dtype)).shape == (2, 0, 9)


def test_scale_does_not_matter_above_the_smallest_norm():
    given = matrix(1, 12, 30).float()
    expected = orthogonalize(given)
    for scale in (2.0**-20, 2.0**20):
        assert torch.equal(orthogonalize(given * scale), expected)
    assert orthogonalize(given * 1e-14).abs().max() < 1e-3


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("decay", [1, 2, 4, 8])
def test_rounding_does_not_run_away_for_ill_conditioned_matrices(decay, coefficients):
    """Five steps on one Gram matrix in bfloat16 give singular values far above 2 here."""
    left, _, right = torch.linalg.svd(matrix(128, 300), full_matrices=False)
    given = left @ torch.diag(torch.logspace(0, -decay, 128, dtype=torch.float64)) @ right
    result = orthogonalize(given.to(torch.bfloat16)[None], coefficients)[0].double()
    expected = orthogonalize_reference(given, coefficients)
    assert torch.linalg.matrix_norm(result, 2) < 1.35
    assert relative_error(result, expected) < 0.3


def test_low_rank_stays_bounded():
    given = matrix(96, 2) @ matrix(2, 260, seed=1)
    assert torch.linalg.matrix_norm(orthogonalize(given.to(torch.bfloat16)[None])[0].double(), 2) < 1.35


def test_the_gram_form_is_chosen_where_it_is_cheaper():
    assert segments((768, 768), 5) == segments((768, 1000), 5) == [1] * 5
    assert segments((768, 2048), 5) == segments((2048, 768), 5) == [3, 2]
    assert segments((64, 256), 7) == [3, 3, 1]
    for long in (100, 149, 150, 300, 1000):
        assert multiplications((100, long), 5) <= 5 * 100**3 + 10 * 100 * 100 * long
    assert multiplications((2, 2), 5) == 15 * 8
    assert multiplications((2, 10), 5) == 14 * 8 + 4 * 40
