"""The rows of a parameter that this rank holds."""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_rows(tensor: Tensor) -> tuple[Tensor, slice]:
    """Returns this rank's storage of `tensor` and which rows (first dimension) of the whole it holds.

    A plain tensor is all there; a DTensor is sharded by rows, as `fully_shard` does, or replicated.
    """
    if not isinstance(tensor, DTensor):
        return tensor, slice(0, tensor.shape[0] if tensor.ndim else 1)
    local = cast(Tensor, tensor.to_local())
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, slice(offset[0], offset[0] + shape[0])


@torch.no_grad()
def copy_shard(target: Tensor, whole: Tensor) -> None:
    """Copies this rank's rows of `whole` (the full tensor, any device and dtype) into `target`."""
    local, rows = local_rows(target)
    local.copy_(whole[rows] if target.ndim else whole)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor on this rank; for a DTensor every rank must call it."""
    return cast(Tensor, tensor.full_tensor()) if isinstance(tensor, DTensor) else tensor
