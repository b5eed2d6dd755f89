"""The output head's loss at a large vocabulary: time and peak memory of ours, of full logits, and of torch's own."""

from statistics import median

from benchmarks.harness import compare, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target

TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 1024, 512, 131_072
FORMS = ("full logits", "ours", "torch", "torch, chunked")
MEMORY_BOUND, TIME_BOUND = 0.4, 0.9
MOST_ROUNDS = 5  # a step takes seconds


def run(options: Options) -> Result:
    """Compares the forms in float32, where the bounds hold, and in bfloat16."""
    tokens, vocab_size = (64, 2048) if options.smoke else (TOKENS, VOCAB_SIZE)
    rounds = min(MOST_ROUNDS, options.rounds)
    result = Result(
        "loss",
        {"rounds": rounds, "tokens": tokens, "hidden_size": HIDDEN_SIZE, "vocab_size": vocab_size},
    )
    for dtype in ("float32",) if options.smoke else ("float32", "bfloat16"):
        arguments = {"dtype": dtype, "tokens": tokens, "hidden_size": HIDDEN_SIZE, "vocab_size": vocab_size}
        workers = {form: our_worker("benchmarks.loss_loop", arguments | {"form": form}) for form in FORMS}
        with participants(workers, threads=max(options.threads)) as started:
            for threads in options.threads:
                blocks = interleave(started, threads=threads, rounds=rounds, block_seconds=options.block_seconds)
                extra = {form: blocks[form][-1].notes["extra_bytes"] for form in FORMS}
                for form in FORMS:
                    # Rates turned around are times: full's rate / the form's = the form's time / full's.
                    time = compare(blocks["full logits"], blocks[form])
                    result.cases.append(
                        {
                            "case": form,
                            "dtype": dtype,
                            "threads": threads,
                            "seconds": round(median(block.seconds / block.steps for block in blocks[form]), 4),
                            "loss": blocks[form][-1].notes["loss"],
                            "extra_bytes": int(extra[form]),
                            "time / full": time,
                            "memory / full": round(extra[form] / max(extra["full logits"], 1), 4),
                        }
                    )
                    result.targets += _targets(result.cases[-1])
    return result


def _targets(case: dict) -> list[Target]:
    if case["case"] == "full logits":
        return []
    bound = case["case"] == "ours" and case["dtype"] == "float32"
    threads = f"{case['threads']} thread{'s' if case['threads'] > 1 else ''}"
    what = f"{case['case']} / full logits, {case['dtype']}, {threads}"
    return [
        Target(f"memory, {what}", case["memory / full"], MEMORY_BOUND if bound else None, at_least=False),
        Target(f"time, {what}", case["time / full"]["ratio"], TIME_BOUND if bound else None, at_least=False),
    ]
