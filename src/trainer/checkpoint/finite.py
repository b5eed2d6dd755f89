"""Whether weights are numbers: a state with NaN in it is no place to go on from."""

from typing import Any

import numpy as np

# dtype -> integers of its size, and the bits of its infinity (of E4M3, which has none: of its NaN). Everything with these
# exponent bits set is no number: read as an integer it is at least that large, with the sign bit if read as unsigned.
_BITS: dict[str, tuple[Any, Any, int]] = {
    "F64": (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.int32, np.uint32, 0x7F80_0000),
    "F16": (np.int16, np.uint16, 0x7C00),
    "BF16": (np.int16, np.uint16, 0x7F80),
    "F8_E5M2": (np.int8, np.uint8, 0x7C),
    "F8_E4M3": (np.int8, np.uint8, 0x7F),
}
_LOOK_BYTES = 1 << 18  # at a time: the second look finds it in a core's own cache


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
        if self.wants(name) and not all_finite(dtype, data):
            self.found = name


def all_finite(dtype: str, data: memoryview) -> bool:
    """Whether every value is a number; True for dtypes that hold nothing else. Two looks per value, at 10 GB/s."""
    if dtype not in _BITS:
        return True
    signed, unsigned, infinity = _BITS[dtype]
    negative = infinity + (1 << (8 * np.dtype(unsigned).itemsize - 1))
    for start in range(0, len(data), _LOOK_BYTES):
        piece = data[start : start + _LOOK_BYTES]
        if np.frombuffer(piece, signed).max() >= infinity or np.frombuffer(piece, unsigned).max() >= negative:
            return False
    return True
