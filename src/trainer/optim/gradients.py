"""The gradients of a cycle that is not over, by parameter name, wherever an optimizer keeps them.

An optimizer whose gradients are not the `.grad` of its parameters, or are more than that, has `gradients` and
`set_gradients` of its own (see `HoldsGradients`); for all others the functions below read and write `.grad`.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class HoldsGradients(Protocol):
    def gradients(self) -> dict[str, Tensor]:
        """Returns {parameter: its live gradient, summed over the micro-steps so far}, for those that have one."""
        ...

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Makes these the sums so far; a parameter that is not named has none. The tensors may be kept."""
        ...


def gradients(optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns {parameter: live gradient} of those that have one; plain or DTensor, as the parameter is."""
    if isinstance(optimizer, HoldsGradients):
        return optimizer.gradients()
    return {name: p.grad for name, p in _parameters(optimizer).items() if p.grad is not None}


def set_gradients(optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> None:
    """Makes `gradients` the sums of the cycle so far; a parameter that is not named has none."""
    if isinstance(optimizer, HoldsGradients):
        optimizer.set_gradients(gradients)
        return
    for name, parameter in _parameters(optimizer).items():
        parameter.grad = gradients.get(name)


def all_gradients(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[str]]:
    """Returns ({parameter: its gradient, zeros where it has none}, the names of those that have none)."""
    found = gradients(optimizer)
    parameters = _parameters(optimizer)
    whole = {name: found[name] if name in found else torch.zeros_like(p.detach()) for name, p in parameters.items()}
    return whole, [name for name in parameters if name not in found]


def _parameters(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        n: p for group in optimizer.param_groups for n, p in zip(group["param_names"], group["params"], strict=True)
    }
