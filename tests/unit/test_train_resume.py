"""What a resume takes from the checkpoint and what from the config, and that both together make a sound run."""

import pytest

from trainer.config.load import Loaded, load_config
from trainer.config.run import SFTConfig
from trainer.errors import CheckpointMismatch
from trainer.optim.build import build_schedule
from trainer.optim.schedule import ScheduleState
from trainer.train.resume import effective, plan

BASE = ["--model.name=m", "--max-steps=200", "--data.fake"]


def loaded(*flags: str) -> Loaded[SFTConfig]:
    return load_config(SFTConfig, [*BASE, *flags])


def saved(*flags: str) -> dict:
    return loaded(*flags).config.model_dump(mode="json")


def joined(before: dict, *flags: str) -> SFTConfig:
    now = loaded("--resume", *flags)
    return effective(now.config, plan(now.config, before), now.origins)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            ["--optim.lr=1e-3"],
            ["--optim.lr=1e-2", "--scheduler.min-lr=5e-3", "--resume.override=scheduler"],
            r"(?s)min_lr must not exceed.*min_lr = 0.005  \(flag.*optim.lr = 0.001  \(checkpoint\).*--resume.override optim",
        ),
        (
            ["--optim.lr=1e-3", "--scheduler.min-lr=1e-4"],
            ["--optim.lr=1e-5", "--resume.override=optim.lr"],
            r"(?s)min_lr must not exceed.*min_lr = 0.0001  \(checkpoint\).*--resume.override scheduler",
        ),
        (
            ["--scheduler.decay-steps=100"],
            ["--scheduler.decay-steps=20", "--max-steps=80"],
            r"(?s)more than the run has.*decay_steps = 100  \(checkpoint\).*--resume.override scheduler",
        ),
    ],
)
def test_values_of_both_sides_that_break_a_rule_together_are_refused(before, now, told):
    """The first made lr climb to five times the peak; after the others no later checkpoint could be resumed from."""
    with pytest.raises(CheckpointMismatch, match=told):
        joined(saved(*before), *now)
    joined(saved(*before), *now, "--resume.override=optim,scheduler")


def test_what_a_resume_trains_with_can_be_resumed_again():
    before = saved("--optim.lr=1e-3", "--scheduler.min-lr=1e-4")
    first = joined(before, "--optim.lr=1e-2", "--resume.override=optim.lr")
    assert (first.optim.lr, first.scheduler.min_lr) == (1e-2, 1e-4)
    assert joined(first.model_dump(mode="json"), "--optim.lr=5.0") == first.model_copy(
        update={"resume": joined(before, "--optim.lr=5.0").resume}
    )


def test_another_peak_leaves_min_lr_where_it_is():
    """min_lr is a learning rate: under a peak ten times as high it is another fraction of it."""
    first = loaded("--optim.lr=1e-3", "--scheduler.min-lr=1e-4", "--scheduler.type=cosine").config
    state = ScheduleState(build_schedule(first.scheduler, lr=first.optim.lr, total_steps=200), []).state_dict()
    config = joined(first.model_dump(mode="json"), "--optim.lr=1e-2", "--resume.override=optim.lr")
    groups = [{"name": "a", "lr": 1e-2, "initial_lr": 1e-2}]
    schedule = build_schedule(config.scheduler, lr=config.optim.lr, total_steps=300)
    owner = ScheduleState(schedule, groups, keeps_floor=True)
    owner.load_state_dict(state)
    assert owner.verify(state) == []
    assert owner.schedule == build_schedule(config.scheduler, lr=config.optim.lr, total_steps=200)
    owner.apply(200)
    assert groups[0]["lr"] == pytest.approx(config.scheduler.min_lr, rel=1e-12)


def test_overriding_a_custom_optimizers_arguments_keeps_what_they_set():
    """Those that were left out as well, or the table would say "-> config" and the checkpoint's would be used."""
    custom = ("--optim.type=custom", "--optim.class-path=torch.optim.Adam")
    before = saved(*custom, '--optim.args=["betas=[0.9, 0.99]"]')
    now = loaded(*custom, "--optim.args=amsgrad=false", "--resume", "--resume.override=optim.args").config
    assert plan(now, before).keep_group_entries == {"betas", "amsgrad"}
