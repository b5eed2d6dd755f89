"""The objective against plain Python in float64, by hand, and by finite differences; what is masked never leaks."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.config.rl import ObjectiveConfig
from trainer.errors import ConfigError
from trainer.rl.measures import Measures
from trainer.rl.objective import (
    PolicyLoss,
    TokenBatch,
    aggregation,
    importance_weights,
    kl_estimate,
    objective,
    policy_function,
)

LOSSES = ["ppo", "gspo", "cispo", "dppo", "ipo", "reinforce"]


def config(**options: Any) -> ObjectiveConfig:
    return ObjectiveConfig(**options)


def batch(seed: int = 0, tokens: int = 30, spread: float = 0.4, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Tokens of four sequences in turn, a third of them not trained."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    old = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 2 - 0.1
    sequence = torch.arange(tokens) % 4
    found = TokenBatch(
        logprobs=(old + normal(spread)).clamp(max=-0.01),
        old_logprobs=old,
        engine_logprobs=(old + normal(spread)).clamp(max=-0.01),
        advantages=normal(1.0)[sequence],
        weights=torch.rand(tokens, generator=generator, dtype=torch.float64)[sequence],
        mask=torch.rand(tokens, generator=generator) < 0.67,
        sequence=sequence,
        entropy=normal(1.0).abs(),
        ref_logprobs=old + normal(spread),
        teacher_logprobs=old + normal(spread),
    )
    cast = {f.name: value.to(dtype) for f in fields(found) if (value := getattr(found, f.name)).is_floating_point()}
    return replace(found, **cast)


def gradient(tokens: TokenBatch, settings: ObjectiveConfig, name: str = "logprobs") -> tuple[Tensor, Tensor, Measures]:
    leaf = getattr(tokens, name).detach().clone().requires_grad_()
    loss, measures = objective(replace(tokens, **{name: leaf}), settings)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, measures


# -- a slow reference ------------------------------------------------------------------------------------------------------


def slow(tokens: TokenBatch, c: ObjectiveConfig, logprobs: list[float], held: list[float]) -> float:
    """The objective in Python floats. `held`: the log-probabilities wherever a gradient is held back."""
    columns = {f.name: getattr(tokens, f.name).tolist() for f in fields(tokens)}
    trained = [i for i, kept in enumerate(columns["mask"]) if kept]
    total = 0.0
    for i in trained:
        row = {name: values[i] for name, values in columns.items()}
        advantage = row["advantages"] + c.distill * (row["teacher_logprobs"] - held[i])
        if c.kl_estimator == "k1":
            advantage -= c.kl * (held[i] - row["ref_logprobs"])
        ratio = math.exp(logprobs[i] - row["old_logprobs"])
        low, high = 1 - c.clip_low, 1 + c.clip_high
        moved = math.exp(held[i]) - math.exp(row["engine_logprobs"])
        if c.loss == "gspo":
            own = [j for j in trained if columns["sequence"][j] == row["sequence"]]
            held_ratio = math.exp(math.fsum(held[j] - columns["old_logprobs"][j] for j in own) / len(own))
            ratio = held_ratio * math.exp(logprobs[i]) / math.exp(held[i])
        if c.loss in ("ppo", "gspo"):
            clipped = low if ratio < low else high if ratio > high else ratio
            loss = max(-ratio * advantage, -clipped * advantage)
        elif c.loss == "cispo":
            weight = sorted([low, math.exp(held[i] - row["old_logprobs"]), high])[1]
            loss = -weight * advantage * logprobs[i]
        elif c.loss == "dppo":
            too_far = moved > c.clip_high if advantage > 0 else -moved > c.clip_low
            loss = 0.0 if too_far else -ratio * advantage
        elif c.loss == "ipo":
            loss = -ratio * advantage if -c.clip_low <= moved <= c.clip_high else 0.0
        else:
            loss = -advantage * logprobs[i]
        if c.old_logprobs == "trainer" and c.importance_cap is not None:
            loss *= min(math.exp(row["old_logprobs"]) / math.exp(row["engine_logprobs"]), c.importance_cap)
        away = math.exp(row["ref_logprobs"]) / math.exp(logprobs[i])
        if c.kl_estimator == "k2":
            loss += c.kl * 0.5 * math.log(away) ** 2
        elif c.kl_estimator == "k3":
            loss += c.kl * (away - math.log(away) - 1)
        total += row["weights"] * (loss - c.entropy * row["entropy"])
    return total


TERMS: list[dict[str, Any]] = [
    {},
    {"old_logprobs": "trainer", "importance_cap": 1.1},
    {"old_logprobs": "trainer", "importance_cap": None},
    {"kl": 0.3, "kl_estimator": "k1"},
    {"kl": 0.3, "kl_estimator": "k2"},
    {"kl": 0.3, "kl_estimator": "k3"},
    {"entropy": 0.2, "distill": 0.5},
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_equal_the_slow_reference(loss, terms):
    for seed in range(3):
        tokens, c = batch(seed), config(loss=loss, **terms)
        value, grad, _ = gradient(tokens, c)
        logprobs = tokens.logprobs.tolist()
        assert value.item() == pytest.approx(slow(tokens, c, logprobs, logprobs), rel=1e-10)
        for i in range(len(logprobs)):  # central differences
            ends = [
                slow(tokens, c, [*logprobs[:i], logprobs[i] + shift, *logprobs[i + 1 :]], logprobs)
                for shift in (1e-6, -1e-6)
            ]
            assert grad[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)
        assert (grad[~tokens.mask] == 0).all() and (grad[tokens.mask] != 0).any()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "dppo", "ipo", "reinforce"])
def test_the_gradient_is_the_derivative_of_the_value(loss):
    """No gradient is held back but in cispo's weight. For gspo this is the paper's sequence form: weights 1 / length."""
    tokens, c = batch(5, spread=0.2), config(loss=loss, kl=0.2, entropy=0.1)
    lengths = [int((tokens.mask & (tokens.sequence == s)).sum()) for s in range(4)]
    weights, _ = aggregation(lengths, "sequence", 100)
    tokens = replace(tokens, weights=torch.tensor(weights, dtype=torch.float64)[tokens.sequence])
    _, grad, _ = gradient(tokens, c)
    for i in range(len(grad)):
        shift = torch.zeros_like(grad)
        shift[i] = 1e-6
        ends = [objective(replace(tokens, logprobs=tokens.logprobs + s * shift), c)[0].item() for s in (1, -1)]
        assert grad[i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_the_entropy_bonus_raises_entropy():
    tokens = batch()
    _, grad, measures = gradient(tokens, config(entropy=0.25), "entropy")
    assert torch.equal(grad, torch.where(tokens.mask, -0.25 * tokens.weights, 0.0))
    assert measures.sums["entropy"].item() == pytest.approx(tokens.entropy[tokens.mask].sum().item())


# -- by hand -----------------------------------------------------------------------------------------------------------------


def by_hand(now: list[float], old: list[float], advantage: list[float], **others: list[float]) -> TokenBatch:
    """One sequence of trained tokens with weight 1, from probabilities."""
    p = {name: torch.tensor(values, dtype=torch.float64).log() for name, values in others.items()}
    denominators = torch.tensor(old, dtype=torch.float64).log()
    count = len(now)
    return TokenBatch(
        logprobs=torch.tensor(now, dtype=torch.float64).log(),
        old_logprobs=denominators,
        engine_logprobs=p.get("engine", denominators),
        advantages=torch.tensor(advantage, dtype=torch.float64),
        weights=torch.ones(count, dtype=torch.float64),
        mask=torch.ones(count, dtype=torch.bool),
        sequence=torch.zeros(count, dtype=torch.long),
        ref_logprobs=p.get("ref"),
        teacher_logprobs=p.get("teacher"),
    )


# Ratio 2 up with A = 1 and -1, ratio 1/2 down with A = 1 and -1.
FOUR = ([0.5, 0.5, 0.25, 0.25], [0.25, 0.25, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
BY_HAND = {
    "ppo": ([-1.28, 2.0, -0.5, 0.8], [0.0, 2.0, -0.5, 0.0], (1, 1, 0)),
    "cispo": (
        [1.28 * math.log(2), -1.28 * math.log(2), 0.8 * math.log(4), -0.8 * math.log(4)],
        [-1.28, 1.28, -0.8, 0.8],
        (2, 2, 0),
    ),
    "reinforce": ([math.log(2), -math.log(2), math.log(4), -math.log(4)], [-1.0, 1.0, -1.0, 1.0], (0, 0, 0)),
    "dppo": ([-2.0, 2.0, -0.5, 0.0], [-2.0, 2.0, -0.5, 0.0], (0, 0, 1)),  # moved 0.25: under 0.28, over 0.2
    "ipo": ([-2.0, 2.0, 0.0, 0.0], [-2.0, 2.0, 0.0, 0.0], (0, 0, 2)),
    "gspo": ([-1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0], (0, 0, 0)),  # the sequence's ratio is 1
}


@pytest.mark.parametrize("loss", BY_HAND)
def test_hand_worked_losses_gradients_and_clip_counts(loss):
    losses, grads, (low, high, masked) = BY_HAND[loss]
    tokens, c = by_hand(*FOUR), config(loss=loss)
    value, grad, measures = gradient(tokens, c)
    assert policy_function(c)(tokens, c).loss.tolist() == pytest.approx(losses)
    assert value.item() == pytest.approx(sum(losses)) and grad.tolist() == pytest.approx(grads)
    assert [measures.sums[name].item() for name in ("clip_low", "clip_high", "masked")] == [low, high, masked]


def test_gspo_has_one_ratio_for_a_sequence():
    """Ratios 2 and 1: their geometric mean is sqrt(2), clipped at 1.3 or not at 1.5."""
    tokens = by_hand([0.5, 0.25], [0.25, 0.25], [1.0, 1.0])
    value, grad, _ = gradient(tokens, config(loss="gspo", clip_high=0.5))
    assert value.item() == pytest.approx(-2 * math.sqrt(2)) and grad.tolist() == pytest.approx([-math.sqrt(2)] * 2)
    value, grad, measures = gradient(tokens, config(loss="gspo", clip_high=0.3))
    assert value.item() == pytest.approx(-2.6) and grad.tolist() == [0.0, 0.0]
    assert measures.sums["clip_high"].item() == 2


def test_trust_regions_are_around_the_policy_that_sampled():
    tokens = by_hand([0.5], [0.5], [1.0], engine=[0.1])
    for loss in ("dppo", "ipo"):
        value, grad, _ = gradient(tokens, config(loss=loss, old_logprobs="trainer"))
        assert value.item() == 0.0 and grad.item() == 0.0


def test_hand_worked_terms():
    p = [torch.tensor([x], dtype=torch.float64).log() for x in (0.5, 0.25)]
    assert kl_estimate(*p, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(*p, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(*p, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))
    old, engine = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.2, 0.5]).log()
    assert importance_weights(old.requires_grad_(), engine, 2.0).tolist() == pytest.approx([2.0, 0.4])
    assert not importance_weights(old, engine, 2.0).requires_grad

    taught = by_hand([0.25], [0.25], [0.0], teacher=[0.5])
    value, grad, _ = gradient(taught, config(distill=0.5))
    assert value.item() == pytest.approx(-0.5 * math.log(2)) and grad.item() == pytest.approx(-0.5 * math.log(2))

    away = by_hand([0.5], [0.5], [0.0], ref=[0.25])
    grads = {name: gradient(away, config(kl=0.1, kl_estimator=name))[1].item() for name in ("k1", "k2", "k3")}
    assert grads == pytest.approx({"k1": 0.1 * math.log(2), "k2": 0.1 * math.log(2), "k3": 0.1 * 0.5})


def test_measures_by_hand():
    tokens = by_hand(*FOUR, engine=[0.5, 0.25, 0.25, 0.25], ref=[0.5] * 4)
    _, _, measures = gradient(tokens, config(kl_estimator="k1"))
    assert {name: value.item() for name, value in measures.sums.items()} == pytest.approx(
        {
            "tokens": 4,
            "ratio": 5.0,
            "clip_low": 1,
            "clip_high": 1,
            "masked": 0,
            "mismatch": math.log(2),
            "kl": -2 * math.log(2),
        }
    )
    assert {name: value.item() for name, value in measures.maxima.items()} == pytest.approx(
        {"ratio_deviation_max": 1.0, "mismatch_max": math.log(2)}
    )
    both = measures + measures
    assert both.sums["ratio"].item() == 10 and both.maxima["ratio_deviation_max"].item() == 1
    assert both.over_ranks() == pytest.approx(
        {"tokens": 8, "ratio": 1.25, "clip_low": 0.25, "clip_high": 0.25, "masked": 0, "mismatch": math.log(2) / 4}
        | {"kl": -math.log(2) / 2, "ratio_deviation_max": 1.0, "mismatch_max": math.log(2)}
    )
    # Where the trainer's own log-probabilities are the denominator, the engine is held against those.
    _, _, own = gradient(tokens, config(old_logprobs="trainer"))
    assert own.sums["mismatch"].item() == pytest.approx(3 * math.log(2))


# -- aggregation -------------------------------------------------------------------------------------------------------------


def test_aggregation_counts_what_has_a_weight():
    counts = [4, 0, 2]
    assert aggregation(counts, "token", 8) == ([1.0, 0.0, 1.0], 6.0)
    assert aggregation(counts, "sequence", 8) == ([0.25, 0.0, 0.5], 2.0)
    assert aggregation(counts, "constant", 8) == ([0.125, 0.0, 0.125], 2.0)
    for kind in ("token", "sequence", "constant"):
        assert aggregation([0, 0], kind, 8) == ([0.0, 0.0], 0.0)


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("truncated", [1, 2])
def test_j4_truncated_completions_are_in_neither_numerator_nor_denominator(aggregate, truncated):
    """Two completions of ten tokens; one, then both of them left out."""
    tokens = batch(1, tokens=20, dtype=torch.float32)
    sequence = torch.arange(20) // 10
    mask = sequence < 2 - truncated
    weights, denominator = aggregation([int((mask & (sequence == s)).sum()) for s in (0, 1)], aggregate, 10)
    tokens = replace(tokens, sequence=sequence, mask=mask, weights=torch.tensor(weights)[sequence])
    value, grad, measures = gradient(tokens, config())
    value = value / max(1.0, denominator)
    assert value.dtype == torch.float32
    assert grad.isfinite().all() and measures.sums["tokens"].item() == 10 * (2 - truncated)
    if truncated == 2:
        assert denominator == 0 and value == 0 and (grad == 0).all()
        return
    ones = replace(tokens, weights=torch.ones(20))
    assert value.item() == pytest.approx(objective(ones, config())[0].item() / 10)
    alone = replace(tokens, **{f.name: getattr(tokens, f.name)[:10] for f in fields(tokens)})
    assert value.item() == pytest.approx(objective(alone, config())[0].item() / denominator, rel=1e-6)


# -- what is not trained ---------------------------------------------------------------------------------------------------

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_garbage_never_leaks(loss, data):
    terms = data.draw(st.sampled_from(TERMS))
    c = config(loss=loss, **terms)
    tokens = batch(data.draw(st.integers(0, 99)), tokens=12, dtype=torch.float32)
    tokens = replace(tokens, mask=torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))))
    dirty = {}
    for field in fields(tokens):
        if field.name != "mask":
            value = getattr(tokens, field.name)
            choices = st.sampled_from(GARBAGE) if value.is_floating_point() else st.integers(-(2**62), 2**62)
            filling = data.draw(st.lists(choices, min_size=12, max_size=12))
            dirty[field.name] = torch.where(tokens.mask, value, torch.tensor(filling, dtype=value.dtype))
    clean = gradient(tokens, c)
    found = gradient(replace(tokens, **dirty), c)
    assert torch.equal(found[0], clean[0]) and found[0].isfinite()
    assert torch.equal(found[1], clean[1]) and (found[1][~tokens.mask] == 0).all()
    for part in ("sums", "maxima"):
        ours, theirs = getattr(found[2], part), getattr(clean[2], part)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_policy_that_moved_very_far_gives_finite_numbers(loss):
    tokens = replace(
        batch(dtype=torch.float32), old_logprobs=torch.full((30,), -500.0), engine_logprobs=torch.zeros(30)
    )
    value, grad, measures = gradient(tokens, config(loss=loss, kl=0.1))
    assert value.isfinite() and grad.isfinite().all()
    assert all(number.isfinite() for number in [*measures.sums.values(), *measures.maxima.values()])


@pytest.mark.parametrize("loss", LOSSES)
def test_parts_add_up_to_the_whole(loss):
    """Whole sequences in two micro-batches, in another order: the same sums."""
    tokens, c = batch(3), config(loss=loss, kl=0.1, entropy=0.1)
    value, grad, measures = gradient(tokens, c)
    parts = []
    for keep in (tokens.sequence < 1, tokens.sequence >= 1):
        cut = {f.name: getattr(tokens, f.name)[keep] for f in fields(tokens)}
        parts.append((keep, *gradient(replace(tokens, **cut), c)))
    assert sum(part[1].item() for part in parts) == pytest.approx(value.item(), rel=1e-12)
    for keep, _, own, _ in parts:
        torch.testing.assert_close(own, grad[keep], rtol=1e-12, atol=1e-15)
    together = parts[0][3] + parts[1][3]
    assert together.over_ranks() == pytest.approx(measures.over_ranks(), rel=1e-12)


# -- custom ------------------------------------------------------------------------------------------------------------------


def doubled(tokens: TokenBatch, c: ObjectiveConfig) -> PolicyLoss:
    return PolicyLoss(-2.0 * tokens.advantages * tokens.logprobs)


def no_policy_loss(tokens: TokenBatch, c: ObjectiveConfig) -> Tensor:
    return tokens.logprobs.sum()


NUMBER = 3


@pytest.mark.parametrize("separator", [":", "."])
def test_a_custom_loss_by_import_path(separator):
    tokens = batch()
    value, grad, _ = gradient(tokens, config(loss="custom", class_path=f"{__name__}{separator}doubled"))
    plain, plain_grad, _ = gradient(tokens, config(loss="reinforce"))
    torch.testing.assert_close((value, grad), (2 * plain, 2 * plain_grad))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:loss", "objective.class_path = 'no_such_module:loss' cannot be imported"),
        (f"{__name__}:no_such_loss", "cannot be imported"),
        ("", "cannot be imported"),
        (f"{__name__}:NUMBER", "is no function"),
        (f"{__name__}:no_policy_loss", "must return .*PolicyLoss .* 30 tokens, and returned Tensor"),
    ],
)
def test_a_custom_loss_that_is_none_is_named(path, message):
    with pytest.raises(ConfigError, match=message):
        objective(batch(), config(loss="custom", class_path=path))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kl": 0.1}, "ref_logprobs"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "ref_logprobs"),
        ({"distill": 1.0}, "teacher_logprobs"),
        ({"entropy": 0.1}, "entropy"),
    ],
)
def test_a_term_without_its_tensor_is_an_error(options, name):
    with pytest.raises(ValueError, match=f"needs {name}"):
        objective(replace(batch(), **{name: None}), config(**options))
