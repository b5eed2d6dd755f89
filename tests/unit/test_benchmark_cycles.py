"""The arithmetic on steps that two loops take in turn."""

import numpy as np
import pytest

from benchmarks.cycles import CAP, Steps, compare_steps, standard_error, typical

CYCLES, PLACES = 50, 32


def steps(seconds: np.ndarray) -> Steps:
    return Steps(seconds, seconds / 2, np.full_like(seconds, 500.0))


def noisy(seed: int, mean: float = 0.02) -> np.ndarray:
    """Step times with 5 % of noise, [cycles, places]."""
    return mean * np.random.default_rng(seed).normal(1.0, 0.05, (CYCLES, PLACES))


def test_the_ratio_is_that_of_the_rates():
    found = compare_steps([steps(np.full((4, 2), 2.0))], [steps(np.full((4, 2), 1.0))])
    assert (found["ratio"], found["cpu_ratio"], found["whole_ratio"], found["standard_error"]) == (0.5, 0.5, 0.5, 0.0)


@pytest.mark.parametrize("every", [1, 4])
def test_what_a_loop_does_at_one_place_counts_in_full(every: int):
    """A cost of half a step, at the first place of each cycle and of every fourth one: planning, garbage collection."""
    plain = np.full((CYCLES, PLACES), 0.02)
    dear = plain.copy()
    dear[::every, 0] += 0.0099
    assert typical(dear) == pytest.approx(dear.mean())
    dear[:, 0] += 1.0  # fifty steps' worth, in each cycle
    assert typical(dear) == pytest.approx(dear.mean())


def test_a_pause_of_the_machine_does_not():
    paused = np.full((CYCLES, PLACES), 0.02)
    paused[7, 3] += 5.0
    assert typical(paused) == pytest.approx(0.02, rel=(CAP - 1) * 1.01 / paused.size)
    found = compare_steps([steps(paused)], [steps(np.full((CYCLES, PLACES), 0.02))])
    assert found["ratio"] > 0.999 and found["whole_ratio"] < 0.9


def test_what_is_slower_in_every_step_is_seen_through_the_noise():
    ours, bare = [steps(noisy(seed, 0.0206)) for seed in range(4)], [steps(noisy(seed + 10)) for seed in range(4)]
    found = compare_steps(ours, bare)
    assert found["ratio"] == pytest.approx(1 / 1.03, abs=3 * found["standard_error"])
    assert found["standard_error"] < 0.003


def test_the_standard_error_is_the_spread_of_repeated_measurements():
    pairs = [(steps(noisy(seed)), steps(noisy(seed + 1000))) for seed in range(200)]
    spread = np.std([ours.rate / bare.rate for ours, bare in pairs])
    told = np.mean([standard_error(ours, bare) for ours, bare in pairs[:20]])
    assert told == pytest.approx(spread, rel=0.2)


def test_processes_that_differ_make_the_ratio_unsure():
    """Each is sure of itself; between them lie 4 %."""
    ours = [steps(np.full((8, 2), seconds)) for seconds in (1.0, 1.04)]
    found = compare_steps(ours, [steps(np.full((8, 2), 1.0))] * 2)
    assert found["standard_error"] == pytest.approx((1 - 1 / 1.04) / 2, abs=1e-4)
    assert (found["lowest_process"], found["highest_process"]) == (pytest.approx(1 / 1.04, abs=1e-4), 1.0)


def test_pairing_survives_a_slow_stretch():
    """The machine is half as fast for a third of the cycles: both loops lose alike, and the standard error says so."""
    slow = np.ones((CYCLES, 1))
    slow[: CYCLES // 3] = 2.0
    found = compare_steps([steps(noisy(1) * slow)], [steps(noisy(2) * slow)])
    assert found["ratio"] == pytest.approx(1.0, abs=3 * found["standard_error"])
    assert found["standard_error"] < 0.005
