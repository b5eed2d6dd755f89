"""Group layouts, flags and save points drawn at random, through real checkpoints.

A run is saved, built anew (with other weights, possibly another offload mode and other groups), loaded under the flags
drawn, and goes on. It must be, bit for bit, the run that never stopped; where a flag leaves something out, the run in
which just that was exchanged by hand.
"""

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import nn

from support.offload import MODES, clipped_update
from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.storage import save_tensors
from trainer.config.train import OptimConfig
from trainer.errors import CheckpointMismatch
from trainer.models.state import ModelState
from trainer.optim.build import build_optimizer
from trainer.optim.groups import RUN_LOCAL
from trainer.optim.offload.base import named_parameters
from trainer.optim.offload.build import build_offload
from trainer.optim.schedule import Schedule, ScheduleState
from trainer.optim.state import OptimizerState

SHAPES = {"a": (3, 4), "b.weight": (4, 3), "c": (3, 4), "d": (7,), "e": (1,), "f": (2, 3), "g": ()}
RULES = {
    "adamw": OptimConfig(betas=(0.8, 0.9), eps=1e-6),
    "sgd": OptimConfig(type="sgd"),
    "momentum": OptimConfig(type="sgd", momentum=0.9),
    "sign_sgd": OptimConfig(type="sign_sgd", momentum=0.9),
    "muon": OptimConfig(type="muon", ns_steps=3),
    "lazy": OptimConfig(type="custom", class_path="torch.optim.Adamax"),
    "lazy group": OptimConfig(type="custom", class_path="support.offload.GroupStep", args=("lazy=true",)),
}
STEPS, GROUPS = 5, 4
SCHEDULES = [
    Schedule("constant", STEPS),
    Schedule("linear", STEPS, warmup_steps=2, decay_steps=0),
    Schedule("linear", STEPS, warmup_steps=1, decay_steps=3, min_factor=0.1, decay_shape="sqrt"),
    Schedule("cosine", STEPS, warmup_steps=2),
    Schedule("cosine", 3 * STEPS),
]
OVERRIDES = {"optim.lr": {"lr", "initial_lr"}, "optim.weight_decay": {"weight_decay"}, "scheduler": set()}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who is in which group (frozen parameters in none), and what each group holds."""

    names: tuple[str, ...]
    members: dict[str, int]
    frozen: frozenset[str]
    entries: tuple[dict[str, float], ...]

    def groups(self, rule: str, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        made = []
        for index, (name, entries) in enumerate(zip(self.names, self.entries, strict=True)):
            members = [n for n in parameters if n not in self.frozen and self.members[n] == index]
            group = {"name": name, "params": [parameters[n] for n in members], "param_names": members, **entries}
            if rule == "muon":
                group["algorithm"] = "muon" if index < GROUPS // 2 else "adamw"
            made.append(group | {"initial_lr": group["lr"]})
        return made

    def partition(self) -> set[frozenset[str]]:
        trained = self.members.keys() - self.frozen
        return {frozenset(n for n in trained if self.members[n] == g) for g in range(GROUPS)} - {frozenset()}


@dataclasses.dataclass(frozen=True)
class Flags:
    skip_optimizer: bool = False
    skip_scheduler: bool = False
    override: frozenset[str] = frozenset()
    regroup: bool = False

    @property
    def kept(self) -> frozenset[str]:
        return frozenset(entry for key in self.override for entry in OVERRIDES[key])


def layouts(rule: str, members: dict[str, int] | None = None, frozen: frozenset[str] | None = None):
    @st.composite
    def drawn(draw: Any) -> Layout:
        low = {n: 0 if rule != "muon" or len(shape) == 2 else GROUPS // 2 for n, shape in SHAPES.items()}
        high = {n: GROUPS - 1 if rule != "muon" or len(shape) != 2 else GROUPS // 2 - 1 for n, shape in SHAPES.items()}
        found = members or {name: draw(st.integers(low[name], high[name])) for name in SHAPES}
        still = frozen if frozen is not None else frozenset(draw(st.sets(st.sampled_from(list(SHAPES)), max_size=3)))
        names = tuple(f"{draw(st.text(max_size=3))}{index}" for index in range(GROUPS))
        entries = [
            {
                "lr": draw(st.sampled_from([0.1, 0.02])),
                "weight_decay": 0.0 if rule == "lazy group" else draw(st.sampled_from([0.0, 0.1])),
            }
            for _ in range(GROUPS)
        ]
        return Layout(names, found, still, tuple(entries))

    return drawn()


class Step:
    """Owner of the counter."""

    def __init__(self):
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Run:
    def __init__(self, rule: str, layout: Layout, schedule: Schedule, mode: str, flags: Flags, seed: int = 0):
        self.model = nn.Module()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            module = self.model
            for part in path:
                module.register_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(
                last, nn.Parameter(torch.randn(shape, generator=generator), requires_grad=name not in layout.frozen)
            )
        parameters = dict(self.model.named_parameters())
        built = build_offload(
            mode,  # type: ignore[arg-type]
            lambda groups: build_optimizer(RULES[rule], groups),
            layout.groups(rule, parameters),
            self.model,
            ModelState(self.model),
            **({} if mode == "none" else {"transfer": "copy", "chunk_bytes": 60}),
        )
        self.optimizer, self.progress = built.optimizer, Step()
        self.schedule = ScheduleState(schedule, self.optimizer.param_groups, overridden="scheduler" in flags.override)
        owner = OptimizerState(self.optimizer, keep=flags.kept, regroup=flags.regroup)
        self.app = AppState(model=built.weights, optimizer=owner, schedule=self.schedule, progress=self.progress)
        self.schedule.apply(0)

    def train(self) -> None:
        """One step, in which some parameters have no gradient."""
        step = self.progress.step
        generator = torch.Generator().manual_seed(step)
        pairs = [(p, torch.randn(p.shape, generator=generator)) for p in self.model.parameters()]
        used = [(p * w).sum() for i, (p, w) in enumerate(pairs) if p.requires_grad and (i + step) % 4]
        if used:
            torch.stack(used).sum().backward()
        clipped_update(self.optimizer, max_norm=1.0)
        self.progress.step += 1
        self.schedule.apply(self.progress.step)

    def bits(self) -> tuple[dict[str, Any], Any]:
        state = self.app.state_dict()
        return {name: tensor.tolist() for name, tensor in state.items() if name != "json"}, self.app.leaves()


def resume(run: Run, saved: Path, flags: Flags) -> None:
    """What a start with these flags does after it has built `run`."""
    skip = ({"optimizer"} if flags.skip_optimizer else set()) | ({"schedule"} if flags.skip_scheduler else set())
    run.app.load(saved, skip=skip)
    run.schedule.apply(run.progress.step)


def exchanged(run: Run, other: Run, flags: Flags) -> None:
    """Makes `other` by hand what a resume of `run` under these flags is."""
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), run.model.parameters(), strict=True):
            mine.copy_(theirs)
    other.progress.step = run.progress.step
    if not flags.skip_optimizer:
        home = {n: group for group in run.optimizer.param_groups for n in group["param_names"]}
        there = named_parameters(run.optimizer)
        for name, parameter in named_parameters(other.optimizer).items():
            other.optimizer.state[parameter] = copy.deepcopy(run.optimizer.state[there[name]])
        empty = {g["name"]: g for g in run.optimizer.param_groups if not g["params"]}
        for group in other.optimizer.param_groups:
            source = home[group["param_names"][0]] if group["params"] else empty.get(group["name"], {})
            group |= {k: v for k, v in source.items() if k not in RUN_LOCAL | {"name"} | flags.kept}
    if not (flags.skip_scheduler or "scheduler" in flags.override):
        other.schedule.schedule = run.schedule.schedule
    other.schedule.apply(other.progress.step)


def conflicting(run: Run, layout: Layout, flags: Flags) -> bool:
    """Whether a new group would need two values of one entry."""
    home = {n: group for group in run.optimizer.param_groups for n in group["param_names"]}
    for members in layout.partition():
        for one, another in zip(list(members), list(members)[1:], strict=False):
            a, b = home[one], home[another]
            if any(a.get(k) != b.get(k) for k in a.keys() | b.keys() if k not in RUN_LOCAL | {"name"} | flags.kept):
                return True
    return False


class Case:
    def __init__(self, rule, old, new, schedules, modes, flags, save_at):
        self.rule, self.old, self.new, self.schedules = rule, old, new, schedules
        self.modes, self.flags, self.save_at = modes, flags, save_at

    def __repr__(self) -> str:
        return f"Case{tuple(vars(self).values())}"

    def saved(self, folder: Path) -> Run:
        first = Run(self.rule, self.old, self.schedules[0], self.modes[0], Flags())
        for _ in range(self.save_at):
            first.train()
        folder.mkdir(exist_ok=True)
        save_tensors(folder, first.app.state_dict())
        return first

    def fresh(self, mode: str, schedule: Schedule, seed: int) -> Run:
        return Run(self.rule, self.new, schedule, mode, self.flags, seed=seed)

    def check(self, folder: Path) -> str:
        """Raises AssertionError if the resumed run is not the one that it should be; returns what it was held against."""
        first, flags = self.saved(folder), self.flags
        schedule = self.schedules[1]
        if flags.skip_scheduler:
            schedule = dataclasses.replace(schedule, start_step=self.save_at)
        resumed = self.fresh(self.modes[1], schedule, seed=1)
        refused = not flags.skip_optimizer and (
            conflicting(first, self.new, flags) if flags.regroup else self.old.partition() != self.new.partition()
        )
        if refused:
            with pytest.raises(
                CheckpointMismatch, match="param groups do not fit" if not flags.regroup else "hold one"
            ):
                resume(resumed, folder, flags)
            return "refused"
        resume(resumed, folder, flags)
        expected = self.fresh("none", schedule, seed=2)
        exchanged(first, expected, flags)
        plain = flags == Flags() and self.old == self.new
        for _ in range(self.save_at, STEPS):
            assert resumed.bits() == expected.bits()
            resumed.train(), expected.train()
            if plain:
                first.train()
        assert resumed.bits() == expected.bits()
        assert not plain or resumed.bits() == first.bits()
        return "the run that never stopped" if plain else "exchanged by hand"


@st.composite
def cases(draw: Any) -> Case:
    rule = draw(st.sampled_from(list(RULES)))
    old = draw(layouts(rule))
    kind = draw(st.sampled_from(["same", "same", "other entries", "other members"]))
    if kind == "same":
        new = old
    else:
        new = draw(layouts(rule, old.members if kind == "other entries" else None, old.frozen))
    flags = Flags(
        skip_optimizer=draw(st.booleans()),
        skip_scheduler=draw(st.booleans()),
        override=draw(st.frozensets(st.sampled_from(list(OVERRIDES)))),
        regroup=draw(st.booleans()),
    )
    if draw(st.booleans()):
        flags = Flags(regroup=flags.regroup and kind == "other members")
    schedules = draw(st.tuples(st.sampled_from(SCHEDULES), st.sampled_from(SCHEDULES)))
    modes = draw(st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)))
    return Case(rule, old, new, schedules, modes, flags, draw(st.integers(0, STEPS - 1)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_any_layout_flags_and_save_point(case):
    with tempfile.TemporaryDirectory() as folder:
        event(case.check(Path(folder)))


EVEN = Layout(
    ("x", "y", "z", "nobody"),
    {"a": 0, "b.weight": 1, "c": 0, "d": 2, "e": 2, "f": 1, "g": 2},
    frozenset({"f"}),
    ({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}) * 2,
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("broken", ["entries", "tensors", "schedule"])
def test_the_property_can_fail(rule, broken, monkeypatch, tmp_path):
    """Anti-inert: a restore that forgets the groups, the moments or the schedule is another run."""
    new = dataclasses.replace(EVEN, entries=({"lr": 0.03, "weight_decay": 0.0},) * 4)
    case = Case(rule, EVEN, new, (SCHEDULES[2], SCHEDULES[4]), ("none", "full"), Flags(), 3)
    case.check(tmp_path / "sound")
    monkeypatch.setattr(OptimizerState, "verify", lambda self, saved: [])
    monkeypatch.setattr(ScheduleState, "verify", lambda self, saved: [])
    if broken == "entries":
        monkeypatch.setattr("trainer.optim.state.write_entries", lambda live, saved, keep: [])
    elif broken == "schedule":
        monkeypatch.setattr(ScheduleState, "load_state_dict", lambda self, state: None)
    elif rule == "sgd":
        return  # it has no state
    else:
        load = OptimizerState.load_state_dict

        def forget(self, state):
            load(self, state)
            for entries in self.optimizer.state.values():
                for value in entries.values():
                    value.zero_()

        monkeypatch.setattr(OptimizerState, "load_state_dict", forget)
    with pytest.raises(AssertionError):
        case.check(tmp_path / "broken")
