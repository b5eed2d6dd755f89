"""A Muon step over a decoder's matrices: ours beside torch.optim.Muon and microsoft/dion's Muon, run eagerly.

Dion takes part if it can be imported, or if DION_CHECKOUT names a folder that holds it.
"""

import importlib.util
import os
from statistics import median

from benchmarks.harness import Block, Ratio, compare, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target

HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS = 768, 2048, 6
TORCH_BOUND, DION_BOUND = 0.62, 0.8
MOST_ROUNDS = 7  # a step takes seconds


def decoder_shapes(hidden_size: int, intermediate_size: int, layers: int) -> list[list[int]]:
    """Returns the matrices of a Llama without grouped heads: 42 with 42.5 M parameters at the sizes measured."""
    attention = [[hidden_size, hidden_size]] * 4
    return (attention + [[intermediate_size, hidden_size]] * 2 + [[hidden_size, intermediate_size]]) * layers


def run(options: Options) -> Result:
    """Measures with every number of threads; the bounds hold for the largest."""
    sizes = (32, 96, 1) if options.smoke else (HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS)
    shapes = decoder_shapes(*sizes)
    rounds = min(MOST_ROUNDS, options.rounds)
    checkout = os.environ.get("DION_CHECKOUT")
    forms = ["ours", "torch", "products"]
    if checkout or importlib.util.find_spec("dion"):
        forms.insert(2, "dion, eager")
    result = Result(
        "muon",
        {
            "rounds": rounds,
            "matrices": len(shapes),
            "parameters": sum(rows * columns for rows, columns in shapes),
            "dion": "measured" if "dion, eager" in forms else "not importable",
        },
    )
    arguments = {"shapes": shapes, "path": [checkout] if checkout else []}
    workers = {form: our_worker("benchmarks.muon_loop", arguments | {"form": form}) for form in forms}
    with participants(workers, threads=max(options.threads)) as started:
        for threads in options.threads:
            blocks = interleave(started, threads=threads, rounds=rounds, block_seconds=0.0)
            for form in forms:
                result.cases.append(_case(form, threads, blocks))
            result.targets += _targets(blocks, threads, bound=threads == max(options.threads))
    return result


def _case(form: str, threads: int, blocks: dict[str, list[Block]]) -> dict:
    measured = blocks[form]
    return {
        "case": form,
        "threads": threads,
        "seconds": round(median(block.seconds / block.steps for block in measured), 4),
        "cpu_seconds": round(median(block.cpu_seconds / block.steps for block in measured), 4),
        # Rates turned around are times: the form's rate / ours = our time / the form's.
        "our time / its": compare(measured, blocks["ours"]) if form in ("torch", "dion, eager") else None,
    }


def _targets(blocks: dict[str, list[Block]], threads: int, *, bound: bool) -> list[Target]:
    where = f"{threads} thread{'s' if threads > 1 else ''}"
    targets = []
    for form, limit in (("torch", TORCH_BOUND), ("dion, eager", DION_BOUND)):
        if form in blocks:
            ratio = compare(blocks[form], blocks["ours"])["ratio"]
            targets.append(Target(f"our step / {form}'s, {where}", ratio, limit if bound else None, at_least=False))
    share = Ratio.of(*([_multiplication_rate(block) for block in blocks[form]] for form in ("ours", "products")))
    targets.append(Target(f"our step's multiplications per second / those of products alone, {where}", share.median))
    return targets


def _multiplication_rate(block: Block) -> float:
    return block.notes["multiplications"] * block.steps / block.seconds
