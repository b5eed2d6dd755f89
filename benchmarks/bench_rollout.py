"""Generation in this process: tokens per second of our engine and of transformers' generate."""

from benchmarks.cases import Case
from benchmarks.harness import compare, interleave, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.results import Result, Target

PROMPTS, NEW_TOKENS = 32, 64
SIZES = ((256, 6), (128, 4))
VOCAB_SIZE = 4096
BOUND = 2.0


def run(options: Options) -> Result:
    """Compares both on different prompts, where the bound holds, and on groups of eight completions of one prompt."""
    prompts, new_tokens = (8, 4) if options.smoke else (PROMPTS, NEW_TOKENS)
    sizes = ((32, 1),) if options.smoke else SIZES
    settings = {"prompts": prompts, "new_tokens": new_tokens, "vocab_size": VOCAB_SIZE, "dtype": "float32"}
    result = Result("rollout", options.settings() | settings)
    for hidden_size, layers in sizes:
        case = Case(hidden_size, layers, VOCAB_SIZE, seq_len=256, rows=1, micro_rows=1, documents=1)
        for samples in (1, 8):
            arguments = {"case": case.arguments(), "prompts": prompts, "samples": samples, "new_tokens": new_tokens}
            workers = {
                form: our_worker("benchmarks.rollout_loop", arguments | {"form": form})
                for form in ("ours", "transformers")
            }
            with participants(workers, threads=max(options.threads)) as started:
                for threads in options.threads:
                    blocks = interleave(
                        started, threads=threads, rounds=options.rounds, block_seconds=options.block_seconds
                    )
                    ratio = compare(blocks["ours"], blocks["transformers"])
                    result.cases.append(
                        {
                            "case": f"d{hidden_size}-l{layers}",
                            "samples": samples,
                            "threads": threads,
                            "ours": summarize(blocks["ours"]),
                            "transformers": summarize(blocks["transformers"]),
                            "ours / transformers": ratio,
                        }
                    )
                    what = f"ours / transformers, d{hidden_size}-l{layers}, {samples} per prompt, {threads} threads"
                    result.targets.append(Target(what, ratio["ratio"], BOUND if samples == 1 else None))
    return result
