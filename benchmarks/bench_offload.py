"""The optimizer step under each offload mode on CPU, against torch's fused AdamW on the same parameters.

On CPU the host's memory is the device's, so what is measured is what offload adds to a step that moves nothing. What the
copies to and from a GPU cost can only be seen on one.
"""

import shutil
import statistics

from benchmarks.harness import Block, Ratio, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target

SIZE = {"hidden_size": 768, "layers": 12, "vocab_size": 32_000}  # 109.5 M parameters
SMOKE_SIZE = {"hidden_size": 64, "layers": 2, "vocab_size": 256}

COMPARISONS = (
    ("full", "flat", False, 1.05),
    ("optimizer", "none", False, 1.10),
    ("full", "none", True, 0.80),
    ("full bf16", "traffic", False, 1.15),
)
"""Ours, the reference, whether both clip to a global norm, and the most that ours may take of the reference's time."""

REFERENCES = {
    "flat": "torch over one flat tensor",
    "none": "torch",
    "traffic": "a kernel that only moves the same 28 bytes",
}


def run(options: Options) -> Result:
    """Measures with every number of threads; the bounds hold for the largest."""
    size = SMOKE_SIZE if options.smoke else SIZE
    result = Result("offload", options.settings() | size | {"unit": "nanoseconds per parameter and step"})
    for ours, reference, clip, bound in COMPARISONS:
        if reference == "traffic" and shutil.which("cc") is None:
            continue
        label = f"{ours} / {REFERENCES[reference]}{', clipped' if clip else ''}"
        workers = {
            role: our_worker("benchmarks.offload_loop", size | {"variant": variant, "clip": clip})
            for role, variant in (("ours", ours), ("reference", reference))
        }
        with participants(workers, threads=max(options.threads)) as started:
            for threads in options.threads:
                blocks = interleave(
                    started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds
                )
                seconds = {
                    role: [block.seconds / block.steps for block in measured] for role, measured in blocks.items()
                }
                ratio = Ratio.of(seconds["ours"], seconds["reference"])
                result.cases.append(
                    {
                        "case": label,
                        "threads": threads,
                        "ours": nanoseconds(blocks["ours"]),
                        "reference": nanoseconds(blocks["reference"]),
                    }
                    | ratio.summary()
                )
                where = f"{threads} thread{'s' if threads > 1 else ''}"
                limit = bound if threads == max(options.threads) else None
                result.targets.append(Target(f"step time, {label}, {where}", ratio.median, limit, at_least=False))
    return result


def nanoseconds(blocks: list[Block]) -> float:
    """Returns the median time of a step per parameter."""
    times = [block.seconds / block.steps / block.notes["parameters"] for block in blocks]
    return round(statistics.median(times) * 1e9, 4)
