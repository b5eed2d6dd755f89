"""Group layouts, chunk sizes, missing gradients and save points drawn at random: all modes have the same bits."""

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.offload import FACTORIES, clipped_update
from trainer.checkpoint.app_state import AppState
from trainer.models.state import ModelState
from trainer.optim.offload.base import OffloadOptimizer
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.chunks import plan_chunks
from trainer.optim.state import OptimizerState

SHAPES = [(3, 4), (4, 3), (3, 4), (7,), (1,), (2, 3), (5, 5)]


class Layout:
    """Which parameter is in which group, and what happens in each step: who has a gradient, how many micro-steps there
    are, and whether it is clipped or else the update may begin in the last backward pass."""

    def __init__(self, members: list[int], present: list[list[bool]], accumulate: list[int], clipped: list[bool]):
        self.members, self.present, self.accumulate, self.clipped = members, present, accumulate, clipped

    def __repr__(self) -> str:
        return f"Layout({self.members}, {self.present}, {self.accumulate}, {self.clipped})"


@st.composite
def layouts(draw: Any) -> Layout:
    steps = draw(st.integers(1, 4))
    members = [draw(st.integers(0, 2)) for _ in SHAPES]
    present = [[draw(st.booleans()) for _ in SHAPES] for _ in range(steps)]
    accumulate, clipped = ([draw(kind) for _ in range(steps)] for kind in (st.integers(1, 3), st.booleans()))
    return Layout(members, present, accumulate, clipped)


class Trained:
    def __init__(self, mode: str, factory: str, layout: Layout, chunk_bytes: int, seed: int = 0):
        torch.manual_seed(seed)
        self.model = nn.Module()
        for index, shape in enumerate(SHAPES):
            self.model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {
                "name": "decay" if g == 0 else f"group {g}",
                "params": [p for i, (_, p) in enumerate(named) if layout.members[i] == g],
                "param_names": [n for i, (n, _) in enumerate(named) if layout.members[i] == g],
                "weight_decay": 0.1 * g,
            }
            for g in range(3)
        ]
        options = {} if mode == "none" else {"transfer": "copy", "chunk_bytes": chunk_bytes}
        built = build_offload(mode, FACTORIES[factory], groups, self.model, ModelState(self.model), **options)  # type: ignore[arg-type]
        self.optimizer, self.layout = built.optimizer, layout
        self.app = AppState(model=built.weights, optimizer=OptimizerState(self.optimizer))

    def train(self, step: int) -> None:
        clipped, count = self.layout.clipped[step], self.layout.accumulate[step]
        for micro_step in range(count):
            if micro_step == count - 1 and not clipped and isinstance(self.optimizer, OffloadOptimizer):
                self.optimizer.begin_update()
            generator = torch.Generator().manual_seed(100 * step + micro_step)
            pairs = [(p, torch.randn(p.shape, generator=generator)) for p in self.model.parameters()]
            used = [(p * w).sum() for (p, w), here in zip(pairs, self.layout.present[step], strict=True) if here]
            if used:
                torch.stack(used).sum().backward()
        clipped_update(self.optimizer, max_norm=1.0 if clipped else None)

    def bits(self) -> tuple[dict[str, list], dict]:
        state = self.app.state_dict()
        return {name: tensor.tolist() for name, tensor in state.items() if name != "json"}, self.app.leaves()

    def take(self, other: "Trained") -> None:
        """What a load does: fills the live tensors, then hands leaves and tensors to the owners."""
        mine, theirs = self.app.state_dict(), other.app.state_dict()
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"json"}:
            mine[name].data.copy_(theirs[name])
        for name, owner in self.app.owners.items():
            state = owner.state_dict()
            if name == "optimizer":
                state["groups"] = copy.deepcopy(other.app.owners[name].state_dict()["groups"])
            owner.load_state_dict(state)


def vectors_are_elsewhere(layout: Layout) -> Layout:
    """Muon's group takes matrices only."""
    members = [g if len(shape) == 2 else max(g, 1) for g, shape in zip(layout.members, SHAPES, strict=True)]
    return Layout(members, layout.present, layout.accumulate, layout.clipped)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts(),
    factory=st.sampled_from(["adamw", "momentum", "muon", "group_step"]),
    chunk_bytes=st.sampled_from([1, 60, 200, 10**6]),
    saved=st.sampled_from(["none", "optimizer", "full"]),
    resumed=st.sampled_from(["none", "optimizer", "full"]),
    save_at=st.integers(0, 3),
)
def test_every_layout_mode_and_save_point(layout, factory, chunk_bytes, saved, resumed, save_at):
    layout = vectors_are_elsewhere(layout)
    reference = Trained("none", factory, layout, chunk_bytes)
    run = Trained(saved, factory, layout, chunk_bytes)
    for step in range(len(layout.present)):
        if step == save_at:
            fresh = Trained(resumed, factory, layout, chunk_bytes, seed=1)
            fresh.take(run)
            run = fresh
        reference.train(step), run.train(step)
        assert run.bits() == reference.bits()


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    chunk_bytes=st.integers(1, 120),
)
def test_plans_cover_each_parameter_once_and_keep_the_bound(sizes, cuts, chunk_bytes):
    pool = [nn.Parameter(torch.zeros(size)) for size in sizes]
    units: list[list[Tensor]] = [[]]
    for parameter, cut in zip(pool, cuts, strict=False):
        units[-1].append(parameter)
        if cut:
            units.append([])
    units = [unit for unit in units if unit]
    optimizer = torch.optim.SGD([{"params": pool[::2]}, {"params": pool[1::2]}])
    optimizer.chunk_units = lambda: units  # type: ignore[attr-defined]
    chunks = plan_chunks(optimizer, lambda parameter: parameter.numel(), chunk_bytes)
    stepped = [chunk.parameters(optimizer.param_groups) for chunk in chunks]
    assert sorted(id(p) for chunk in stepped for p in chunk) == sorted(id(p) for p in pool)
    for unit in units:
        assert sum(any(p is q for q in chunk for p in unit) for chunk in stepped) == 1
    for chunk in stepped:
        whole = [unit for unit in units if any(p is unit[0] for p in chunk)]
        assert sum(p.numel() for p in chunk) <= chunk_bytes or len(whole) == 1
