"""What a param group of `muon.Muon` holds, and which groups are impossible."""

from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor

from trainer.errors import TrainingError
from trainer.optim.newton_schulz import Coefficients

Algorithm = Literal["muon", "adamw"]
AdjustLr = Literal["rms_norm", "spectral_norm", "none"]
ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]

OTHER_ENTRIES: dict[str, frozenset[str]] = {
    "muon": frozenset({"betas", "eps"}),
    "adamw": frozenset(
        {"momentum", "nesterov", "adjust_lr", "ns_coefficients", "ns_steps", "compute_dtype", "split_sizes"}
    ),
}
"""Group entries that an algorithm has no use for; its groups do not hold them."""

_CHOICES: dict[str, Any] = {"adjust_lr": AdjustLr, "ns_coefficients": Coefficients, "compute_dtype": ComputeDtype}


def complete_group(group: dict[str, Any], compute_device: torch.device | None) -> None:
    """Checks a group that has an entry for every default, drops what is not its algorithm's, decides "auto".

    Raises:
        TrainingError: an entry or a parameter's shape is impossible.
    """
    algorithm = group["algorithm"]
    if algorithm not in OTHER_ENTRIES:
        _refuse(group, f"algorithm must be one of {sorted(OTHER_ENTRIES)}, it is {algorithm!r}")
    for entry in OTHER_ENTRIES[algorithm]:
        group.pop(entry, None)
    if algorithm == "muon":
        _check_muon(group)
        if group["compute_dtype"] == "auto":
            group["compute_dtype"] = fast_dtype(compute_device or _device(group))


def fast_dtype(device: torch.device) -> ComputeDtype:
    """Returns the dtype in which `device` multiplies fastest, of those that orthogonalise well enough."""
    slow = device.type == "cpu" and not torch.cpu.get_capabilities().get("amx_bf16", False)
    return "float32" if slow else "bfloat16"


def _device(group: dict[str, Any]) -> torch.device:
    for parameter in group["params"]:
        return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.device("cpu")


def _check_muon(group: dict[str, Any]) -> None:
    for entry, choices in _CHOICES.items():
        if group[entry] not in get_args(choices):
            _refuse(group, f"{entry} must be one of {list(get_args(choices))}, it is {group[entry]!r}")
    if group["ns_steps"] < 1:
        _refuse(group, f"ns_steps must be at least 1, it is {group['ns_steps']}")
    sizes = group["split_sizes"]
    for index, parameter in enumerate(group["params"]):
        label = repr(group["param_names"][index]) if "param_names" in group else f"number {index}"
        if parameter.ndim not in (2, 3) or not parameter.is_floating_point():
            _refuse(
                group,
                f"parameter {label} ({list(parameter.shape)}, {parameter.dtype}) is no matrix and no stack of matrices; "
                "put it into a group with algorithm = 'adamw'",
            )
        if sizes is not None and (min(sizes) < 1 or sum(sizes) != parameter.shape[-2]):
            _refuse(
                group,
                f"split_sizes {list(sizes)} must be positive and sum to the {parameter.shape[-2]} rows of {label}",
            )


def _refuse(group: dict[str, Any], problem: str) -> None:
    raise TrainingError(f"optimizer group {group.get('name', 'without a name')!r}: {problem}")
