"""Whether weights are numbers: a state with NaN in it is no place to go on from."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def first_nonfinite(state: Mapping[str, Tensor], owner: str) -> str | None:
    """Returns the name of the first floating-point tensor of `owner` with a NaN or an infinity on this rank, else None.

    One pass at the speed of memory that allocates nothing of the tensors' size, and one wait for the device.
    """
    parts = {}
    for name, tensor in state.items():
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name.startswith(f"{owner}.") and part.is_floating_point() and part.numel():
            parts[name] = part.detach()
    if not parts:
        return None
    # NaN and infinities survive any sum. A sum can also overflow where every value is finite; those few are looked at again.
    sums = [part.sum(dtype=torch.float64 if part.dtype == torch.float64 else torch.float32) for part in parts.values()]
    finite = torch.isfinite(torch.stack([total.double().to(sums[0].device) for total in sums])).tolist()
    suspects = [name for name, is_finite in zip(parts, finite, strict=True) if not is_finite]
    return next((name for name in suspects if not torch.isfinite(parts[name]).all()), None)
