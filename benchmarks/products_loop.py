"""Worker: a linear layer in float32 on CPU, forward and backward, by torch's MKL and by oneDNN, a call of each in turn."""

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.in_turn import run_in_turn
from trainer.kernels import products


def once(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Runs the product, and its backward."""
    torch.autograd.grad(function(x, weight), (x, weight), grad)


def main() -> None:
    products.onednn_is_faster, products.LEAST_WORK = lambda: True, 0  # whatever the processor and the shape
    rows, inputs, outputs = json.loads(sys.argv[1])["shape"]
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(s, generator=generator) for s in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    given = (x.requires_grad_(), weight.requires_grad_(), grad)
    run_in_turn({"MKL": partial(once, F.linear, *given), "oneDNN": partial(once, products.linear, *given)}, rows)


if __name__ == "__main__":
    main()
