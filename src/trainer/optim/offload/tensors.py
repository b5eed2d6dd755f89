"""Plain and sharded tensors alike: the part on this rank, and a sharded tensor around another part."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the plain tensor itself, detached; the memory is shared."""
    return bare_part(tensor).detach()


def bare_part(tensor: Tensor) -> Tensor:
    """The same without detaching, for looking at: a step does it some hundred times."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def around(part: Tensor, like: Tensor) -> Tensor:
    """Returns `part` as a tensor of the global shape and sharding of `like`; `part` itself where `like` is plain.

    Not DTensor.from_local: it would move a part on the host to the mesh's device. Collectives over such a tensor run
    on the mesh's CPU backend.
    """
    if not isinstance(like, DTensor):
        return part
    spec = like._spec
    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    return DTensor(part, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


def largest_part_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the largest rank's part: the same number on all ranks, also where shards are uneven."""
    if not isinstance(tensor, DTensor):
        return tensor.numel() * tensor.element_size()
    shape = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            shape[dim] = -(-shape[dim] // size)
    return math.prod(shape) * tensor.element_size()
