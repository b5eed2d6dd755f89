"""A small run under any offload mode: model, groups, optimizer, owners of a checkpoint, and steps like the trainer's."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.app_state import AppState
from trainer.config.train import OptimConfig
from trainer.models.state import ModelState
from trainer.optim.build import build_optimizer
from trainer.optim.clip import clip_gradients
from trainer.optim.offload.base import OffloadOptimizer, updated_parameters
from trainer.optim.offload.build import Offloaded, build_offload
from trainer.optim.schedule import Schedule, ScheduleState
from trainer.optim.state import OptimizerState

MODES = ("none", "optimizer", "full")
SIZE = 6


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Net(nn.Module):
    """Weights cast where they are used, as in the decoder.

    `spare` never has a gradient; `frozen` is not trained; `gain` has one element, so most ranks have none of it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.compute_dtype = dtype
        self.first = Linear(SIZE, 10)
        self.second = Linear(10, 10)
        self.last = Linear(10, 3, bias=False)
        self.spare = nn.Parameter(torch.randn(4))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(10), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype
        x = x.to(dtype)
        for layer in (self.first, self.second):
            x = torch.tanh(layer(x)) * self.frozen.to(dtype)
        return (self.last(x) * self.gain.to(dtype)).float()


class GroupStep(Optimizer):
    """Momentum with a step size that depends on a counter in the group.

    `lazy`: counter and state are made in the first step.
    """

    def __init__(self, params: Any, lr: float = 0.1, lazy: bool = False):
        super().__init__(params, {"lr": lr} if lazy else {"lr": lr, "step": 0})
        if not lazy:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = {"sum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].mul_(0.9).add_(parameter.grad)
                parameter.add_(state["sum"], alpha=-group["lr"] / (1 - 0.9 ** group["step"]))


def built(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    return build_optimizer(config, [group | {"lr": config.lr, "initial_lr": config.lr} for group in groups])


def adamw(groups: list[dict[str, Any]]) -> Optimizer:
    return built(OptimConfig(type="adamw", lr=0.01), groups)


def sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return built(OptimConfig(type="sgd", lr=0.05), groups)


def momentum(groups: list[dict[str, Any]]) -> Optimizer:
    return built(OptimConfig(type="sgd", lr=0.05, momentum=0.9), groups)


def sign_sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return built(OptimConfig(type="sign_sgd", lr=0.01, momentum=0.9), groups)


def group_step(groups: list[dict[str, Any]], lazy: bool = False) -> Optimizer:
    optimizer = GroupStep(groups, lazy=lazy)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def muon(groups: list[dict[str, Any]], cls: type[Optimizer] | None = None) -> Optimizer:
    """Muon for the matrices, its AdamW half for the rest."""
    from trainer.optim.muon import Muon

    split = [{**group, "algorithm": "muon" if group["name"] == "decay" else "adamw"} for group in groups]
    optimizer = (cls or Muon)(split, lr=0.02, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def dion(groups: list[dict[str, Any]]) -> Optimizer:
    """The same through microsoft/dion, where it is installed."""
    from trainer.optim.dion import DionMuon

    return muon(groups, DionMuon)


FACTORIES: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": adamw,
    "sgd": sgd,
    "momentum": momentum,
    "sign_sgd": sign_sgd,
    "muon": muon,
    "group_step": group_step,
    "lazy": partial(group_step, lazy=True),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two groups: matrices with decay, the rest without."""
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": [], "param_names": [], "weight_decay": 0.1},
        {"name": "no_decay", "params": [], "param_names": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[0 if parameter.ndim >= 2 else 1]
            group["params"].append(parameter)
            group["param_names"].append(name)
    return groups


class Run:
    """What a run is to its optimizer and its checkpoints."""

    def __init__(
        self,
        mode: str,
        optimizer: str | Callable[[list[dict[str, Any]]], Optimizer] = "adamw",
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        mesh: Any = None,
        device: str = "cpu",
        schedule: Schedule | None = None,
        accumulate: int = 1,
        max_norm: float | None = None,
        early: bool = False,
        **offload: Any,
    ):
        """`early`: the update may begin in the step's last backward pass, where the mode can do that."""
        torch.manual_seed(seed)
        self.model = Net(dtype)
        if mesh is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for module in (self.model.first, self.model.second, self.model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.model.to(device)
        self.device = device
        self.accumulate, self.max_norm, self.early = accumulate, max_norm, early
        self.built: Offloaded = build_offload(
            mode,  # type: ignore[arg-type]
            FACTORIES[optimizer] if isinstance(optimizer, str) else optimizer,
            groups_of(self.model),
            self.model,
            ModelState(self.model),
            compute_dtype=dtype,
            **offload,
        )
        self.optimizer = self.built.optimizer
        self.schedule = ScheduleState(schedule or Schedule("constant", 100), self.optimizer.param_groups)
        self.step = 0
        self.app = AppState(
            model=self.built.weights,
            optimizer=OptimizerState(self.optimizer),
            schedule=self.schedule,
            progress=Progress(self),
        )
        self.schedule.apply(0)

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's rows of the step's global batch of 12."""
        import torch.distributed as dist

        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        rank, size = (rank, size) if _sharded(self.model) else (0, 1)
        generator = torch.Generator().manual_seed(self.step)
        x, y = torch.randn(12, SIZE, generator=generator), torch.randn(12, 3, generator=generator)
        for part in range(self.accumulate):
            rows = slice(part * size + rank, None, size * self.accumulate)
            yield x[rows].to(self.device), y[rows].to(self.device)

    def backward(self) -> None:
        for micro_step, (x, y) in enumerate(self.micro_batches()):
            loss = (self.model(x) - y).square().sum() / 12
            if self.early and micro_step == self.accumulate - 1 and isinstance(self.optimizer, OffloadOptimizer):
                self.optimizer.begin_update()
            loss.backward()

    def clip(self, *, within_step: bool = False) -> Tensor:
        if isinstance(self.optimizer, OffloadOptimizer):
            return self.optimizer.clip_gradients(self.max_norm, within_step=within_step)
        return clip_gradients(updated_parameters(self.optimizer), self.max_norm)

    def train(self, steps: int = 1, *, skip: bool = False) -> list[float]:
        """Returns the gradient norms. `skip`: gradients are thrown away, as after a non-finite norm."""
        norms = []
        for _ in range(steps):
            self.backward()
            norms.append(self.clip(within_step=True).item())
            if not skip:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.schedule.apply(self.step)
        return norms

    def bits(self) -> dict[str, Any]:
        """Returns everything that a checkpoint would hold: whole tensors as bytes, and the other leaves."""
        from support.checkpoints import whole

        state = self.app.state_dict()
        state.pop("json")
        return {**whole(state), "leaves": self.app.leaves()}


class Progress:
    def __init__(self, run: Run):
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.run.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.step = state["step"]


def _sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def clipped_update(optimizer: Optimizer, max_norm: float | None) -> None:
    """Clips, steps and drops the gradients, as a training step does under any offload mode."""
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.clip_gradients(max_norm)
    else:
        clip_gradients(updated_parameters(optimizer), max_norm)
    optimizer.step()
    optimizer.zero_grad()
