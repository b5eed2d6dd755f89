"""What a piece of code allocates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def largest_allocation(function: Callable[[], Any]) -> int:
    """Returns the elements of the largest tensor storage that any operation in `function` returns."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    with Watch():
        function()
    return largest
