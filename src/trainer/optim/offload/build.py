"""From `model.offload` to the optimizer that a run steps and the owner of its weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.core.distributed import raise_together
from trainer.optim.offload import full, state
from trainer.optim.offload.base import OffloadOptimizer
from trainer.optim.offload.full import FullCPUOffloadOptimizer, OptimizerFactory
from trainer.optim.offload.hosting import StateOnHost
from trainer.optim.offload.masters import HostMasters
from trainer.optim.offload.state import CPUOffloadOptimizer, Transfer, copies, new_arena
from trainer.optim.offload.tensors import local_part
from trainer.optim.offload.weights import MasterWeights, Stateful

Mode = Literal["none", "optimizer", "full"]


@dataclass(frozen=True)
class Offloaded:
    """What an offload mode gives a run.

    Attributes:
        optimizer: for `train_step`, the schedule and `OptimizerState`.
        weights: the model's owner in a checkpoint; the same names and dtypes in all modes.
    """

    optimizer: Optimizer
    weights: Stateful

    @property
    def host_bytes(self) -> int:
        """Host memory that this rank holds for offloading."""
        return self.optimizer.host_bytes if isinstance(self.optimizer, OffloadOptimizer) else 0


def build_offload(
    mode: Mode,
    optimizer_factory: OptimizerFactory,
    groups: list[dict[str, Any]],
    model: nn.Module,
    model_state: Stateful,
    *,
    compute_dtype: torch.dtype = torch.float32,
    float32: Iterable[str] = (),
    transfer: Transfer = "auto",
    chunk_bytes: int | None = None,
) -> Offloaded:
    """Returns the optimizer of `mode` over `groups`, with all its host memory allocated.

    Call it after the weights are loaded and before the first forward. In mode "full" it gives the model's parameters the
    compute dtype, in place: the model must take them as they come.

    Args:
        optimizer_factory: makes the optimizer, with its state, over groups like these.
        groups: over the model's float32 parameters, with "param_names".
        model_state: owner of the model's weights as they are without offload.
        compute_dtype: mode "full": dtype of the model's weights on the device.
        float32: mode "full": names of parameters that stay float32 on the device, where they are not sharded. For
            embeddings: a lookup's gradient sums many rows, in the dtype of the weight.
        transfer: see `Transfer`; anything but "auto" is for tests.
        chunk_bytes: see the two optimizers; by default theirs.
    """
    if mode == "none":
        return Offloaded(optimizer_factory(groups), model_state)
    built, error = None, None
    try:
        if mode == "optimizer":
            built = _offload_optimizer(optimizer_factory, groups, model_state, transfer, chunk_bytes)
        else:
            named = list(model.named_parameters())
            device = _device(parameter for _, parameter in named)
            arena = new_arena([parameter for _, parameter in named], device)
            masters = HostMasters(
                named, arena, copies=copies(transfer, device), compute_dtype=compute_dtype, float32=float32
            )
            masters.cast_model(model)
            optimizer = FullCPUOffloadOptimizer(
                optimizer_factory,
                groups,
                masters,
                arena,
                transfer=transfer,
                chunk_bytes=chunk_bytes or full.CHUNK_BYTES,
            )
            built = Offloaded(optimizer, MasterWeights(optimizer, model_state))
    except Exception as problem:
        error = problem
    raise_together(error, f"allocating host memory for model.offload = {mode!r}")  # no rank trains on alone
    assert built is not None
    return built


def _offload_optimizer(
    optimizer_factory: OptimizerFactory,
    groups: list[dict[str, Any]],
    model_state: Stateful,
    transfer: Transfer,
    chunk_bytes: int | None,
) -> Offloaded:
    parameters = [parameter for group in groups for parameter in group["params"]]
    arena = new_arena(parameters, _device(parameters))
    with StateOnHost(parameters, arena):
        inner = optimizer_factory(groups)
    optimizer = CPUOffloadOptimizer(inner, arena=arena, transfer=transfer, chunk_bytes=chunk_bytes or state.CHUNK_BYTES)
    return Offloaded(optimizer, model_state)


def _device(parameters: Iterable[Tensor]) -> torch.device:
    return next((local_part(parameter).device for parameter in parameters), torch.device("cpu"))
