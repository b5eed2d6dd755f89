"""Optimizer state on the host: made there, taken over to there, and lent to the device for a step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.core.transfer import HostArena
from trainer.optim.offload.tensors import around, local_part

_aten = torch.ops.aten
_VALUES: dict[Any, Callable[..., Any]] = {
    _aten.zeros_like.default: lambda like: 0,
    _aten.ones_like.default: lambda like: 1,
    _aten.full_like.default: lambda like, value: value,
    _aten.empty_like.default: lambda like: 0,  # whoever reads it before writing shall read the same every time
}
"""Function that makes a tensor like another one -> the value it fills it with, from the function's own arguments."""


class StateOnHost(TorchDispatchMode):
    """Inside, `zeros_like(parameter)` and its relatives give a tensor in the arena instead of one on the device.

    Optimizers make state shaped like their parameters, on the parameters' device. Made there and moved afterwards, it
    would need the very device memory that offloading saves, for a moment, at every start of a run. All that is not
    made like one of `parameters` is made where it is asked for.
    """

    def __init__(self, parameters: Iterable[Tensor], arena: HostArena):
        super().__init__()
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._arena = arena

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VALUES and id(args[0]) in self._parameters and self._stays(args[0], kwargs):
            return self._take(func, args, kwargs)
        return func(*args, **kwargs)

    def _stays(self, parameter: Tensor, kwargs: dict[str, Any]) -> bool:
        device, layout = kwargs.get("device"), kwargs.get("layout")
        return (device is None or device.type == parameter.device.type) and layout in (None, torch.strided)

    @torch.no_grad()
    def _take(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        part = local_part(args[0])
        shape = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
        options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        like = func(shape, *args[1:], **options)  # what the optimizer asked for: another dtype, other strides
        return around(self._arena.take(like).fill_(_VALUES[func](*args)), args[0])


@dataclass(frozen=True)
class Entry:
    """A state tensor on the host, and its twin on the device for the time of a step."""

    state: dict[str, Any]
    key: str
    host: Tensor
    twin: Tensor


class HostedState:
    """The state of `optimizer`, kept in `arena`.

    Attributes:
        stale: tensors appeared, changed their kind or went away since it was last set to False.
    """

    def __init__(self, optimizer: Optimizer, arena: HostArena, device: torch.device):
        """`device`: where the optimizer makes its state by itself."""
        self.stale = True
        self._optimizer = optimizer
        self._arena = arena
        self._device = device
        self._count = -1

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Moves state of `parameters` that lies on the device (or, on CPU, outside of the arena) into the arena."""
        for parameter in parameters:
            if parameter not in self._optimizer.state:
                continue
            entries = self._optimizer.state[parameter]
            for key, value in entries.items():
                if isinstance(value, Tensor) and self._is_elsewhere(local_part(value)):
                    part = local_part(value)
                    entries[key] = around(self._arena.take(part).copy_(part), value)
                    self.stale = True

    def adopt_new(self) -> None:
        """The same for all parameters, where state was added since the last call."""
        state = self._optimizer.state
        count = sum(len(entries) for key, entries in state.items() if isinstance(key, Tensor))
        if count != self._count:
            self._count = count
            self.adopt(parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def tensors(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the parameter's state tensors in the arena. What the optimizer itself keeps on the host for a
        parameter on a GPU (unfused Adam's counters) is not among them: it must stay there in a step."""
        entries = self._optimizer.state.get(parameter, {})
        tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
        parts = {key: local_part(value) for key, value in tensors.items()}
        return {key: tensors[key] for key, part in parts.items() if self._arena.owns(part) or part.numel() == 0}

    def entry(self, parameter: Tensor, key: str, host: Tensor, twin: Tensor) -> Entry:
        """twin: the plain part on the device."""
        return Entry(self._optimizer.state[parameter], key, host, around(twin, host))

    def replan(self, entries: Iterable[Sequence[Entry]]) -> bool:
        """Whether a plan with these entries is out of date: state came, went, or was replaced by somebody else."""
        if any(entry.state.get(entry.key) is not entry.host for chunk in entries for entry in chunk):
            self._count = -1
            self.adopt_new()
            self.stale = True
        return self.stale

    @contextmanager
    def on_device(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Inside, the state has the twins in the hosts' places. The results are in the twins afterwards."""
        for entry in entries:
            entry.state[entry.key] = entry.twin
        try:
            yield
        finally:
            for entry in entries:
                self._put_back(entry)

    def _put_back(self, entry: Entry) -> None:
        result = entry.state.get(entry.key)
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (entry.host.shape, entry.host.dtype):
            self.stale = True  # gone, or something else by the same name, which is taken over like any new state
            return
        if result is not entry.twin:
            local_part(entry.twin).copy_(local_part(result))  # the optimizer put its result into a new tensor
        entry.state[entry.key] = entry.host

    def _is_elsewhere(self, part: Tensor) -> bool:
        return part.device.type == self._device.type and part.numel() > 0 and not self._arena.owns(part)
