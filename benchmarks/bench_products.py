"""Products of a linear layer in float32 on CPU: by MKL, as torch has them, and by oneDNN, as `kernels.products` may choose."""

from benchmarks.harness import Ratio, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target

SHAPES = (
    (64, 64, 64),
    (512, 64, 256),
    (512, 256, 256),
    (512, 256, 1024),
    (2048, 256, 256),
    (2048, 1024, 256),
    (448, 256, 8192),
    (512, 576, 1536),
)
"""Rows, inputs, outputs."""


def run(options: Options) -> Result:
    """Compares the time of forward and backward; the bound holds where ours chooses oneDNN."""
    import torch

    from trainer.kernels.products import uses_onednn

    result = Result("products", options.settings() | {"dtype": "float32"})
    for shape in SHAPES[: 1 if options.smoke else None]:
        rows, inputs, outputs = shape
        label = f"{rows:,} x {inputs:,} by {outputs:,}"
        with participants(
            {"products": our_worker("benchmarks.products_loop", {"shape": shape})}, threads=max(options.threads)
        ) as started:
            for threads in options.threads:
                torch.set_num_threads(threads)
                chosen = uses_onednn(torch.empty(rows, inputs), torch.empty(outputs, inputs))
                blocks = interleave(
                    started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds
                )["products"]
                notes = [block.notes for block in blocks]
                ratio = Ratio.of([note["oneDNN"] for note in notes], [note["MKL"] for note in notes]).summary()
                result.cases.append(
                    {
                        "case": label,
                        "threads": threads,
                        "ours": "oneDNN" if chosen else "MKL",
                        "oneDNN / MKL": ratio,
                    }
                )
                where = f"{label}, {threads} thread{'s' if threads > 1 else ''}"
                bound = 1.0 if chosen else None
                result.targets.append(Target(f"oneDNN's time / MKL's, {where}", ratio["ratio"], bound, at_least=False))
    return result
