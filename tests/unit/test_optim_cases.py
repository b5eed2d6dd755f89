"""Failures that users of trainers met with groups, schedules and distributed optimizers: the outcome that is right."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.offload import MODES, Run
from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.leaves import flatten_leaves
from trainer.checkpoint.storage import save_tensors
from trainer.config.train import OptimConfig
from trainer.errors import CheckpointMismatch
from trainer.optim.build import build_optimizer
from trainer.optim.groups import describe_group, match_groups
from trainer.optim.schedule import Schedule, ScheduleState
from trainer.optim.state import OptimizerState
from trainer.optim.torch_scheduler import ScheduleLR

COPY = {"transfer": "copy", "chunk_bytes": 300}


def options(mode: str) -> dict[str, Any]:
    return {} if mode == "none" else COPY


def save(state: AppState, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_tensors(folder, state.state_dict())
    return folder


def adamw(lr: float, **entries: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))]
    groups = [
        {"name": name, "params": [p], "param_names": [name], "lr": lr, "initial_lr": lr, "weight_decay": 0.1, **entries}
        for name, p in zip(("weight", "bias"), parameters, strict=True)
    ]
    return build_optimizer(OptimConfig(lr=lr), groups)


def step(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


# --- (A) groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_at", [30])
def test_a5_initial_lr_comes_back_and_a_scheduler_can_be_rebuilt_both_ways(tmp_path, save_at):
    """A peak that is lost makes torch's constructor raise KeyError, or take the decayed lr for the peak."""
    schedule = Schedule("cosine", 100)
    straight = adamw(3e-4)
    scheduler = ScheduleLR(straight, schedule)
    for index in range(save_at):
        step(straight, index), scheduler.step()
    saved = save(AppState(optimizer=OptimizerState(straight)), tmp_path)
    state = json.loads(json.dumps(scheduler.state_dict()))
    step(straight, save_at), scheduler.step()

    for last_epoch in (-1, save_at - 1):
        fresh = adamw(1.0)
        AppState(optimizer=OptimizerState(fresh)).load(saved)
        assert [group["initial_lr"] for group in fresh.param_groups] == [3e-4, 3e-4]
        again = ScheduleLR(fresh, schedule, last_epoch=last_epoch)
        if last_epoch == -1:
            again.load_state_dict(state)
        assert again.get_last_lr() == [3e-4 * schedule.factor(save_at)] * 2
        step(fresh, save_at), again.step()
        assert again.get_last_lr() == scheduler.get_last_lr()


def test_a6_values_that_are_no_tensors_come_back(tmp_path):
    """Built with 1e-3, moved to 3e-4, saved: a fresh one has 3e-4, whatever the release of torch does."""
    optimizer = adamw(1e-3)
    for group in optimizer.param_groups:
        group["lr"] = 3e-4
    step(optimizer)
    saved = save(AppState(optimizer=OptimizerState(optimizer)), tmp_path)
    fresh = adamw(1e-3)
    AppState(optimizer=OptimizerState(fresh)).load(saved)
    assert [group["lr"] for group in fresh.param_groups] == [3e-4, 3e-4]


@pytest.mark.parametrize("mode", MODES)
def test_entries_that_the_first_step_makes_come_back(tmp_path, mode):
    """A counter that an optimizer puts into its groups by and by is not there yet when the checkpoint is loaded."""
    first = Run(mode, "lazy", **options(mode))
    first.train(3)
    saved = save(first.app, tmp_path)
    second = Run(mode, "lazy", seed=9, **options(mode))
    second.app.load(saved)
    assert [group["step"] for group in second.optimizer.param_groups] == [3, 3]
    first.train(2), second.train(2)
    assert second.bits() == first.bits()


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path):
    optimizer = adamw(1e-3)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(3e-4)
    saved = save(AppState(optimizer=OptimizerState(optimizer)), tmp_path)
    fresh = adamw(1e-3)
    held = torch.tensor(1e-3)
    for group in fresh.param_groups:
        group["lr"] = held
    AppState(optimizer=OptimizerState(fresh)).load(saved)
    assert fresh.param_groups[0]["lr"] is held
    assert torch.equal(held, torch.tensor(3e-4))


def test_empty_groups_are_told_apart_by_name():
    """Two groups that nobody is in have the same members; each keeps its own entries all the same."""
    saved = [{"name": n, "param_names": [], "entries": {"lr": lr}} for n, lr in (("a", 0.1), ("b", 0.2), ("gone", 0.3))]
    live = [{"name": n, "param_names": [], "params": [], "lr": 1.0} for n in ("b", "new", "a")]
    found = {group["name"]: partner["entries"]["lr"] for group, partner in match_groups(live, saved)}
    assert found == {"a": 0.1, "b": 0.2}


def test_groups_are_described_for_people():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    named = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    group = {
        "name": "muon",
        "algorithm": "muon",
        "params": [p for _, p in named],
        "param_names": [name for name, _ in named],
        "initial_lr": 0.02,
        "weight_decay": 0.1,
    }
    assert (
        describe_group(group)
        == "group muon by muon (3 tensors, 0.0 M): peak lr 0.02, weight decay 0.1: layers.*.weight"
    )


# --- (B) schedules --------------------------------------------------------------------------------------------------

SCHEDULES = {
    "constant": Schedule("constant", 50, warmup_steps=10),
    "linear": Schedule("linear", 50, warmup_steps=10),
    "wsd": Schedule("linear", 50, warmup_steps=10, decay_steps=15),
    "sqrt": Schedule("linear", 50, warmup_steps=10, decay_steps=15, decay_shape="sqrt"),
    "cosine": Schedule("cosine", 50, warmup_steps=10),
}


@pytest.mark.parametrize("schedule_first", [True, False])
@pytest.mark.parametrize("save_at", [0, 9, 10, 11, 25, 34, 35, 36, 49])
@pytest.mark.parametrize("name", SCHEDULES)
def test_b1_lr_is_that_of_the_run_that_never_stopped(tmp_path, name, save_at, schedule_first):
    """Whichever is loaded first, optimizer or schedule, before, on and after each milestone: no difference at all."""

    def lrs(optimizer, schedule, start: int) -> list[list[float]]:
        found = []
        for done in range(start, 50):
            schedule.apply(done)
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    straight = adamw(0.01)
    reference = lrs(straight, ScheduleState(SCHEDULES[name], straight.param_groups), 0)
    first = adamw(0.01)
    schedule = ScheduleState(SCHEDULES[name], first.param_groups)
    schedule.apply(save_at)
    saved = save(AppState(optimizer=OptimizerState(first), schedule=schedule), tmp_path)
    fresh = adamw(1.0)
    restored = ScheduleState(Schedule("constant", 7), fresh.param_groups)
    owners = {"optimizer": OptimizerState(fresh), "schedule": restored}
    order = ("schedule", "optimizer") if schedule_first else ("optimizer", "schedule")
    AppState(**{owner: owners[owner] for owner in order}).load(saved)  # type: ignore[arg-type]
    assert [group["lr"] for group in fresh.param_groups] == reference[save_at]
    assert lrs(fresh, restored, save_at) == reference[save_at:]


def test_b3_a_position_is_never_added_to_another(tmp_path):
    """Cosine over 100, saved at 40: 41 comes next, not 81; the schedule has no counter that could be moved twice."""
    schedule = Schedule("cosine", 100)
    first = adamw(0.01)
    state = ScheduleState(schedule, first.param_groups)
    state.apply(40)
    saved = save(AppState(optimizer=OptimizerState(first), schedule=state), tmp_path)
    fresh = adamw(0.01)
    restored = ScheduleState(schedule, fresh.param_groups)
    AppState(optimizer=OptimizerState(fresh), schedule=restored).load(saved)
    restored.apply(40), restored.apply(41)
    assert [group["lr"] for group in fresh.param_groups] == [0.01 * schedule.factor(41)] * 2
    assert set(restored.state_dict()) == {field.name for field in dataclasses.fields(Schedule)}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "momentum", "lazy"])
@pytest.mark.parametrize("mode", MODES)
def test_b4_whatever_is_written_is_read(tmp_path, mode, optimizer):
    """Nothing is saved that a plain load leaves out: keys written are keys read, and all that differed is the saved."""
    first = Run(mode, optimizer, schedule=Schedule("linear", 20, warmup_steps=4), **options(mode))
    first.train(2)
    saved = save(first.app, tmp_path)
    second = Run(mode, optimizer, seed=9, schedule=Schedule("constant", 7), **options(mode))
    before = dict(flatten_leaves(second.app.leaves()))
    second.app.load(saved)
    written, read = dict(flatten_leaves(first.app.leaves())), dict(flatten_leaves(second.app.leaves()))
    assert read == written
    assert any(before.get(key) != value for key, value in written.items())
    assert second.bits() == first.bits()


def test_b11_schedule_state_holds_no_optimizer():
    optimizer = adamw(0.01)
    state = ScheduleState(Schedule("cosine", 100, warmup_steps=10), optimizer.param_groups).state_dict()
    assert json.loads(json.dumps(state)) == state


# --- (G) layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("saved_tag", "live_tag"), [("ep", None), (None, "ep"), ("ep", "dp")])
def test_g3_a_layouts_tag_is_the_live_runs(tmp_path, mode, saved_tag, live_tag):
    """Saved with expert parallelism and resumed without, or the reverse: the rest is the checkpoint's, in every mode."""

    def tagged(seed: int, tag: str | None) -> Run:
        run = Run(mode, "muon", seed=seed, **options(mode))
        for group in run.optimizer.param_groups:
            if tag is not None:
                group["distributed_mesh_name"] = tag
        return run

    first, second = tagged(0, saved_tag), tagged(9, live_tag)
    first.train(3)
    saved = save(first.app, tmp_path)
    second.app.load(saved)
    for group in second.optimizer.param_groups:
        assert group.get("distributed_mesh_name") == live_tag
        assert group["step"] == 3
    assert second.bits() == first.bits()


def test_g6_a_state_of_two_groups_meets_a_run_of_three(tmp_path):
    def make(*split: list[int], names: str = "abc") -> torch.optim.Optimizer:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(4)) for _ in range(3)]
        groups = [
            {"name": n, "params": [parameters[i] for i in s], "param_names": [f"p{i}" for i in s], "initial_lr": 0.01}
            for n, s in zip(names, split, strict=False)
        ]
        return build_optimizer(OptimConfig(lr=0.01), [group | {"lr": 0.01} for group in groups])

    two = make([0], [1, 2])
    step(two)
    saved = save(AppState(optimizer=OptimizerState(two)), tmp_path)
    before = copy.deepcopy(OptimizerState(make([0], [1], [2])).state_dict()["groups"])
    three = make([0], [1], [2])
    with pytest.raises(CheckpointMismatch, match=r"(?s)p2: moved from group 'b' to 'c'.*--resume.regroup"):
        AppState(optimizer=OptimizerState(three)).load(saved)
    assert OptimizerState(three).state_dict()["groups"] == before
    three = make([0], [1], [2])
    AppState(optimizer=OptimizerState(three, regroup=True)).load(saved)
    for a, b in zip(*((p for g in o.param_groups for p in g["params"]) for o in (two, three)), strict=True):
        assert all(torch.equal(value, three.state[b][key]) for key, value in two.state[a].items())


def test_g7_both_halves_follow_their_own_peak_and_are_logged():
    from trainer.train.loop import learning_rates

    weights = {"matrix": nn.Parameter(torch.randn(4, 4)), "bias": nn.Parameter(torch.randn(4))}
    config = OptimConfig(type="muon", lr=0.02, adamw_lr=3e-4)
    groups = [
        {"name": n, "params": [p], "param_names": [n], "algorithm": a, "lr": lr, "initial_lr": lr, "weight_decay": 0.0}
        for (n, p), a, lr in zip(weights.items(), ("muon", "adamw"), (0.02, 3e-4), strict=True)
    ]
    optimizer = build_optimizer(config, groups)
    schedule = ScheduleState(Schedule("cosine", 100), optimizer.param_groups)
    schedule.apply(50)
    assert learning_rates(optimizer) == {"lr": pytest.approx(0.01), "lr_bias": pytest.approx(1.5e-4)}
    assert learning_rates(adamw(0.1)) == {"lr": 0.1}
