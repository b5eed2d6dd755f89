"""Schedules against torch's chained schedulers, and the numbers of the resume contract."""

import itertools
import json
import math
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from trainer.errors import CheckpointMismatch
from trainer.optim.schedule import Schedule, ScheduleState
from trainer.optim.torch_scheduler import ScheduleLR


def torch_lrs(schedule: Schedule, lr: float, steps: int) -> list[float]:
    """lr after 0, 1, ... updates by torch's schedulers of the same shape."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    parts, milestones = [], []
    if schedule.warmup_steps:
        start = max(schedule.min_factor, 1e-8)
        parts.append(LinearLR(optimizer, start, 1.0, total_iters=schedule.warmup_steps))
        milestones.append(schedule.warmup_steps)
    rest = schedule.total_steps - schedule.warmup_steps
    if schedule.type == "cosine":
        parts.append(CosineAnnealingLR(optimizer, T_max=rest, eta_min=schedule.min_factor * lr))
    elif schedule.type == "constant" or schedule.decay_steps == 0:
        parts.append(ConstantLR(optimizer, factor=1.0))
    else:
        decay = rest if schedule.decay_steps is None else schedule.decay_steps
        if rest > decay:
            parts.append(ConstantLR(optimizer, factor=1.0))
            milestones.append(schedule.total_steps - decay)
        parts.append(LinearLR(optimizer, 1.0, schedule.min_factor, total_iters=decay - 1))
    chained = SequentialLR(optimizer, parts, milestones)
    lrs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: scheduler.step() before optimizer.step(), and epoch arguments
        for _ in range(steps):
            lrs.append(chained.get_last_lr()[0])
            optimizer.step()
            chained.step()
    return lrs


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("constant", 40),
        Schedule("constant", 40, warmup_steps=7),
        Schedule("linear", 40, warmup_steps=4, decay_steps=0),
        Schedule("linear", 40),
        Schedule("linear", 40, warmup_steps=5, decay_steps=12, min_factor=0.1),
        Schedule("linear", 40, warmup_steps=5),
        Schedule("cosine", 40),
        Schedule("cosine", 40, warmup_steps=10, min_factor=0.05),
    ],
    ids=str,
)
def test_equals_torchs_chain_at_every_step(schedule: Schedule):
    peak = 3e-4
    for step, expected in enumerate(torch_lrs(schedule, peak, schedule.total_steps)):
        assert peak * schedule.factor(step) == pytest.approx(expected, rel=1e-12, abs=1e-14 * peak), step


def test_warmup_of_four_after_three_updates():
    assert 0.01 * Schedule("linear", 100, warmup_steps=4).factor(3) == pytest.approx(0.007500000025, rel=1e-12)


def test_contract_numbers_of_peak_5e_5():
    peak = 5e-5
    warmup = Schedule("linear", 200, warmup_steps=50, decay_steps=0)
    assert {peak * warmup.factor(step) for step in range(60, 300)} == {5e-5}
    assert peak * Schedule("cosine", 200, warmup_steps=50).factor(60) == pytest.approx(4.9453690e-5, rel=1e-7)
    assert peak * Schedule("cosine", 200).factor(140) == pytest.approx(1.0305369e-5, rel=1e-7)
    assert peak * Schedule("linear", 200, decay_steps=100).factor(140) == pytest.approx(2.9797980e-5, rel=1e-7)


def test_b6_horizon_is_max_steps():
    cosine = Schedule("cosine", 200)
    assert cosine.factor(200) == pytest.approx(0.0, abs=1e-15)
    assert cosine.factor(100) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "warmup", "decay", "total"),
    [
        (kind, warmup, decay, total)
        for kind, total in itertools.product(["constant", "linear", "cosine"], [1, 10])
        for warmup, decay in itertools.product([0, 1, total], [None, 0, 1, total])
    ],
)
def test_b10_edges_are_finite(kind, warmup, decay, total):
    schedule = Schedule(kind, total, warmup_steps=warmup, decay_steps=decay, min_factor=0.1)
    factors = [schedule.factor(step) for step in range(total + 5)]
    assert all(math.isfinite(factor) and 0.1 - 1e-12 <= factor <= 1.0 for factor in factors)


def test_past_its_end_the_lr_stays_at_min_lr():
    for kind in ("linear", "cosine"):
        schedule = Schedule(kind, 20, min_factor=0.1)
        assert {round(schedule.factor(step), 12) for step in range(20, 60)} == {0.1}


def test_groups_follow_their_own_peak_and_are_written_in_place():
    groups = [{"name": "a", "lr": 0.0, "initial_lr": 0.02}, {"name": "b", "lr": 0.0, "initial_lr": 3e-4}]
    held = groups[1]
    state = ScheduleState(Schedule("cosine", 100), groups)
    state.apply(50)
    assert groups[0]["lr"] == pytest.approx(0.01)
    assert held["lr"] == pytest.approx(1.5e-4)


def test_a_damaged_lr_is_an_error_that_names_both_values():
    groups = [{"name": "decay", "lr": 5e-13, "initial_lr": 5e-5}]
    state = ScheduleState(Schedule("linear", 200, warmup_steps=50, decay_steps=0), groups)
    with pytest.raises(CheckpointMismatch, match=r"(?s)5e-13.*5e-05.*--resume.override optim.lr.*ckpt repair"):
        state.check_lr(60)
    state.apply(60)
    state.check_lr(60)


def test_state_round_trip_and_override():
    saved = ScheduleState(Schedule("cosine", 100, warmup_steps=3, min_factor=0.1), []).state_dict()
    restored = ScheduleState(Schedule("constant", 7), [])
    restored.load_state_dict(saved)
    assert restored.schedule == Schedule("cosine", 100, warmup_steps=3, min_factor=0.1)
    assert restored.verify(saved) == []
    kept = ScheduleState(Schedule("constant", 7), [], overridden=True)
    kept.load_state_dict(saved)
    assert kept.schedule == Schedule("constant", 7)


def test_sqrt_decay():
    schedule = Schedule("linear", 100, decay_steps=50, min_factor=0.1, decay_shape="sqrt")
    assert schedule.factor(50) == 1.0
    assert schedule.factor(50 + 49) == pytest.approx(0.1)
    assert schedule.factor(60) == pytest.approx(1 - 0.9 * math.sqrt(10 / 49))
    assert all(schedule.factor(step) >= schedule.factor(step + 1) for step in range(110))


class TestTorchFace:
    SCHEDULE = Schedule("cosine", 100, warmup_steps=10)

    @staticmethod
    def optimizer() -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.02, 3e-4)]
        return torch.optim.SGD(groups, lr=0.1)

    def stepped(self, count: int) -> ScheduleLR:
        scheduler = ScheduleLR(self.optimizer(), self.SCHEDULE)
        for _ in range(count):
            scheduler.optimizer.step()
            scheduler.step()
        return scheduler

    def test_each_group_follows_its_own_peak(self):
        scheduler = self.stepped(30)
        assert scheduler.get_last_lr() == [lr * self.SCHEDULE.factor(30) for lr in (0.02, 3e-4)]
        assert [group["lr"] for group in scheduler.optimizer.param_groups] == scheduler.get_last_lr()

    @pytest.mark.parametrize("save_at", [0, 5, 9, 10, 11, 60])
    def test_b1_b3_resumed_both_ways(self, save_at):
        """Built fresh and loaded, or built at its position: the uninterrupted lr, with no shift and no second position."""
        reference, saved = self.stepped(save_at + 7).get_last_lr(), self.stepped(save_at)
        loaded = ScheduleLR(self.optimizer(), self.SCHEDULE)
        loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        placed = ScheduleLR(saved.optimizer, self.SCHEDULE, last_epoch=save_at - 1)
        for scheduler in (loaded, placed):
            assert scheduler.last_epoch == save_at
            assert scheduler.get_last_lr() == saved.get_last_lr()
            for _ in range(7):
                scheduler.optimizer.step()
                scheduler.step()
            assert scheduler.get_last_lr() == reference

    def test_b11_the_state_holds_no_optimizer(self):
        assert set(self.stepped(3).state_dict()) == {"last_epoch", "schedule", "last_lr"}
