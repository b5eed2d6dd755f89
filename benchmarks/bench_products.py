"""Products of a linear layer in float32 on CPU: by MKL, as torch has them, and by oneDNN, as `kernels.products` may choose."""

from benchmarks.harness import Block, Ratio, interleave, our_worker, participants
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
PROCESSES = 3
"""Of each shape, so that no ratio hangs on where one process has its tensors."""


def run(options: Options) -> Result:
    """Compares the time of forward and backward; the bound holds where ours chooses oneDNN."""
    import torch

    from trainer.kernels.products import uses_onednn

    processes = 1 if options.smoke else PROCESSES
    result = Result("products", options.settings() | {"dtype": "float32", "processes": processes})
    for shape in SHAPES[: 1 if options.smoke else None]:
        rows, inputs, outputs = shape
        label = f"{rows:,} x {inputs:,} by {outputs:,}"
        blocks = _blocks(shape, processes, options)
        for threads in options.threads:
            torch.set_num_threads(threads)
            chosen = uses_onednn(torch.empty(rows, inputs), torch.empty(outputs, inputs))
            notes = [block.notes for block in blocks[threads]]
            ratio = Ratio.of([note["oneDNN"] for note in notes], [note["MKL"] for note in notes]).summary()
            ours = "oneDNN" if chosen else "MKL"
            result.cases.append({"case": label, "threads": threads, "ours": ours, "oneDNN / MKL": ratio})
            where = f"{label}, {threads} thread{'s' if threads > 1 else ''}"
            bound = 1.0 if chosen else None
            result.targets.append(Target(f"oneDNN's time / MKL's, {where}", ratio["ratio"], bound, at_least=False))
    return result


def _blocks(shape: tuple[int, ...], processes: int, options: Options) -> dict[int, list[Block]]:
    """Returns the blocks of all processes, by the number of threads; each process runs its share of the rounds."""
    found: dict[int, list[Block]] = {threads: [] for threads in options.threads}
    worker = {"products": our_worker("benchmarks.products_loop", {"shape": shape})}
    rounds = -(-options.rounds // processes)
    for _ in range(processes):
        with participants(worker, threads=max(options.threads)) as started:
            for threads in options.threads:
                blocks = interleave(started, threads=threads, rounds=rounds, block_seconds=options.block_seconds)
                found[threads] += blocks["products"]
    return found
