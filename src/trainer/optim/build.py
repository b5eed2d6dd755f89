"""The run's optimizer, with all of its state made at construction.

torch makes state lazily in the first `step`. A checkpoint then has nothing to fill on load, and a hidden step to create it
moves Adam's counter. Made here, `state_dict` is complete and the same on all ranks before the first update.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from trainer.config.arguments import parse_arguments
from trainer.config.train import OptimConfig, SchedulerConfig
from trainer.core.imports import import_object
from trainer.errors import ConfigError
from trainer.optim.groups import decay_groups, muon_groups
from trainer.optim.muon import Muon
from trainer.optim.schedule import Schedule
from trainer.optim.sign_sgd import SignSGD


def build_groups(
    config: OptimConfig, parameters: Iterable[tuple[str, Tensor]], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the param groups of the run's optimizer: every trainable parameter once, each with its "initial_lr"."""
    if config.type == "muon":
        return muon_groups(
            parameters,
            roles,
            lr=config.lr,
            adamw_lr=config.adamw_lr or config.lr,
            weight_decay=config.weight_decay,
            decay=config.decay,
        )
    groups = decay_groups(parameters, roles, weight_decay=config.weight_decay, decay=config.decay)
    return [group | {"lr": config.lr, "initial_lr": config.lr} for group in groups]


def build_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns the optimizer over `groups` (see `build_groups`).

    Raises:
        ConfigError: optim.class_path or optim.args name nothing that can be called.
    """
    momentum = config.momentum or 0.0
    if config.type == "adamw":
        optimizer: Optimizer = AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
        _make_adamw_state(optimizer)
    elif config.type == "sgd":
        optimizer = SGD(groups, momentum=momentum, foreach=True)
        _make_momentum(optimizer)
    elif config.type == "sign_sgd":
        optimizer = SignSGD(groups, momentum=momentum)
    elif config.type == "muon":
        optimizer = _muon(config, groups)
    else:
        optimizer = _custom(config, groups)
    return optimizer


def _muon(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    return Muon(
        groups,
        momentum=0.95 if config.momentum is None else config.momentum,
        nesterov=config.nesterov,
        adjust_lr=config.adjust_lr,
        ns_coefficients=config.ns_coefficients,
        ns_steps=config.ns_steps,
        betas=config.betas,
        eps=config.eps,
    )


def _custom(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    path = config.class_path or ""
    cls = import_object(path, "optim.class_path")
    arguments = parse_arguments(config.args, "optim.args")
    try:
        optimizer = cls(groups, lr=config.lr, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.class_path = {path!r} does not take these arguments: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optim.class_path = {path!r} is no torch.optim.Optimizer")
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


def _make_momentum(optimizer: Optimizer) -> None:
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
        decay_shape=config.decay_shape,
        start_step=start_step,
    )
