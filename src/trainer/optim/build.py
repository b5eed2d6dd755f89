"""The run's optimizer, with all of its state made at construction.

torch makes state lazily in the first `step`. A checkpoint then has nothing to fill on load, and a hidden step to create it
moves Adam's counter. Made here, `state_dict` is complete and the same on all ranks before the first update.
"""

from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from trainer.config.train import OptimConfig, SchedulerConfig
from trainer.optim.schedule import Schedule


def build_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns the optimizer over `groups` (see `groups.decay_groups`); every group has "initial_lr"."""
    if config.type == "adamw":
        optimizer: Optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        _make_adamw_state(optimizer)
    else:
        optimizer = SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)
        _make_sgd_state(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.lr
    return optimizer


def _make_adamw_state(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=parameter.device
                ),  # where the fused kernel wants it
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False),
            }


def _make_sgd_state(optimizer: Optimizer) -> None:
    """A zero buffer gives the same first update as torch's lazy one: 0 x momentum + grad."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            has_momentum = group["momentum"] != 0
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)} if has_momentum else {}


def build_schedule(config: SchedulerConfig, *, lr: float, total_steps: int, start_step: int = 0) -> Schedule:
    """Returns the schedule that `config` describes for the `total_steps` updates after `start_step`, peaking at `lr`."""
    return Schedule(
        type=config.type,
        total_steps=total_steps,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        min_factor=config.min_lr / lr,
        start_step=start_step,
    )
