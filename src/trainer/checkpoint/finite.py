"""Whether weights are numbers: a state with NaN in it is no place to go on from."""

import numpy as np
import torch

from trainer.checkpoint.dcp import DTYPES

_NUMPY = {"F64": np.float64, "F32": np.float32}


class FiniteCheck:
    """Looks at the bytes of one owner's tensors as they are written, on the thread that writes them.

    Attributes:
        found: the first tensor seen with a NaN or an infinity, by name; None = none so far.
    """

    def __init__(self, owner: str):
        self._prefix = f"{owner}."
        self.found: str | None = None

    def wants(self, name: str) -> bool:
        """Whether anything about this tensor is still to be found out."""
        return self.found is None and name.startswith(self._prefix)

    def look(self, name: str, dtype: str, data: memoryview) -> None:
        """Takes a piece of a tensor: whole elements of `dtype` (a safetensors name)."""
        if self.wants(name) and DTYPES[dtype].is_floating_point and len(data) and not _all_finite(dtype, data):
            self.found = name


def _all_finite(dtype: str, data: memoryview) -> bool:
    kind = _NUMPY.get(dtype)
    if kind is None:
        return bool(torch.isfinite(torch.frombuffer(data, dtype=DTYPES[dtype]).float()).all())
    values = np.frombuffer(data, dtype=kind)
    # NaN and infinities survive any sum, which one thread takes at the speed of memory. A sum can also overflow where
    # every value is finite; those few are looked at again.
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(values)) or np.isfinite(values).all())
