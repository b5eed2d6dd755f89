"""Param groups and optimizer state: who is in which group, what is saved, and how it comes back."""

import copy
import sys
import types

import pytest
import torch
from torch import nn

from trainer.config.train import OptimConfig
from trainer.errors import CheckpointMismatch, ConfigError, TrainingError
from trainer.models.roles import parameter_roles
from trainer.optim.build import build_groups, build_optimizer, check_optimizer
from trainer.optim.groups import decay_groups, muon_groups
from trainer.optim.sign_sgd import SignSGD
from trainer.optim.state import OptimizerState


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        return self.output(self.hidden(self.norm(self.wte(ids))))


def make(config: OptimConfig | None = None, model: nn.Module | None = None):
    model = model or Tiny()
    config = config or OptimConfig(lr=0.01, weight_decay=0.1)
    roles = parameter_roles(model, head=model.get_submodule("output"))
    return model, build_optimizer(config, build_groups(config, model.named_parameters(), roles))


def train(model, optimizer, steps: int, start: int = 0):
    for step in range(start, start + steps):
        ids = torch.arange(step, step + 8) % 16
        nn.functional.cross_entropy(model(ids), (ids + 1) % 16).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_roles_come_from_module_types_not_names():
    roles = parameter_roles(Tiny(), head=None)
    assert roles["wte.weight"] == "embedding"
    assert parameter_roles(model := Tiny(), head=model.output)["output.weight"] == "head"
    assert roles["norm.weight"] == roles["hidden.bias"] == "vector"
    assert roles["hidden.weight"] == "matrix"


def test_decay_policy_claims_every_parameter_once():
    _, optimizer = make()
    members = {group["name"]: group["param_names"] for group in optimizer.param_groups}
    assert members == {
        "decay": ["hidden.weight", "output.weight"],
        "no_decay": ["wte.weight", "norm.weight", "norm.bias", "hidden.bias"],
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("decay", "kept"),
    [("matrices", ["wte.weight", "norm.weight", "norm.bias", "hidden.bias"]), ("all", None)]
    + [("weights", ["norm.weight", "norm.bias", "hidden.bias"])],
)
def test_what_decays_is_a_choice(decay, kept):
    """ "weights" is the rule of the Hugging Face Trainer, "all" that of one group for everything."""
    _, optimizer = make(OptimConfig(lr=0.01, weight_decay=0.1, decay=decay))
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["decay"]["weight_decay"] == 0.1
    assert groups.get("no_decay", {"param_names": None})["param_names"] == kept
    assert sum(len(group["params"]) for group in groups.values()) == 6


def test_unclaimed_and_twice_claimed_parameters_are_errors():
    model = Tiny()
    named = list(model.named_parameters())
    roles = parameter_roles(model)
    with pytest.raises(TrainingError, match=r"'extra' is claimed by no param group"):
        decay_groups([*named, ("extra", nn.Parameter(torch.zeros(2)))], roles, weight_decay=0.0)
    with pytest.raises(TrainingError, match="two param groups"):
        decay_groups([*named, ("hidden.weight", model.hidden.weight)], roles, weight_decay=0.0)


@pytest.mark.parametrize("config", [OptimConfig(lr=0.01), OptimConfig(type="sgd", lr=0.01, momentum=0.9)])
def test_state_made_at_construction_changes_nothing(config):
    """F3, F4: complete before the first step, Adam's counter at 0, and the same run as torch's lazy state."""
    model, optimizer = make(config)
    before = copy.deepcopy(model.state_dict())
    state = OptimizerState(optimizer).state_dict()["state"]
    assert set(state) == {name for name, _ in model.named_parameters()}
    for name, entries in state.items():
        assert entries and all(
            not torch.is_tensor(value) or value.count_nonzero() == 0 for value in entries.values()
        ), name
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    lazy_model = Tiny()
    groups = decay_groups(
        lazy_model.named_parameters(),
        parameter_roles(lazy_model, head=lazy_model.output),
        weight_decay=config.weight_decay,
    )
    if config.type == "adamw":
        lazy = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    else:
        lazy = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    train(model, optimizer, 3)
    train(lazy_model, lazy, 3)
    for ours, theirs in zip(model.parameters(), lazy_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_round_trip_continues_bit_for_bit_and_would_not_without_the_restore():
    model, optimizer = make()
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.0075
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2, start=3)

    def resumed(restore: bool):
        other, fresh = make()
        other.load_state_dict(weights)
        held = fresh.param_groups[0]
        if restore:
            OptimizerState(fresh).load_state_dict(copy.deepcopy(saved))
            assert held is fresh.param_groups[0]
            assert held["lr"] == 0.0075
            assert OptimizerState(fresh).verify(saved) == []
        train(other, fresh, 2, start=3)
        return all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))

    assert resumed(restore=True)
    assert not resumed(restore=False)


def test_run_local_entries_keep_the_live_value_and_are_not_saved():
    _, optimizer = make()
    saved = OptimizerState(optimizer).state_dict()
    entries = saved["groups"][0]["entries"]
    assert {"lr", "initial_lr", "betas", "eps", "weight_decay"} <= set(entries)
    assert not {"params", "fused", "foreach", "capturable", "differentiable"} & set(entries)
    foreign = copy.deepcopy(saved)
    foreign["groups"][0]["entries"]["fused"] = "poison"
    OptimizerState(optimizer).load_state_dict(foreign)
    assert optimizer.param_groups[0]["fused"] is True


def test_groups_are_matched_by_members_never_by_position():
    model, optimizer = make()
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    saved["groups"][0]["entries"]["lr"], saved["groups"][1]["entries"]["lr"] = 0.5, 0.25
    saved["groups"].reverse()
    OptimizerState(optimizer).load_state_dict(saved)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {"decay": 0.5, "no_decay": 0.25}


def test_changed_membership_names_the_parameters_that_moved():
    _, optimizer = make()
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    saved["groups"][0]["param_names"].remove("output.weight")
    saved["groups"][1]["param_names"].append("output.weight")
    with pytest.raises(CheckpointMismatch, match=r"output.weight: moved from group 'no_decay' to 'decay'"):
        OptimizerState(optimizer).load_state_dict(saved)


def test_regroup_takes_each_parameters_own_entries_and_refuses_two_values():
    _, optimizer = make()
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    decay, no_decay = saved["groups"]
    no_decay["param_names"].remove("hidden.bias")
    split = {"name": "bias", "param_names": ["hidden.bias"], "entries": copy.deepcopy(no_decay["entries"])}
    saved["groups"].append(split)
    for group in saved["groups"]:
        group["entries"]["lr"] = 0.125
    with pytest.raises(CheckpointMismatch, match="--resume.regroup"):
        OptimizerState(optimizer).load_state_dict(saved)
    OptimizerState(optimizer, regroup=True).load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    split["entries"]["lr"] = 0.5
    with pytest.raises(CheckpointMismatch, match=r"'no_decay'.*different 'lr' \('no_decay': 0.125, 'bias': 0.5\)"):
        OptimizerState(optimizer, regroup=True).load_state_dict(saved)
    OptimizerState(optimizer, regroup=True, keep=frozenset({"lr"})).load_state_dict(saved)


def test_overridden_entries_keep_the_configs_value():
    _, optimizer = make()
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    for group in saved["groups"]:
        group["entries"] |= {"lr": 1.0, "initial_lr": 1.0, "eps": 1e-3}
    owner = OptimizerState(optimizer, keep=frozenset({"lr", "initial_lr"}))
    owner.load_state_dict(saved)
    assert owner.verify(saved) == []
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["eps"] == 1e-3


def test_entry_that_the_checkpoint_lacks_keeps_its_live_value(monkeypatch):
    lines = []
    monkeypatch.setattr("trainer.optim.state.logger.info", lines.append)
    _, optimizer = make()
    saved = copy.deepcopy(OptimizerState(optimizer).state_dict())
    del saved["groups"][0]["entries"]["eps"]
    OptimizerState(optimizer).load_state_dict(saved)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    assert lines == ["group 'decay': the checkpoint lacks ['eps']; the config's values stay"]


def test_muon_groups_are_told_by_module_types():
    """G4: hidden matrices to Muon; embedding, head, norms and biases to AdamW, whatever they are called. G7: two lrs."""
    _, optimizer = make(OptimConfig(type="muon", lr=0.02, adamw_lr=3e-4, weight_decay=0.1))
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["muon"]["param_names"] == ["hidden.weight"]
    assert groups["adamw_decay"]["param_names"] == ["output.weight"]
    assert groups["adamw"]["param_names"] == ["wte.weight", "norm.weight", "norm.bias", "hidden.bias"]
    assert {name: group["initial_lr"] for name, group in groups.items()} == {
        "muon": 0.02,
        "adamw_decay": 3e-4,
        "adamw": 3e-4,
    }


MIXTURE = {"experts.up": "experts", "experts.down": "experts", "gate.weight": "router", "gate.bias": "vector"}


@pytest.mark.parametrize("decay", ["matrices", "weights", "all"])
def test_a_mixture_of_experts_has_groups_of_its_own(decay):
    """Experts and routers decay like other matrices; under Muon experts are its own, a router is AdamW's."""
    model = Tiny()
    shapes = {"experts.up": (4, 6, 8), "experts.down": (4, 8, 6), "gate.weight": (4, 8), "gate.bias": (4,)}
    named = [*model.named_parameters(), *((name, nn.Parameter(torch.zeros(shapes[name]))) for name in MIXTURE)]
    roles = parameter_roles(model, head=model.output) | MIXTURE

    plain = {g["name"]: g for g in decay_groups(named, roles, weight_decay=0.1, decay=decay)}
    assert {"experts.up", "experts.down", "gate.weight", "hidden.weight"} <= set(plain["decay"]["param_names"])
    groups = muon_groups(named, roles, lr=0.02, adamw_lr=3e-4, weight_decay=0.1, decay=decay)
    found = {g["name"]: (g["algorithm"], g["lr"], g["initial_lr"], g["weight_decay"], g["param_names"]) for g in groups}
    assert found["muon"] == ("muon", 0.02, 0.02, 0.1, ["hidden.weight"])
    assert found["experts"] == ("muon", 0.02, 0.02, 0.1, ["experts.up", "experts.down"])
    assert found["router"] == ("adamw", 3e-4, 3e-4, 0.1, ["gate.weight"])
    assert ("gate.bias" in found["adamw_decay"][-1]) == (decay == "all")
    optimizer = build_optimizer(OptimConfig(type="muon"), groups)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1] * len(groups)


def test_sign_sgd_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    plain = SignSGD([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([0.3, -7.0, 0.0])
    plain.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.95 - 0.1, -1.9 + 0.1, 2.85]))
    with_momentum = SignSGD([weight], lr=0.1, momentum=0.9)
    before = weight.detach().clone()
    with_momentum.step()
    weight.grad = torch.tensor([-0.1, -7.0, 0.0])  # too small to turn the momentum of the first element
    with_momentum.step()
    torch.testing.assert_close(weight.detach(), before + torch.tensor([-0.2, 0.2, 0.0]))


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig(type="muon", lr=0.02, adamw_lr=3e-3),
        OptimConfig(type="sign_sgd", lr=1e-3, momentum=0.9),
        OptimConfig(type="custom", lr=1e-3, class_path="torch.optim.Adamax"),
        OptimConfig(type="custom", lr=1e-3, class_path="torch.optim.RMSprop", args=("momentum=0.9", "centered=true")),
    ],
    ids=lambda config: config.class_path or config.type,
)
def test_every_optimizer_continues_bit_for_bit(config, tmp_path):
    """Through a real checkpoint, optimizers of torch that make their state only in the first step included."""
    from trainer.checkpoint.app_state import AppState
    from trainer.checkpoint.storage import save_tensors
    from trainer.models.state import ModelState

    model, optimizer = make(config)
    train(model, optimizer, 3)
    tmp_path.mkdir(exist_ok=True)
    save_tensors(tmp_path, AppState(model=ModelState(model), optimizer=OptimizerState(optimizer)).state_dict())
    train(model, optimizer, 2, start=3)

    def resumed(skip: set[str]) -> bool:
        other, fresh = make(config)
        AppState(model=ModelState(other), optimizer=OptimizerState(fresh)).load(tmp_path, skip=skip)
        train(other, fresh, 2, start=3)
        return all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))

    assert resumed(skip=set())
    assert not resumed(skip={"optimizer"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"class_path": "torch.optim.NoSuch"}, "torch.optim.NoSuch.*cannot be imported"),
        ({"class_path": "torch.optim.SGD", "args": ("momentum",)}, "there is no '='"),
        ({"class_path": "torch.optim.SGD", "args": ("momentum=much",)}, "is not JSON"),
        ({"class_path": "torch.optim.SGD", "args": ("nonsense=1",)}, "does not take these arguments"),
        ({"class_path": "torch.optim.LBFGS", "decay": "all"}, "several times in a step"),
        ({"class_path": "torch.optim.SparseAdam", "weight_decay": 0.0}, "sparse gradients only"),
        ({"class_path": "torch.nn.Linear"}, "does not take these arguments"),
    ],
)
def test_a_custom_optimizer_that_cannot_be_made_is_a_config_error(entries, message):
    with pytest.raises(ConfigError, match=message):
        make(OptimConfig(type="custom", **entries))


DION = OptimConfig(type="muon", implementation="dion")


@pytest.mark.parametrize("check", [check_optimizer, lambda config: make(config)])
def test_dion_that_is_not_there_is_a_config_error_that_says_how_to_get_it(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "dion", None)
    with pytest.raises(ConfigError, match=r"(?s)cannot be imported.*uv sync --extra dion.*implementation = \"own\""):
        check(DION)
    another = types.ModuleType("dion")
    another.__file__ = "/somewhere/dion/__init__.py"
    monkeypatch.setitem(sys.modules, "dion", another)
    with pytest.raises(ConfigError, match=r"/somewhere/dion/__init__.py has no Muon"):
        check(DION)
    check(OptimConfig(type="muon"))


def test_an_optimizer_that_cannot_be_had_is_found_out_before_anything_is_built():
    with pytest.raises(ConfigError, match="NoSuch"):
        check_optimizer(OptimConfig(type="custom", class_path="torch.optim.NoSuch"))
    with pytest.raises(ConfigError, match="not JSON"):
        check_optimizer(OptimConfig(type="custom", class_path="torch.optim.SGD", args=("momentum=much",)))
