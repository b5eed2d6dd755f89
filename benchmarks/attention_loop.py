"""Worker: attention over one document in bfloat16 on CPU, forward and backward, as torch runs it and in float32.

Both in one process, a call of each in turn.
"""

import json
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.in_turn import run_in_turn

FORMS = {"16 bits": torch.bfloat16, "float32": torch.float32}


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Returns q, k, v, bfloat16 [1, heads, tokens, head_dim], which want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, number, tokens, head_dim) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def once(given: list[Tensor], dtype: torch.dtype) -> None:
    """Runs the call in `dtype`, and its backward."""
    q, k, v = (x.to(dtype) for x in given)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    output = output.to(given[0].dtype)
    output.backward(torch.ones_like(output))
    for x in given:
        x.grad = None


def main() -> None:
    arguments = json.loads(sys.argv[1])
    given = inputs(**arguments)
    forms = {name: partial(once, given, dtype) for name, dtype in FORMS.items()}
    run_in_turn(forms, arguments["tokens"])


if __name__ == "__main__":
    main()
