"""SignSGD: the sign of the gradient, or of its momentum (Bernstein et al., https://arxiv.org/abs/1802.04434)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SignSGD(Optimizer):
    """p <- (1 - lr weight_decay) p - lr sign(m), with m <- momentum m + (1 - momentum) g, or m = g without momentum.

    State is made at construction: "momentum_buffer", zeros like the parameter, where the momentum is not 0.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            has_momentum = group["momentum"] != 0
            buffer = torch.zeros_like(parameter, requires_grad=False) if has_momentum else None
            self.state[parameter] = {} if buffer is None else {"momentum_buffer": buffer}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. `closure` is called once, before it, with gradients enabled; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = parameter.grad
                if group["momentum"] != 0:
                    direction = self.state[parameter]["momentum_buffer"].lerp_(direction, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction.sign(), alpha=-group["lr"])
        return loss
