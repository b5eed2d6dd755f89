"""The masters as the model's part of a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from trainer.errors import CheckpointMismatch
from trainer.optim.offload.base import copy_weights
from trainer.optim.offload.full import FullCPUOffloadOptimizer


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class MasterWeights:
    """Owner of the float32 weights in mode "full": the same names, shapes and dtypes as in the other modes.

    What is in a checkpoint is the masters, so nothing is ever rounded to the compute dtype on its way from one mode to
    another. Loading refreshes the device's weights. Buffers are the model owner's, live on the device.
    """

    def __init__(self, optimizer: FullCPUOffloadOptimizer, model_state: Stateful):
        """`model_state`: the owner that the other modes use, {name: live tensor}."""
        self._optimizer = optimizer
        self._model_state = model_state

    def state_dict(self) -> dict[str, Tensor]:
        """Returns {name: live master, float32 on the host; or live buffer}; changes nothing."""
        self._optimizer.synchronize()
        masters = self._optimizer.masters.masters
        live = self._model_state.state_dict()
        return {name: masters[name] if name in masters else tensor for name, tensor in live.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Takes over tensors by name; live ones, filled in place, are recognised.

        Raises:
            CheckpointMismatch: a name is missing or unexpected, or a shape differs; nothing was copied then.
        """
        live = self.state_dict()
        odd = sorted(live.keys() ^ state_dict.keys())
        if odd:
            raise CheckpointMismatch(f"the checkpoint's weights are not this model's, first: {odd[:10]}")
        copy_weights({name: tensor for name, tensor in state_dict.items() if tensor is not live[name]}, live)
        self._optimizer.masters.refresh(self._optimizer.masters.masters)

    @contextmanager
    def in_model(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's parameters are the masters: for an export of the exact weights, not for a forward."""
        with self._optimizer.masters.in_model(model):
            yield
