"""The global gradient norm and clipping, over plain and sharded gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

_ROW = 4096
"""Elements whose squares are added one after the other on CPU. torch adds those of a whole tensor so, in float32 and on one
thread, which over millions of elements loses digits."""
_LARGE = 2**16

Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Returns the global L2 norm of all gradients (0-dim, float32, before clipping) and clips them in place.

    Args:
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)), and left alone where that is one; None only
            measures.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    if max_norm is not None and clipping_factor(norm, max_norm) is not None:
        clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


def clipping_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Returns what gradients of this global norm are to be multiplied with (0-dim, float32); None = left as they are."""
    if max_norm is None:
        return None
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_
    return None if factor.item() == 1.0 else factor


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all elements of all gradients: 0-dim, float32, the same on all ranks.

    Its bits depend on the order of the gradients and on how they are sharded, not on the number of threads.
    """
    layouts: dict[Layout, list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            layout = (gradient.device_mesh, tuple(gradient.placements))
            layouts.setdefault(layout, []).append(gradient.to_local())
        else:
            layouts.setdefault(None, []).append(gradient)
    on_cpu = all(part.device.type == "cpu" for parts in layouts.values() for part in parts)
    if not on_cpu or any(layout and any(map(Placement.is_partial, layout[1])) for layout in layouts):
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # the shards' norms are still to be reduced
        return norm.to(torch.float32)
    if not layouts.keys() - {None}:
        return _norm(layouts.get(None, ())).to(torch.float32)
    squares = [_reduced(_norm(parts).double().square(), layout) for layout, parts in layouts.items()]
    return torch.stack(squares).sum().sqrt().to(torch.float32)


def _norm(parts: Sequence[Tensor]) -> Tensor:
    """Returns the norm of plain CPU tensors, 0-dim."""
    pieces, rows = [], []
    for part in parts:
        whole = part.numel() // _ROW * _ROW if part.numel() > _LARGE else 0
        flat = part.reshape(-1) if whole else part
        if whole:
            rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        if whole < part.numel():
            pieces.append(flat[whole:] if whole else part)
    if pieces:
        rows.insert(0, torch.stack(torch._foreach_norm(pieces)))  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.cat(rows)) if rows else torch.zeros(())


def _reduced(square: Tensor, layout: Layout) -> Tensor:
    """Returns the sum of `square` over the ranks that hold other shards."""
    if layout is not None:
        mesh, placements = layout
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                all_reduce(square, ReduceOp.SUM, group=mesh.get_group(dim))
    return square
