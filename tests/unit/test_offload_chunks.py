"""Stepping in chunks: who is stepped with whom, and what happens to the entries of a group."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from support.offload import FACTORIES, GroupStep, Run
from trainer.errors import TrainingError
from trainer.optim.offload.chunks import ChunkedStep, plan_chunks
from trainer.optim.offload.state import CPUOffloadOptimizer


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def elements(parameter: Tensor) -> int:
    return parameter.numel()


def members(optimizer: Optimizer, chunk_bytes: int) -> list[dict[int, tuple[int, ...]]]:
    return [dict(chunk.members) for chunk in plan_chunks(optimizer, elements, chunk_bytes)]


# --- the plan -------------------------------------------------------------------------------------------------------


def test_chunks_are_filled_in_order_up_to_the_bound():
    a, b, c, d, e = parameters(4, 4, 3, 9, 1)
    optimizer = SGD([{"params": [a, b]}, {"params": [c, d, e]}])
    assert members(optimizer, 8) == [{0: (0, 1)}, {1: (0,)}, {1: (1,)}, {1: (2,)}]
    assert members(optimizer, 11) == [{0: (0, 1), 1: (0,)}, {1: (1, 2)}]
    assert members(optimizer, 10**6) == [{0: (0, 1), 1: (0, 1, 2)}]


def test_a_unit_is_never_split_and_may_exceed_the_bound():
    a, b, c, d = parameters(4, 4, 4, 4)
    optimizer = SGD([{"params": [a, b, c]}, {"params": [d]}])
    optimizer.chunk_units = lambda: [[c, a, d], [b]]  # type: ignore[attr-defined]
    assert members(optimizer, 5) == [{0: (0, 2), 1: (0,)}, {0: (1,)}]


def test_groups_without_parameters_are_stepped_once():
    (a, b) = parameters(4, 4)
    optimizer = SGD([{"params": []}, {"params": [a, b]}])
    assert members(optimizer, 4) == [{0: (), 1: (0,)}, {1: (1,)}]
    assert members(SGD([{"params": []}]), 4) == [{0: ()}]


@pytest.mark.parametrize("units", [[[0]], [[0], [1], [1]], [[0, 1], [2]]])
def test_units_must_cover_each_parameter_once(units):
    pool = parameters(4, 4, 4)
    optimizer = SGD(pool[:2])
    optimizer.chunk_units = lambda: [[pool[i] for i in unit] for unit in units]  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="each must be in exactly one unit"):
        plan_chunks(optimizer, elements, 4)


# --- entries of groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["group_step", "lazy"])
@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_a_counter_in_a_group_advances_once_per_step_for_all_chunks(mode, optimizer):
    """On copies of the groups the counter would never arrive in the live ones, and each chunk could be at step 1."""
    run = Run(mode, optimizer, transfer="copy", chunk_bytes=300)
    reference = Run("none", optimizer)
    assert run.optimizer.param_groups[0].get("step", 0) == 0
    run.train(5), reference.train(5)
    assert len(run.optimizer._chunks) >= 3
    assert [group["step"] for group in run.optimizer.param_groups] == [5, 5]
    assert [group["step"] for group in run.optimizer.state_dict()["param_groups"]] == [5, 5]
    assert [group["entries"]["step"] for group in run.app.leaves()["optimizer"]["groups"]] == [5, 5]
    assert run.bits() == reference.bits()


class TensorStep(GroupStep):
    """The counter is a tensor that steps change in place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", torch.zeros(()))
            group["count"] += 1
            group["seen"] = group["count"].item()
        super().step()


def test_counters_may_be_tensors():
    pool = parameters(4, 4, 4)
    optimizer = CPUOffloadOptimizer(TensorStep(pool), transfer="copy", chunk_bytes=1)
    held = None
    for step in range(1, 4):
        for parameter in pool:
            parameter.grad = torch.ones(4)
        optimizer.step()
        group = optimizer.param_groups[0]
        assert (group["count"].item(), group["seen"], group["step"]) == (step, step, step)
        held = held if held is not None else group["count"]
    assert held is group["count"]


class Coupled(GroupStep):
    """Derives an entry of the group from the gradients of all its parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["scale"] = sum(p.grad.sum().item() for p in group["params"])
        super().step()


class CoupledInUnits(Coupled):
    def chunk_units(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]


def test_an_optimizer_that_couples_parameters_is_found_out():
    pool = parameters(4, 4)
    optimizer = CPUOffloadOptimizer(Coupled(pool), transfer="copy", chunk_bytes=1)
    for index, parameter in enumerate(pool):
        parameter.grad = torch.full((4,), float(index))
    with pytest.raises(TrainingError, match="Coupled changes the entries of group 0 .* chunk_units"):
        optimizer.step()
    optimizer = CPUOffloadOptimizer(CoupledInUnits(pool), transfer="copy", chunk_bytes=1)
    optimizer.step()
    assert optimizer.param_groups[0]["scale"] == 4.0


def test_everything_is_whole_again_when_a_chunk_fails():
    run = Run("optimizer", "adamw", transfer="copy", chunk_bytes=300)
    optimizer = run.optimizer
    groups = list(optimizer.param_groups)
    before = [dict(group) for group in groups]
    hosts = {id(p): dict(state) for p, state in optimizer.state.items()}
    run.backward()
    weight = optimizer.param_groups[0]["params"][1]
    weight.grad = weight.grad.to_sparse()  # refused, after the first chunk was stepped
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    for group, kept in zip(groups, before, strict=True):
        assert group.keys() == kept.keys()
        assert all(group[key] is value for key, value in kept.items() if key in ("params", "param_names"))
    for parameter, state in optimizer.state.items():
        assert all(state[key] is hosts[id(parameter)][key] for key in state)


def test_names_are_narrowed_with_the_parameters():
    seen = []

    class Looks(GroupStep):
        def step(self, closure: Any = None) -> None:
            seen.append([(group["param_names"], len(group["params"])) for group in self.param_groups])

    a, b, c = parameters(1, 1, 1)
    optimizer = Looks([{"params": [a, b], "param_names": ["a", "b"]}, {"params": [c], "param_names": ["c"]}])
    step = ChunkedStep(optimizer)
    for chunk in plan_chunks(optimizer, elements, 1):
        step(chunk)
    assert seen == [[(["a"], 1)], [(["b"], 1)], [(["c"], 1)]]
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]


# --- state that comes and goes --------------------------------------------------------------------------------------


class Rebinding(Optimizer):
    """Puts every result into a new tensor; has state that appears late, changes its shape, and goes away."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"sum": torch.zeros_like(parameter), "n": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["n"] += 1
            state["sum"] = state["sum"] * 0.5 + parameter.grad
            state["history"] = torch.cat([state.get("history", torch.zeros(0)), parameter.grad[:1]])
            if state["n"] == 2:
                state["late"] = parameter.grad.clone()
            if state["n"] == 4:
                del state["late"]
            parameter.sub_(state["sum"] + state["history"].sum() + state.get("late", torch.zeros(())))


def test_state_may_be_rebound_appear_grow_and_go():
    def train(offload: bool) -> Any:
        torch.manual_seed(0)
        pool = [nn.Parameter(torch.randn(4)) for _ in range(3)]
        inner = Rebinding(pool)
        optimizer = CPUOffloadOptimizer(inner, transfer="copy", chunk_bytes=1) if offload else inner
        results = []
        for step in range(5):
            for index, parameter in enumerate(pool):
                parameter.grad = torch.full((4,), step + index + 0.5)
            optimizer.step()
            results.append(copy.deepcopy([optimizer.state[p] for p in pool]))
        return [p.tolist() for p in pool], [
            [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in state.items()} for state in states]
            for states in results
        ]

    assert train(True) == train(False)


def test_state_may_be_replaced_between_steps():
    run, reference = Run("optimizer", "momentum", transfer="copy", chunk_bytes=300), Run("none", "momentum")
    for either in (run, reference):
        either.train()
        weight = either.optimizer.param_groups[0]["params"][1]
        either.optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, 0.25, requires_grad=False)
        either.train(2)
    assert run.bits() == reference.bits()


@pytest.mark.parametrize("transfer", ["auto", "copy"])
@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_state_that_others_add_is_on_the_host_when_it_is_read(mode, transfer):
    """A load makes the entries that a lazy optimizer does not have yet."""
    run = Run(mode, "lazy", transfer=transfer, chunk_bytes=300)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        run.optimizer.state[parameter]["sum"] = torch.full_like(parameter, float(index), requires_grad=False)
    for index, parameter in enumerate(parameters):
        assert run.optimizer._arena.owns(run.optimizer.state[parameter]["sum"])
        assert (run.optimizer.state[parameter]["sum"] == index).all()
    reference = Run("none", "lazy")
    for index, parameter in enumerate(p for group in reference.optimizer.param_groups for p in group["params"]):
        reference.optimizer.state[parameter]["sum"] = torch.full_like(parameter, float(index), requires_grad=False)
    run.train(2), reference.train(2)
    assert run.bits() == reference.bits()


def test_all_factories_are_chunked_in_these_tests():
    for name in FACTORIES:
        run = Run("optimizer", name, transfer="copy", chunk_bytes=300)
        run.train(2)
        if name != "sgd":  # without momentum it has no state, and all of it fits into one chunk
            assert len(run.optimizer._chunks) >= 3, name
