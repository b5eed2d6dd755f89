"""Rewards to advantages: hand-worked numbers, what is left out, and what holds for any rewards."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import TrainingError
from trainer.rl.advantages import AdvantageKind, advantages

OF_GROUP: list[AdvantageKind] = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl"]
"""Those whose baseline is that of the group."""
KINDS: list[AdvantageKind] = [*OF_GROUP, "reinforce_pp"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [[0.35] * 8, [0.35] * 7, [1.0] * 4, [0.0] * 5, [0.1 + 0.2, 0.3, 0.3]])
def test_j1_equal_rewards_give_exactly_zero(kind, group):
    """The last group differs in the last bit only: dividing by its std would make advantages of order 1 from it."""
    assert advantages([group], kind) == [[0.0] * len(group)]
    if kind in OF_GROUP:
        assert advantages([group, [0.0, 1.0, 0.5]], kind)[0] == [0.0] * len(group)


@pytest.mark.parametrize("kind", KINDS)
def test_j1_one_reward_that_differs_stays_of_order_one(kind):
    (found,) = advantages([[0.35] * 7 + [0.95]], kind)
    assert all(math.isfinite(value) and abs(value) < 10 for value in found)
    assert found[7] > 0 > found[0] and len(set(found[:7])) == 1


def test_j1_leave_one_out_is_not_normalised():
    (found,) = advantages([[0.35] * 7 + [0.95]], "rloo")
    assert found == pytest.approx([-0.6 / 7] * 7 + [0.6], rel=1e-12)


# Two groups with means 2 and -2; deviations (-1, 0, 1) and (-3, 0, 3).
TWO_GROUPS = [[1.0, 2.0, 3.0], [-5.0, -2.0, 1.0]]
GOLDEN = {
    "grpo": [[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]],  # scope: group (sample std 1 and 3)
    "reinforce_pp_baseline": [[-0.5, 0.0, 0.5], [-1.5, 0.0, 1.5]],  # scope: batch, std = sqrt(20 / 5) = 2
    # mean 0, std = sqrt(44 / 5)
    "reinforce_pp": [[value / math.sqrt(44 / 5) for value in group] for group in TWO_GROUPS],
    "dr_grpo": [[-1.0, 0.0, 1.0], [-3.0, 0.0, 3.0]],  # scope: none
    "rloo": [[-1.5, 0.0, 1.5], [-4.5, 0.0, 4.5]],
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_j11_golden_values_for_each_scope(kind):
    assert advantages(TWO_GROUPS, kind) == [pytest.approx(group, abs=1e-15) for group in GOLDEN[kind]]


def test_an_offset_common_to_all_rewards_costs_no_precision():
    assert advantages([[2**20 + value for value in (0.0, 1.0, 3.0)]], "grpo") == advantages([[0.0, 1.0, 3.0]], "grpo")


def test_maxrl_divides_by_the_mean():
    assert advantages([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]], "maxrl") == [
        pytest.approx([3.0, -1.0, -1.0, -1.0]),
        pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0]),
    ]


def test_maxrl_refuses_rewards_whose_sign_it_would_turn():
    with pytest.raises(TrainingError, match=r"maxrl.*-1\.0"):
        advantages([[-1.0, -0.5]], "maxrl")


def test_reinforce_pp_has_the_batch_as_baseline():
    """With one sample per prompt too."""
    assert advantages([[1.0, 1.0], [2.0, None], [3.0, 3.0]], "reinforce_pp") == [[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]
    assert advantages([[1.0], [2.0], [None], [3.0]], "reinforce_pp") == [[-1.0], [0.0], [0.0], [1.0]]


@pytest.mark.parametrize("kind", OF_GROUP)
@pytest.mark.parametrize("group", [[0.7], [None, 0.7, None], [None, None], [], [math.nan, 0.7]])
def test_a_group_without_a_baseline_gets_zero(kind, group):
    assert advantages([group, [0.0, 1.0]], kind)[0] == [0.0] * len(group)


@pytest.mark.parametrize("kind", KINDS)
def test_j6_what_is_excluded_is_in_no_statistic(kind):
    """The second row of the last group has no reward that counts, whether it would have been 1 or 100."""
    without = advantages([[0.0, 1.0, 0.5], [1.0, 0.25]], kind)
    for left_out in (None, math.nan, math.inf):
        found = advantages([[0.0, 1.0, 0.5], [1.0, left_out, 0.25]], kind)
        assert found == [without[0], [without[1][0], 0.0, without[1][1]]]


# Not below 2e-308: there a mean of two has no digits left.
rewards = st.one_of(st.none(), st.floats(-1e3, 1e3, allow_subnormal=False), st.sampled_from([0.0, 0.35, 1.0, 1e-200]))
batches = st.lists(st.lists(rewards, min_size=0, max_size=6), max_size=5)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_rewards_give_finite_advantages_with_the_sign_of_what_they_are_above(kind, batch, data):
    if kind == "maxrl":
        batch = [[None if value is None else abs(value) for value in group] for group in batch]
    found = advantages(batch, kind)
    for group, own in zip(batch, found, strict=True):
        scope = [group] if kind in OF_GROUP else batch
        known = np.array([value for members in scope for value in members if value is not None])
        for value, advantage in zip(group, own, strict=True):
            assert math.isfinite(advantage)
            if value is None:
                assert advantage == 0.0
            elif np.ptp(known) > 1e-6 * np.abs(known).max() and abs(value - known.mean()) > 1e-6 * np.ptp(known):
                assert np.sign(advantage) == np.sign(value - known.mean())
    order = data.draw(st.permutations(range(len(batch))))
    again = advantages([batch[index][::-1] for index in order], kind)
    assert again == [pytest.approx(found[index][::-1], rel=1e-12, abs=1e-12) for index in order]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_numpy(kind, seed):
    table = np.random.default_rng(seed).uniform(0, 1, (4, 5))
    mean = table.mean(axis=1, keepdims=True)
    expected = {
        "grpo": (table - mean) / table.std(axis=1, ddof=1, keepdims=True),
        "dr_grpo": table - mean,
        "rloo": table - (table.sum(axis=1, keepdims=True) - table) / 4,
        "reinforce_pp": (table - table.mean()) / table.std(ddof=1),
        "reinforce_pp_baseline": (table - mean) / (table - mean).std(ddof=1),
        "maxrl": (table - mean) / mean,
    }[kind]
    np.testing.assert_allclose(advantages(table.tolist(), kind), expected, rtol=1e-12)
