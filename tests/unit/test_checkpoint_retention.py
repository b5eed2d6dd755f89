"""Retention, as a pure plan."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.discovery import Candidate, Status
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.retention import plan_removals


def candidates(**steps):
    return [
        Candidate(Path(f"step_{step:08d}"), step, Status(status.replace("_", " ")))
        for status, numbers in steps.items()
        for step in numbers
    ]


def kept(found, **settings) -> list[int]:
    gone = {candidate.path for candidate in plan_removals(found, **settings)}
    return [candidate.step or 0 for candidate in found if candidate.path not in gone]


def test_the_newest_stay():
    found = candidates(committed=[10, 2, 4, 6, 8])
    assert sorted(kept(found, keep_last=2)) == [8, 10]
    assert [c.step for c in plan_removals(found, keep_last=2)] == [2, 4, 6]
    assert kept(found, keep_last=None) == [10, 2, 4, 6, 8]
    assert kept(found, keep_last=None, keep_every=4) == [10, 2, 4, 6, 8]
    assert sorted(kept(found, keep_last=9)) == [2, 4, 6, 8, 10]


def test_e8_keep_every_is_for_good():
    assert kept(candidates(committed=[1, 2, 3, 4, 5]), keep_last=1, keep_every=2) == [2, 4, 5]


def test_what_cannot_be_resumed_takes_no_place_and_is_not_touched():
    found = candidates(committed=[4, 8], not_resumable=[12], corrupt=[16], incomplete=[20], foreign=[24])
    assert kept(found, keep_last=1) == [8, 12, 16, 20, 24]


def measured(metric: str = "val_loss", /, **values) -> list[Candidate]:
    """Committed checkpoints: step_4=0.5 is step 4 with a val_loss of 0.5, None one without a validation."""
    found = []
    for name, value in values.items():
        step = int(name.removeprefix("step_"))
        metrics = {} if value is None else {metric: value}
        found.append(Candidate(Path(name), step, Status.COMMITTED, manifest=Manifest(step, {}, metrics=metrics)))
    return found


def test_the_best_stay():
    found = measured(step_1=0.9, step_2=0.3, step_3=None, step_4=0.5, step_5=0.3, step_6=0.7, step_7=None)
    assert kept(found, keep_last=1, keep_best=1) == [5, 7]  # of two equal ones the newer
    assert kept(found, keep_last=1, keep_best=2) == [2, 5, 7]
    assert kept(found, keep_last=1, keep_best=3) == [2, 4, 5, 7]
    assert kept(found, keep_last=2, keep_best=1) == [5, 6, 7]
    assert kept(found, keep_last=1, keep_best=9) == [1, 2, 4, 5, 6, 7]  # 3 was never validated
    assert kept(found, keep_last=1, keep_every=3, keep_best=1) == [3, 5, 6, 7]
    assert kept(found, keep_last=None, keep_best=1) == [1, 2, 3, 4, 5, 6, 7]


def test_of_rewards_the_highest_is_the_best():
    found = measured("eval_reward", step_1=0.2, step_2=0.9, step_3=None, step_4=-0.5, step_5=0.9, step_6=0.1)
    assert kept(found, keep_last=1, keep_best=1) == [5, 6]
    assert kept(found, keep_last=1, keep_best=3) == [1, 2, 5, 6]


def test_a_state_that_cannot_be_resumed_is_not_the_best():
    found = measured(step_1=0.9, step_2=0.5, step_3=0.8)
    found.append(replace(measured(step_4=0.1)[0], status=Status.NOT_RESUMABLE))
    assert kept(found, keep_last=1, keep_best=1) == [2, 3, 4]
    assert [c.step for c in plan_removals(found, keep_last=1, keep_best=1)] == [1]


STATUSES = st.sampled_from(list(Status))


@given(st.dictionaries(st.integers(0, 40), STATUSES), st.integers(1, 4), st.none() | st.integers(1, 7))
def test_the_newest_resumable_always_stays(steps, keep_last, keep_every):
    found = [Candidate(Path(str(step)), step, status) for step, status in steps.items()]
    plan = plan_removals(found, keep_last=keep_last, keep_every=keep_every)
    resumable = sorted(step for step, status in steps.items() if status is Status.COMMITTED)
    assert all(candidate.status is Status.COMMITTED for candidate in plan)
    left = [step for step in resumable if step not in {candidate.step for candidate in plan}]
    assert left[-keep_last:] == resumable[-keep_last:]
    if keep_every:
        assert all(step in left for step in resumable if step % keep_every == 0)
