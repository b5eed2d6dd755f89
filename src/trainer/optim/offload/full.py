"""Mode "full": masters, gradients and optimizer state on the host; the device has weights in the compute dtype."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.core.log import logger
from trainer.core.transfer import HostArena, Lanes
from trainer.errors import TrainingError
from trainer.optim.clip import clip_gradients, clipping_factor
from trainer.optim.offload.base import OffloadOptimizer, copy_weights, updated_parameters
from trainer.optim.offload.chunks import Chunk, ChunkedStep, plain_step, plan_chunks
from trainer.optim.offload.gradients import HostGradients
from trainer.optim.offload.hosting import HostedState, StateOnHost
from trainer.optim.offload.masters import HostMasters
from trainer.optim.offload.native import NativeAdamW
from trainer.optim.offload.state import Transfer, copies
from trainer.optim.offload.tensors import largest_part_bytes, local_part

CHUNK_BYTES = 2**26
GRADIENT_SLOT_BYTES = 2**25

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes the optimizer over param groups whose "params" are float32 tensors."""


class FullCPUOffloadOptimizer(OffloadOptimizer):
    """Trains float32 masters on the host and keeps the model's weights on the device equal to them, rounded.

    Gradients leave the device as backward makes them and are summed on the host in float32, over micro-steps too; the
    masters' `.grad` are these sums, so clipping and skipping a step work as ever. A step goes through the masters chunk
    by chunk, and a finished chunk's weights are on their way to the device while the next one is stepped.

    The update runs on the host. An optimizer whose update is matrix products can send these to the device by itself
    (Muon's `compute_device`).
    """

    mode = "full"

    def __init__(
        self,
        optimizer_factory: OptimizerFactory,
        groups: list[dict[str, Any]],
        masters: HostMasters,
        arena: HostArena,
        *,
        transfer: Transfer = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        native: bool = True,
        lanes: Lanes | None = None,
    ):
        """
        Args:
            groups: param groups over the *model's* parameters; they are not changed.
            masters: of these parameters and all others of the model, which has its compute dtype by now.
            arena: where gradients and state lie.
            chunk_bytes: masters that are stepped before their weights are sent.
            native: step AdamW by the native kernel, if there is one with torch's bits.
        """
        self.masters = masters
        self._name_of = {id(p): name for name, p in masters.parameters.items()}
        own = [self._with_masters(group) for group in groups]
        trained = [master for group in own for master in group["params"]]
        with StateOnHost(trained, arena):
            super().__init__(optimizer_factory(own))
        self._name_of |= {id(master): name for name, master in masters.masters.items()}
        self._arena = arena
        self._device = next((local_part(p).device for p in masters.parameters.values()), torch.device("cpu"))
        self._copies = copies(transfer, self._device)
        self._scale: Tensor | None = (
            None  # a clipping factor by which the gradients in `_unscaled` are still to be multiplied
        )
        self._unscaled: dict[int, Tensor] = {}
        self._hosted = HostedState(self.inner, arena, torch.device("cpu"))
        self._hosted.adopt_new()
        lanes = lanes or Lanes()
        largest_bytes = max([2**12, *(local_part(master).numel() * 4 for master in trained)])
        self._gradients = HostGradients(
            arena, self._device, copies=self._copies, slot_bytes=min(GRADIENT_SLOT_BYTES, largest_bytes), lanes=lanes
        )
        self._gradients.before_adding = self._apply_scale
        for master in trained:
            self._gradients.watch(masters.parameters[self._name_of[id(master)]], master)
        self._chunks: list[Chunk] = []
        self._chunk_bytes = chunk_bytes
        self._native = NativeAdamW.of(self.inner) if native else None
        logger.debug(f"masters, gradients and optimizer state on the host: {self.host_bytes / 2**30:.2f} GiB")

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def device_bytes(self) -> int:
        return 0  # weights and the gradients of the moment are there in any mode

    def synchronize(self) -> None:
        self._gradients.finish()
        self.masters.synchronize()

    def close(self) -> None:
        """Leaves the model's gradients on the device again, for another optimizer. This one cannot be used any more."""
        self.synchronize()
        self._gradients.close()

    # --- gradients ------------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.finish()
        self._scale, self._unscaled = None, {}
        self.inner.zero_grad(set_to_none)
        for parameter in self.masters.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        self._apply_scale()
        return super().gradients()

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self.zero_grad()
        self._gradients.restore({id(self.masters.masters[name]): tensor for name, tensor in gradients.items()})

    def clip_gradients(self, max_norm: float | None, *, within_step: bool = False) -> Tensor:
        """Returns the global norm before clipping. The factor is applied within the step, where the gradients are read
        anyway: the masters' `.grad` shows them unclipped, `gradients()` clipped."""
        self._apply_scale()
        norm = clip_gradients(updated_parameters(self), None)
        self._scale = clipping_factor(norm, max_norm)
        if self._scale is not None:
            self._unscaled = {id(master): master for master in updated_parameters(self)}
        return norm

    # --- stepping -------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        self.synchronize()
        self.masters.check_unchanged()
        if self._native is None and self._scale is None and self.masters.all_shared:
            plain_step(self.inner)()  # nothing is to be done per chunk
        else:
            self._step_on_host()
        self._hosted.adopt_new()

    def _step_on_host(self) -> None:
        if self._hosted.stale:
            # Chunks are for sending what is ready, and for passes that follow each other while data is in the cache.
            is_one_pass = self._native is not None and not self._copies
            chunk_bytes = sys.maxsize if is_one_pass else self._chunk_bytes
            self._chunks = plan_chunks(self.inner, largest_part_bytes, chunk_bytes)
            self._hosted.stale = False
        step = ChunkedStep(self.inner)
        for chunk in self._chunks:
            members = chunk.parameters(self.param_groups)
            sent = self._step_natively(chunk)
            if sent is None:
                self._apply_scale(members)
                step(chunk)
            self.masters.refresh(self._names([member for member in members if id(member) not in (sent or ())]))

    def _step_natively(self, chunk: Chunk) -> set[int] | None:
        """Steps the chunk by the native kernel and returns the ids of the masters whose weights are on their way to the
        device; None if the kernel does not take it."""
        groups = self.param_groups
        active = {index: [groups[index]["params"][i] for i in places] for index, places in chunk.members.items()}
        active = {index: [m for m in masters if m.grad is not None] for index, masters in active.items()}
        if self._native is None or not self._native.takes(active):
            return None
        staged = self.masters.stage(self._names([master for masters in active.values() for master in masters]))
        places = {id(self.masters.masters[name]): values for name, values in staged.items()}
        is_unscaled = any(id(master) in self._unscaled for masters in active.values() for master in masters)
        self._native.step(active, self._scale if is_unscaled else None, places)
        self.masters.send(staged)
        return set(places)

    def _apply_scale(self, masters: Iterable[Tensor] | None = None) -> None:
        """Multiplies gradients by the clipping factor that is due; by default all that are."""
        for master in list(self._unscaled.values()) if masters is None else masters:
            if self._unscaled.pop(id(master), None) is not None and master.grad is not None:
                local_part(master.grad).mul_(self._scale)
        if not self._unscaled:
            self._scale = None

    def _names(self, masters: list[Tensor]) -> list[str]:
        return [self._name_of[id(master)] for master in masters]

    # --- groups, weights ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`param_group["params"]`: parameters of the model, as for the other modes."""
        group = self._with_masters(param_group)
        with StateOnHost(group["params"], self._arena):
            self.inner.add_param_group(group)
        for master in group["params"]:
            self._gradients.watch(self.masters.parameters[self._name_of[id(master)]], master)
        self._adopt(group)

    def _take_over(self) -> None:
        self._hosted.adopt_new()

    def _adopt(self, group: dict[str, Any]) -> None:
        self._hosted.adopt(group["params"])
        self._hosted.stale = True

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of the group with masters in the places of the model's parameters."""
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        named = [item[1] if isinstance(item, tuple) else item for item in parameters]
        unknown = sum(id(parameter) not in self._name_of for parameter in named)
        if unknown:
            raise TrainingError(
                f"{unknown} parameters of the group {group.get('name')!r} are not among the model's floating-point "
                "parameters, so there are no masters to train"
            )
        names = [self._name_of[id(parameter)] for parameter in named]
        return {**group, "params": [self.masters.masters[name] for name in names], "param_names": names}

    def load_master_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        self.synchronize()
        if weights is None:
            self.masters.take_from_device()
        else:
            copy_weights(weights, self.masters.masters)
            self.masters.refresh(weights)
