"""Both offload modes behave as the torch Optimizer that they wrap: signatures, groups, hooks, state dicts."""

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from support.offload import Run, group_step, groups_of
from trainer.errors import CheckpointMismatch, TrainingError
from trainer.models.state import ModelState
from trainer.optim.offload.base import OffloadOptimizer
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.full import FullCPUOffloadOptimizer
from trainer.optim.offload.state import CPUOffloadOptimizer

CLASSES = (OffloadOptimizer, CPUOffloadOptimizer, FullCPUOffloadOptimizer)
OFFLOADED = ("optimizer", "full")


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_overridden_methods_have_optimizers_signatures(cls):
    """Callers pass these arguments by keyword (torch's checkpoint code does for load_state_dict)."""
    checked = 0
    for name, base in inspect.getmembers(Optimizer, inspect.isfunction):
        if name != "__init__" and getattr(cls, name) is not base:
            assert shape_of(getattr(cls, name)) == shape_of(base), name
            checked += 1
    assert checked >= 9


@pytest.mark.parametrize("mode", OFFLOADED)
def test_it_is_an_optimizer_with_the_inner_ones_groups_and_state(mode):
    optimizer = Run(mode).optimizer
    assert isinstance(optimizer, Optimizer) and isinstance(optimizer, OffloadOptimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.defaults is optimizer.inner.defaults
    assert optimizer.mode == mode
    assert "initial_lr: 0.01" in repr(optimizer)


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_scheduler_moves_the_lr_that_steps_use_after_a_load(mode, transfer):
    """A load that rebinds the groups leaves the scheduler with dead ones, and lr stands still."""
    run = Run(mode, "sgd", transfer=transfer)
    optimizer = run.optimizer
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=3)
    groups = list(optimizer.param_groups)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))

    moved = []
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(3):
        before = weight.detach().clone()
        gradient = torch.ones_like(weight)
        optimizer.zero_grad()
        weight.grad = gradient
        decay = optimizer.param_groups[0]["weight_decay"]
        optimizer.step()
        scheduler.step()
        moved.append(((before - weight) / (1 + decay * before)).mean().item())
    assert moved == pytest.approx([0.05, 0.05 * 0.7, 0.05 * 0.4], rel=1e-4)


@pytest.mark.parametrize("mode", OFFLOADED)
def test_each_hook_runs_once_per_step(mode):
    """A step in chunks is one step: hooks of the wrapper, the wrapped optimizer and torch's global ones see one."""
    run = Run(mode, "adamw", transfer="copy", chunk_bytes=300)
    optimizer, seen = run.optimizer, []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    optimizer.inner.register_step_pre_hook(lambda o, args, kwargs: seen.append(("inner pre", o)))
    optimizer.inner.register_step_post_hook(lambda o, args, kwargs: seen.append(("inner post", o)))
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(("global", o)))
    try:
        run.train()
    finally:
        handle.remove()
    assert len(run.optimizer._chunks) > 1
    inner = optimizer.inner
    assert seen == [
        ("pre", optimizer), ("inner pre", inner), ("inner post", inner), ("post", optimizer), ("global", optimizer)
    ]  # fmt: skip


@pytest.mark.parametrize("mode", OFFLOADED)
def test_state_dict_hooks_get_the_wrapper(mode):
    optimizer, seen = Run(mode).optimizer, []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("state pre", o)))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mark": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(("load pre", o, state["mark"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("load post", o)), prepend=True)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state_dict=state)
    assert seen == [("state pre", optimizer), ("load pre", optimizer, 1), ("load post", optimizer)]


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_closure_is_called_once_with_gradients_on(mode, transfer):
    run, calls = Run(mode, transfer=transfer, chunk_bytes=300), []

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append(1)
        run.optimizer.zero_grad()
        run.backward()
        return 7.5

    reference = Run("none")
    reference.train()
    assert run.optimizer.step(closure) == 7.5
    run.optimizer.zero_grad()
    run.step = 1
    assert calls == [1]
    assert run.bits() == reference.bits()
    assert run.optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_zero_grad(mode, set_to_none):
    run = Run(mode, transfer="copy")
    run.backward()
    assert set(run.optimizer.gradients()) == {n for g in groups_of(run.model) for n in g["param_names"]} - {"spare"}
    run.optimizer.zero_grad(set_to_none=set_to_none)
    gradients = run.optimizer.gradients()
    assert gradients == {} if set_to_none else all(not g.any() for g in gradients.values())
    assert bool(gradients) != set_to_none


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_groups_can_be_added(mode, transfer):
    def train(mode: str) -> dict:
        run = Run(mode, "lazy", transfer=transfer, chunk_bytes=300)
        run.train()
        run.model.frozen.requires_grad_(True)
        run.optimizer.add_param_group(
            {"params": run.model.frozen, "param_names": ["frozen"], "name": "late", "lr": 0.5}
        )
        run.optimizer.param_groups[-1]["initial_lr"] = 0.5
        run.train(3)
        return run.bits()

    assert train(mode) == train("none")


def test_copies_are_refused():
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(Run("optimizer").optimizer)


# --- load_state_dict ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "group_step", "lazy"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_state_dict_goes_round_through_torchs_own_format(mode, optimizer, transfer):
    first = Run(mode, optimizer, transfer=transfer, chunk_bytes=300)
    first.train(3)
    saved = copy.deepcopy(first.optimizer.state_dict())
    second = Run(mode, optimizer, seed=5, transfer=transfer, chunk_bytes=300)
    second.built.weights.load_state_dict(first.built.weights.state_dict())
    second.optimizer.load_state_dict(saved)
    second.step = first.step
    assert second.bits() == first.bits()
    first.train(2), second.train(2)
    assert second.bits() == first.bits()


def test_load_restores_entries_in_place_and_keeps_the_runs_own():
    run, other = Run("optimizer", "lazy"), Run("optimizer", "lazy", seed=1)
    run.train(2)
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["param_groups"][0] |= {"lr": 0.375, "foreach": "saved", "distributed_mesh_name": "ep"}
    group = other.optimizer.param_groups[0]
    group["foreach"] = "live"
    other.optimizer.load_state_dict(saved)
    assert group is other.optimizer.param_groups[0]
    assert (group["lr"], group["step"], group["foreach"]) == (0.375, 2, "live")  # step: made lazily, not live yet
    assert "distributed_mesh_name" not in group


@pytest.mark.parametrize(("weights", "moments"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("transfer", ["auto", "copy"])
def test_state_keeps_its_own_dtype(weights, moments, transfer):
    """torch's load_state_dict casts state to the dtype of the parameter, which loses bits one way or the other."""

    def make(seed: int) -> CPUOffloadOptimizer:
        torch.manual_seed(seed)
        parameter = nn.Parameter(torch.randn(5, 3).to(weights))
        inner = AdamW([parameter], fused=True)
        moment = {"exp_avg": torch.randn(5, 3).to(moments), "exp_avg_sq": torch.rand(5, 3).to(moments)}
        inner.state[parameter] = {"step": torch.tensor(float(seed)), **moment}
        return CPUOffloadOptimizer(inner, transfer=transfer)

    saved, loaded = make(3), make(4)
    wanted = copy.deepcopy(saved.state_dict())["state"][0]
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    found = loaded.state_dict()["state"][0]
    assert {key: (t.dtype, t.tolist()) for key, t in found.items()} == {
        key: (t.dtype, t.tolist()) for key, t in wanted.items()
    }
    assert found["step"].dtype == torch.float32 and found["exp_avg"].dtype == moments


def test_a_state_that_does_not_fit_changes_nothing():
    run = Run("optimizer", "momentum")
    run.train()
    saved = copy.deepcopy(run.optimizer.state_dict())
    before = run.bits()
    saved["param_groups"][0]["lr"] = 9.0
    saved["state"][1]["momentum_buffer"] = saved["state"][1]["momentum_buffer"].double()
    with pytest.raises(CheckpointMismatch, match="1.momentum_buffer: torch.float64 .* here torch.float32"):
        run.optimizer.load_state_dict(saved)
    with pytest.raises(CheckpointMismatch, match=r"groups have \[1\]"):
        run.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    assert run.bits() == before


# --- mode "full" ----------------------------------------------------------------------------------------------------


def test_full_refuses_parameters_that_have_no_master():
    run = Run("full")
    with pytest.raises(TrainingError, match="1 parameters of the group 'new'"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "name": "new"})


def test_full_leaves_the_callers_groups_alone():
    model = Run("none").model
    groups = groups_of(model)
    before = [[id(parameter) for parameter in group["params"]] for group in groups]
    build_offload("full", group_step, groups, model, ModelState(model))
    assert [[id(parameter) for parameter in group["params"]] for group in groups] == before


def test_full_does_not_share_gradients_with_a_second_optimizer():
    """The second one would never see a gradient, and train nothing without a word."""
    run = Run("full")
    with pytest.raises(TrainingError, match="close"):
        build_offload("full", group_step, groups_of(run.model), run.model, ModelState(run.model))
    run.optimizer.close()
    run.backward()
    assert run.model.first.weight.grad is not None
    run.model.zero_grad()
    second = build_offload("full", group_step, groups_of(run.model), run.model, ModelState(run.model))
    run.backward()
    assert set(second.optimizer.gradients()) == set(groups_of(run.model)[0]["param_names"]) | {
        "first.bias", "second.bias", "gain"
    }  # fmt: skip


@pytest.mark.parametrize("when", ["between steps", "within an update"])
@pytest.mark.parametrize("transfer", ["direct", "copy"])
@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_a_closed_one_holds_no_memory_when_nobody_reads_it_any_more(mode, transfer, when):
    """A hook that stays on a parameter keeps the model, the masters and the host memory for as long as the process lives."""

    def gone() -> list[weakref.ref]:
        run = Run(mode, transfer=transfer, early=True)
        run.train(2)
        if when == "within an update":
            run.backward()
        run.optimizer.close()
        if when == "between steps":
            assert run.optimizer.state_dict()["state"] and run.app.state_dict()
        return [weakref.ref(run.optimizer._arena), weakref.ref(run.model.first.weight), weakref.ref(run.optimizer)]

    references = gone()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_sgd_of_a_single_tensor_needs_no_names():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CPUOffloadOptimizer(SGD([parameter], lr=0.5, momentum=0.9), transfer="copy")
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert parameter.tolist() == pytest.approx([1 - 0.5 - 0.95] * 3)
