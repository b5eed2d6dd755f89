"""Attention over short documents in 16 bits on CPU: as torch runs it, and in float32, as `kernels.attention` chooses."""

from benchmarks.harness import Ratio, interleave, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target

SHAPES = {"8/4 heads of 32": (8, 4, 32), "9/3 heads of 64": (9, 3, 64), "16/8 heads of 128": (16, 8, 128)}
TOKENS = (32, 128, 256, 512, 1024)


def run(options: Options) -> Result:
    """Compares the time of forward and backward; the bound holds where ours chooses float32."""
    import torch

    from trainer.kernels.attention import call_dtype

    result = Result("attention", options.settings() | {"dtype": "bfloat16"})
    for label, (heads, kv_heads, head_dim) in list(SHAPES.items())[: 1 if options.smoke else None]:
        for tokens in TOKENS[: 1 if options.smoke else None]:
            arguments = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            chosen = call_dtype(torch.device("cpu"), torch.bfloat16, tokens, head_dim) == torch.float32
            with participants(
                {"attention": our_worker("benchmarks.attention_loop", arguments)}, threads=max(options.threads)
            ) as started:
                for threads in options.threads:
                    blocks = interleave(
                        started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds
                    )["attention"]
                    notes = [block.notes for block in blocks]
                    ratio = Ratio.of([note["16 bits"] for note in notes], [note["float32"] for note in notes])
                    result.cases.append(
                        {
                            "case": label,
                            "tokens": tokens,
                            "threads": threads,
                            "ours": "float32" if chosen else "16 bits",
                            "16 bits / float32": ratio.summary(),
                        }
                    )
                    where = f"{label}, {tokens} tokens, {threads} thread{'s' if threads > 1 else ''}"
                    result.targets.append(
                        Target(f"16 bits / float32, {where}", ratio.summary()["ratio"], 1.0 if chosen else None)
                    )
    return result
