"""What a difference between two runs is put down to: one made-up pair of runs for each cause."""

import copy
import math

import pytest

from trainer.checkpoint.diff import Difference
from trainer.train.comparison import Bound, Distance, StateComparison, compare_rows, spread
from trainer.train.diagnosis import Evidence, diagnose

RESUMED_FROM = 3
STEPS = 8


def rows() -> dict[int, dict]:
    return {
        step: {
            "step": step,
            "loss": 6.0 - step / 7,
            "lr": 1e-3 * step / 10,
            "grad_norm": 2.0 + step / 3,
            "tokens": 100 * step,
            "samples": 8 * step,
            "epoch": 0,
            "ids": [[f"0:{10 * step + row}"] for row in range(4)],
        }
        for step in range(1, STEPS + 1)
    }


def found(change=lambda b: None, *, before=None, differences=(), repeated=None, bound=0.0):
    a, b = rows(), copy.deepcopy(rows())
    change(b)
    values = list(compare_rows(a, b, Bound(bound), STEPS))
    return diagnose(Evidence(RESUMED_FROM, values, before or [], a, list(differences), repeated=repeated))


def from_step(key, first, value):
    def change(b):
        for step in range(first, STEPS + 1):
            b[step][key] = value(step, b[step][key])

    return change


def nudge(step, value):
    return value * (1 + 1e-7)


def test_equal_runs_have_nothing_to_explain():
    assert found() is None


@pytest.mark.parametrize(
    ("key", "first", "value", "cause"),
    [
        ("loss", 4, nudge, "the weights were not restored exactly"),
        ("loss", 6, nudge, "the optimizer's state (moments"),
        ("grad_norm", 4, nudge, "a backward kernel that is not deterministic"),
        ("grad_norm", 5, nudge, "the optimizer's state (moments"),
        ("lr", 4, nudge, "the schedule or the param groups"),
        ("lr", 4, lambda step, _: 1e-3 * (step - 3) / 10, "the lr of step 1 there, so it started over"),
        ("lr", 4, lambda step, _: 1e-3 * (step + 3) / 10, "the lr of step 7 there, 3 early"),
        ("ids", 4, lambda step, _: rows()[step - 3]["ids"], "the samples of step 1 there, so it started over"),
        ("ids", 4, lambda step, _: rows()[step - 1]["ids"], "the samples of step 3 there, 1 late"),
        ("ids", 4, lambda step, _: [["9:9"]], "the data position was not restored"),
        ("tokens", 4, lambda step, _: 100 * (step - 3), "the progress counters were not restored"),
        ("samples", 4, lambda step, _: 8 * (step - 3), "the progress counters were not restored"),
    ],
)
def test_the_cause_follows_from_the_first_difference(key, first, value, cause):
    diagnosis = found(from_step(key, first, value))
    assert diagnosis is not None and diagnosis.is_resume
    assert diagnosis.first is not None and (diagnosis.first.step, diagnosis.first.key) == (first, key)
    assert cause in diagnosis.cause, diagnosis.cause
    assert f"step {first}" in diagnosis.what


def test_what_a_step_reads_is_told_before_what_it_computes():
    """With other samples the loss differs as well; the samples are the news."""

    def change(b):
        from_step("loss", 4, nudge)(b)
        from_step("lr", 4, nudge)(b)
        from_step("ids", 4, lambda step, _: [["9:9"]])(b)

    diagnosis = found(change)
    assert diagnosis is not None and diagnosis.first is not None and diagnosis.first.key == "ids"
    assert "equal there: epoch, samples, tokens, grad_norm" in diagnosis.what


def test_values_that_agree_at_the_step_are_named():
    diagnosis = found(from_step("loss", 6, nudge))
    assert diagnosis is not None
    assert "equal there: ids, epoch, samples, tokens, lr, grad_norm" in diagnosis.what


def test_a_difference_before_the_interruption_is_not_the_resume():
    for diagnosis in (
        found(from_step("loss", 2, nudge)),
        found(before=list(compare_rows({4: rows()[4]}, {4: rows()[4] | {"loss": 1.0}}, Bound(), 4))[-8:]),
    ):
        assert diagnosis is not None and not diagnosis.is_resume
        assert "before anything was interrupted" in diagnosis.cause and "--repeat" in diagnosis.cause


def test_a_run_that_differs_from_itself_is_not_deterministic():
    other = rows()
    other[5]["grad_norm"] += 1e-9
    repeated = list(compare_rows(rows(), other, Bound(), STEPS))
    diagnosis = found(from_step("loss", 4, nudge), repeated=repeated)
    assert diagnosis is not None and not diagnosis.is_resume
    assert "differs from itself (grad_norm at step 5)" in diagnosis.cause


def test_a_run_that_equals_itself_puts_the_blame_on_the_restore():
    repeated = list(compare_rows(rows(), rows(), Bound(), STEPS))
    diagnosis = found(from_step("loss", 4, nudge), repeated=repeated)
    assert diagnosis is not None and diagnosis.is_resume
    assert "the restore is at fault" in diagnosis.cause


def test_a_run_that_counts_on_from_another_step_than_its_checkpoints_has_lost_its_counters():
    """Its rows come under other steps, so that samples and all else look wrong from the first on."""
    values = list(compare_rows(rows(), {step: rows()[step] | {"ids": [["9:9"]]} for step in rows()}, Bound(), STEPS))
    diagnosis = diagnose(Evidence(0, values, [], rows(), [], loaded=RESUMED_FROM))
    assert diagnosis is not None and diagnosis.first is not None and diagnosis.is_resume
    assert "the checkpoint was of step 3, and the resumed run counted on from step 0" in diagnosis.cause


def test_rows_may_agree_and_states_differ():
    difference = Difference("optimizer", "optimizer.state.w.exp_avg", "3 of 9 elements differ")
    diagnosis = found(differences=[difference])
    assert diagnosis is not None and diagnosis.first is None
    assert "final checkpoints differ in optimizer; first optimizer.state.w.exp_avg: 3 of 9" in diagnosis.what


def test_the_optimizers_own_counter_is_quoted():
    difference = Difference("optimizer", "optimizer.state.w.step", "1 of 1 elements differ, at most by 4")
    diagnosis = found(from_step("loss", 5, nudge), differences=[difference])
    assert diagnosis is not None
    assert "optimizer.state.w.step: 1 of 1 elements differ, at most by 4" in diagnosis.cause


def test_a_missing_row_is_a_difference():
    diagnosis = found(lambda b: b.pop(7))
    assert diagnosis is not None and "step 7: the resumed run has no" in diagnosis.what


class TestBound:
    def test_only_what_is_added_up_may_differ(self):
        assert found(from_step("loss", 4, nudge), bound=1e-4) is None
        assert found(from_step("grad_norm", 4, nudge), bound=1e-4) is None
        for key in ("lr", "tokens", "samples"):
            assert found(from_step(key, 4, lambda step, value: type(value)(value * 1.0001) + 1), bound=1e-2) is not None
        assert found(from_step("lr", 4, nudge), bound=1e-4) is not None
        assert found(from_step("ids", 4, lambda step, ids: ids[::-1]), bound=1e-4) is not None

    def test_beyond_it_a_difference_is_one(self):
        assert found(from_step("loss", 4, lambda step, value: value * 1.01), bound=1e-4) is not None

    def test_numbers_that_are_none_are_not_close(self):
        assert found(from_step("loss", 4, lambda step, value: float("nan")), bound=0.5) is not None


def test_the_spread_is_that_of_the_number_furthest_apart():
    a, b = rows(), copy.deepcopy(rows())
    assert spread(compare_rows(a, b, Bound(math.inf), STEPS), StateComparison()) == 0.0
    b[4]["loss"] *= 1 + 1e-3
    b[6]["grad_norm"] *= 1 - 1e-2
    b[7]["lr"] *= 2  # no bound allows that: a difference, not a distance
    values = list(compare_rows(a, b, Bound(math.inf), STEPS))
    assert spread(values, StateComparison()) == pytest.approx(1e-2)
    assert [value.key for value in values if value.verdict == "different"] == ["lr"]
    states = StateComparison(worst={"model": Distance("model.w", 0.5), "optimizer": Distance("optimizer.m", 0.1)})
    assert spread(values, states) == 0.5
