"""Worker: one optimizer's step over the matrices of a decoder, or matrix products alone, to say how fast those can be."""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.gate import Gate, Stopped
from trainer.optim.muon import Muon
from trainer.optim.newton_schulz import multiplications

LR, WEIGHT_DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.95, 5


def parameters(shapes: list[list[int]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def ours(shapes: list[list[int]]) -> Optimizer:
    return Muon(parameters(shapes), LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, compute_dtype="bfloat16")


def torchs(shapes: list[list[int]]) -> Optimizer:
    return torch.optim.Muon(
        parameters(shapes), LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )


def dions(shapes: list[list[int]]) -> Optimizer:
    """Its functions are compiled as they come; here they run as they are written. Other constants, the same products."""
    torch.compiler.set_stance("force_eager")
    from dion import Muon as DionMuon  # type: ignore[import-not-found]

    return DionMuon(
        parameters(shapes),
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        mu=MOMENTUM,
        nesterov=True,
        adjust_lr="rms_norm",
        use_polar_express=False,
    )


OPTIMIZERS: dict[str, Callable[[list[list[int]]], Optimizer]] = {"ours": ours, "torch": torchs, "dion, eager": dions}


def products(shapes: list[list[int]]) -> tuple[Callable[[], object], int]:
    """Returns a call that multiplies square matrices of the commonest short side in bfloat16, and its multiplications."""
    size, count = min(shapes[0]), 24
    left = torch.randn(count, size, size).to(torch.bfloat16)
    out = torch.empty(1, size, size, dtype=torch.bfloat16)

    def multiply() -> None:
        for each in left.split(1):
            torch.bmm(each, each, out=out)

    return multiply, count * size**3


def main() -> None:
    arguments = json.loads(sys.argv[1])
    sys.path.extend(arguments["path"])
    shapes, form = arguments["shapes"], arguments["form"]
    gate = Gate(torch.set_num_threads)
    if form == "products":
        work, multiplied = products(shapes)
    else:
        work = OPTIMIZERS[form](shapes).step
        multiplied = sum(multiplications((rows, columns), STEPS) for rows, columns in shapes)
    try:
        while True:
            gate.before_step()
            work()
            gate.note(multiplications=multiplied)
    except Stopped:
        pass


if __name__ == "__main__":
    main()
