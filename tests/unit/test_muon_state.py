"""Muon's state goes through a checkpoint: bit-equal afterwards, with the groups' step counter."""

import copy
import json

import pytest
import torch
from torch import nn

from trainer.optim.muon import Muon
from trainer.optim.state import OptimizerState


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 12, bias=False)
        self.hidden = nn.Linear(12, 8)
        self.output = nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        return self.output(self.hidden(self.qkv(self.wte(ids)).tanh()))


def make(**options) -> tuple[Tiny, Muon]:
    model = Tiny()
    named = dict(model.named_parameters())
    roles = {
        "fused": ["qkv.weight"],
        "muon": ["hidden.weight"],
        "adamw": ["wte.weight", "hidden.bias", "output.weight"],
    }
    groups = [
        {"name": n, "params": [named[m] for m in members], "param_names": members} for n, members in roles.items()
    ]
    groups[0]["split_sizes"] = (6, 3, 3)
    groups[2] |= {"algorithm": "adamw", "lr": 0.003}
    optimizer = Muon(groups, lr=0.02, weight_decay=0.1, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return model, optimizer


def train(model: Tiny, optimizer: Muon, steps: range) -> None:
    for step in steps:
        ids = torch.arange(step, step + 8) % 16
        nn.functional.cross_entropy(model(ids), (ids + 1) % 16).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model: Tiny, optimizer: Muon) -> tuple[dict, dict]:
    """As a checkpoint holds it: tensors apart, groups as JSON."""
    state = OptimizerState(optimizer).state_dict()
    moments = {n: {k: v.clone() for k, v in entries.items()} for n, entries in state["state"].items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, {"state": moments, "groups": json.loads(json.dumps(state["groups"]))}


def load(saved: tuple[dict, dict], *, groups: bool = True, **options) -> tuple[Tiny, Muon]:
    model, optimizer = make(**options)
    model.load_state_dict(saved[0])
    owner = OptimizerState(optimizer)
    fresh = json.loads(json.dumps(owner.state_dict()["groups"]))
    owner.load_state_dict(saved[1] | ({} if groups else {"groups": fresh}))
    return model, optimizer


def same(a: tuple[Tiny, Muon], b: tuple[Tiny, Muon]) -> bool:
    (weights, moments), (others, other_moments) = save(*a), save(*b)
    equal = all(torch.equal(weights[name], others[name]) for name in weights)
    left, right = moments["state"], other_moments["state"]
    equal &= all(torch.equal(left[n][k], right[n][k]) for n in left for k in left[n])
    return equal and moments["groups"] == other_moments["groups"]


def test_a_resumed_run_is_the_run_that_went_on():
    """A1: saved at 60, the first resumed step is 61; five steps later the counter reads 65, never 6."""
    straight = make()
    train(*straight, range(60))
    saved = save(*straight)
    train(*straight, range(60, 61))
    resumed = load(saved)
    assert [group["step"] for group in resumed[1].param_groups] == [60, 60, 60]
    train(*resumed, range(60, 61))
    assert [group["step"] for group in resumed[1].param_groups] == [61, 61, 61]
    assert same(resumed, straight)
    train(*resumed, range(61, 65))
    train(*straight, range(61, 65))
    assert [group["step"] for group in resumed[1].param_groups] == [65, 65, 65]
    assert same(resumed, straight)


def test_without_the_groups_the_run_is_another():
    """Anti-inert: with the counter lost, Adam's bias correction starts over and its first updates are too large."""
    straight = make()
    train(*straight, range(60))
    saved = save(*straight)
    train(*straight, range(60, 61))
    lost = load(saved, groups=False)
    train(*lost, range(60, 61))
    assert [group["step"] for group in lost[1].param_groups] == [1, 1, 1]
    before, right, wrong = saved[0]["wte.weight"], straight[0].wte.weight, lost[0].wte.weight
    assert (wrong - before).abs().sum() > 1.3 * (right - before).abs().sum()


def test_group_entries_of_the_checkpoint_win():
    straight = make(compute_dtype="float32", ns_steps=4, momentum=0.9)
    straight[1].param_groups[1]["lr"] = 0.0123
    train(*straight, range(3))
    resumed = load(save(*straight), compute_dtype="float64", ns_steps=5, momentum=0.95)
    group = resumed[1].param_groups[1]
    assert (group["compute_dtype"], group["ns_steps"], group["momentum"], group["lr"]) == ("float32", 4, 0.9, 0.0123)
    assert resumed[1].param_groups[0]["split_sizes"] == (6, 3, 3)
    train(*straight, range(3, 6))
    train(*resumed, range(3, 6))
    assert same(resumed, straight)


@pytest.mark.parametrize("through", ["torch.save", "memory"])
def test_torchs_own_state_dict_round_trips(through, tmp_path):
    straight = make()
    train(*straight, range(4))
    state = {"model": straight[0].state_dict(), "optimizer": straight[1].state_dict()}
    if through == "torch.save":
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt")
    state = copy.deepcopy(state)  # torch's state dicts are references
    resumed = make()
    resumed[0].load_state_dict(state["model"])
    resumed[1].load_state_dict(state["optimizer"])
    assert [group["step"] for group in resumed[1].param_groups] == [4, 4, 4]
    train(*straight, range(4, 7))
    train(*resumed, range(4, 7))
    assert same(resumed, straight)
