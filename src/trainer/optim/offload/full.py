"""Mode "full": masters, gradients and optimizer state on the host; the device has weights in the compute dtype."""

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from trainer.core.log import logger
from trainer.core.transfer import HostArena, Lanes
from trainer.errors import TrainingError
from trainer.optim.clip import clip_gradients, clipping_factor
from trainer.optim.offload.base import OffloadOptimizer, copy_weights, updated_parameters
from trainer.optim.offload.chunks import Chunk, ChunkedStep, plain_step, plan_chunks
from trainer.optim.offload.early import EarlyUpdate
from trainer.optim.offload.gradients import HostGradients
from trainer.optim.offload.hosting import HostedState, StateOnHost
from trainer.optim.offload.masters import HostMasters
from trainer.optim.offload.native import NativeAdamW
from trainer.optim.offload.state import Transfer, copies
from trainer.optim.offload.tensors import largest_part_bytes, local_part
from trainer.optim.sign_sgd import SignSGD

CHUNK_BYTES = 2**26
GRADIENT_SLOT_BYTES = 2**25
ELEMENTWISE = (AdamW, SGD, SignSGD)
"""Update rules that ask no other parameter and no other rank, whose chunks can be stepped at any time in any order."""

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes the optimizer over param groups whose "params" are float32 tensors."""


class FullCPUOffloadOptimizer(OffloadOptimizer):
    """Trains float32 masters on the host and keeps the model's weights on the device equal to them, rounded.

    Gradients leave the device as backward makes them and are summed on the host in float32, over micro-steps too; the
    masters' `.grad` are these sums, so clipping and skipping a step work as ever. A step goes through the masters chunk
    by chunk, and a finished chunk's weights are on their way to the device while the next one is stepped. Where nothing
    has to wait for the whole gradient, `begin_update` lets it start while the backward pass goes on.

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
        self._scale: Tensor | None = None  # a clipping factor, which is still due ...
        self._unscaled: dict[int, Tensor] = {}  # ... for the gradients of these
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
        self._chunks: list[Chunk] = []  # of the latest step
        self._plans: dict[int, list[Chunk]] = {}
        self._chunk_bytes = chunk_bytes
        self._early: EarlyUpdate | None = None
        self._is_torn = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="update")  # started when it is needed
        self._native = NativeAdamW.of(self.inner) if native else None
        logger.debug(f"masters, gradients and optimizer state on the host: {self.host_bytes / 2**30:.2f} GiB")

    @property
    def host_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def device_bytes(self) -> int:
        return 0  # weights and the gradients of the moment are there in any mode

    @property
    def is_torn(self) -> bool:
        return self._is_torn

    def synchronize(self) -> None:
        """Returns when no copy is in flight any more, and no chunk of an update that has begun.

        Raises:
            TrainingError: an update was begun and given up, so there is no state that could be read or saved.
        """
        self._check_whole()
        self._gradients.finish()
        self._wait_early()
        self.masters.synchronize()

    def close(self) -> None:
        """Leaves the model's gradients on the device again, for another optimizer. This one can be read, and not used any more.

        Without it the model, its masters and all host memory stay for as long as the process lives: torch keeps the hooks
        on the parameters where Python's garbage collector does not look.
        """
        self._gradients.close()
        self._worker.shutdown()
        self.masters.synchronize()

    # --- gradients ------------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._give_up()
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
        anyway: the masters' `.grad` shows them unclipped, `gradients()` clipped.

        Raises:
            TrainingError: the update has begun (`begin_update`), so it is too late for a factor.
        """
        if max_norm is not None and self._early is not None:
            raise TrainingError("the update has begun in the backward pass: gradients cannot be clipped any more")
        self._apply_scale()
        norm = clip_gradients(updated_parameters(self), None)
        self._scale = clipping_factor(norm, max_norm)
        if self._scale is not None:
            self._unscaled = {id(master): master for master in updated_parameters(self) if master.grad is not None}
        return norm

    # --- stepping -------------------------------------------------------------------------------------------------------

    def begin_update(self) -> bool:
        """Lets the update begin in the coming backward pass, the last one before `step`.

        A chunk is stepped, with the entries that its groups have now, as soon as all its gradients are complete; `step`
        does the rest. `zero_grad` in the place of `step` leaves a part of the update in the weights: from then on all but
        a new optimizer is refused. Nothing begins, and False is returned, where a step has to know the whole gradient: for
        rules that are not `ELEMENTWISE`, and where hooks want to run before it.

        Raises:
            TrainingError: weights were changed outside of the optimizer.
        """
        self._check_whole()
        hooks = (_global_optimizer_pre_hooks, self._optimizer_step_pre_hooks, self.inner._optimizer_step_pre_hooks)
        if type(self.inner) not in ELEMENTWISE or any(hooks) or self._early is not None:
            return self._early is not None
        self.masters.check_unchanged()
        if self._unscaled:
            self._gradients.finish()
            self._apply_scale()
        self._chunks = chunks = self._planned(self._chunk_bytes)
        step, members = ChunkedStep(self.inner), [chunk.parameters(self.param_groups) for chunk in chunks]

        @torch.no_grad()  # per thread
        def step_chunk(index: int, early: bool) -> None:
            if early:
                self.masters.announce_write(self._names(members[index]))
            self._step_chunk(chunks[index], step, early=early)

        self._early = EarlyUpdate(members, step_chunk, self._worker)
        self._gradients.on_arrival = self._early.arrived
        return True

    def _update(self) -> None:
        self.synchronize()
        self.masters.check_unchanged()
        if self._early is not None:
            self.masters.arrive()
            self._early.finish()
            self._end_early()
        elif self._native is None and self._scale is None and self.masters.all_shared:
            plain_step(self.inner)()  # nothing is to be done per chunk
        else:
            self._step_on_host()
        self._hosted.adopt_new()

    def _step_on_host(self) -> None:
        # Chunks are for sending what is ready, and for passes that follow each other while data is in the cache.
        is_one_pass = self._native is not None and not self._copies
        self._chunks = self._planned(sys.maxsize if is_one_pass else self._chunk_bytes)
        step = ChunkedStep(self.inner)
        for chunk in self._chunks:
            self._step_chunk(chunk, step)

    def _planned(self, chunk_bytes: int) -> list[Chunk]:
        if self._hosted.stale:
            self._plans.clear()
            self._hosted.stale = False
        if chunk_bytes not in self._plans:
            self._plans[chunk_bytes] = plan_chunks(self.inner, largest_part_bytes, chunk_bytes)
        return self._plans[chunk_bytes]

    def _step_chunk(self, chunk: Chunk, step: ChunkedStep, *, early: bool = False) -> None:
        members = chunk.parameters(self.param_groups)
        sent = self._step_natively(chunk, early)
        if sent is None:
            self._apply_scale(members)
            step(chunk)
        rest = [member for member in members if id(member) not in (sent or ())]
        self.masters.refresh(self._names(rest), early=early)

    def _wait_early(self) -> None:
        try:
            if self._early is not None:
                self._early.wait()
        except BaseException:
            self._is_torn = True
            self._end_early()
            raise

    def _give_up(self) -> None:
        self._wait_early()
        if self._early is not None:
            self._is_torn |= bool(self._early.begun)
            self._end_early()

    def _end_early(self) -> None:
        """The next backward pass is an ordinary one."""
        self._early = self._gradients.on_arrival = None

    def _check_whole(self) -> None:
        if self._is_torn:
            raise TrainingError(
                "an update was begun in the backward pass and given up, so the weights are neither those before nor those "
                "after it: go on from a checkpoint, with a new optimizer"
            )

    def _step_natively(self, chunk: Chunk, early: bool) -> set[int] | None:
        """Steps the chunk by the native kernel and returns the ids of the masters whose weights are on their way to the
        device; None if the kernel does not take it."""
        groups = self.param_groups
        active = {index: [groups[index]["params"][i] for i in places] for index, places in chunk.members.items()}
        active = {index: [m for m in masters if m.grad is not None] for index, masters in active.items()}
        members = None if self._native is None else self._native.plan(active)
        if self._native is None or members is None:
            return None
        staged = self.masters.stage(self._names([master for masters in active.values() for master in masters]))
        places = {id(self.masters.masters[name]): values for name, values in staged.items()}
        is_unscaled = any(id(master) in self._unscaled for masters in active.values() for master in masters)
        self._native.step(members, self._scale if is_unscaled else None, places)
        self.masters.send(staged, early=early)
        return set(places)

    def _apply_scale(self, masters: Iterable[Tensor] | None = None) -> None:
        """Multiplies gradients by the clipping factor that is due; by default all that are."""
        for master in list(self._unscaled.values()) if masters is None else masters:
            is_due = self._unscaled.pop(id(master), None) is not None
            if is_due and self._scale is not None and master.grad is not None:
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
