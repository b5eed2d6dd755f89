"""The global gradient norm and clipping, over plain and sharded gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Returns the global L2 norm of all gradients (0-dim, float32, before clipping) and clips them in place.

    Args:
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)); None only measures.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # the shards' norms are still to be reduced over the mesh
    if max_norm is not None:
        clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm.to(torch.float32)
