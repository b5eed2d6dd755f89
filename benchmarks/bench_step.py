"""Our training step against a bare loop: what the trainer adds to it, and what the chunked loss saves."""

from benchmarks.cases import LARGE, cases
from benchmarks.harness import compare_fastest, interleave, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.results import Result, Target

OVERHEAD_BOUND = 0.97
FULL_LOGITS_BOUND = 1.1
SHORT_BLOCKS, LEAD_IN_STEPS = 8, 3


def run(options: Options) -> Result:
    """Compares our loop with a bare loop over the same chunked loss, and with one over full logits."""
    settings = {"unit": "useful tokens per second", "lead_in_steps": LEAD_IN_STEPS}
    result = Result("step", options.settings() | settings)
    for case in cases(smoke=options.smoke):
        workers = {
            "ours": our_worker("benchmarks.our_loop", case.arguments()),
            "bare chunked": our_worker("benchmarks.bare_loop", case.arguments() | {"loss": "chunked"}),
            "bare full logits": our_worker("benchmarks.bare_loop", case.arguments() | {"loss": "full"}),
        }
        with participants(workers, threads=max(options.threads)) as started:
            for threads in options.threads:
                # Many short blocks of a short step: what disturbs the machine lasts longer than they do.
                is_short = case.hidden_size < LARGE.hidden_size and not options.smoke
                split = SHORT_BLOCKS if is_short else 1
                blocks = interleave(
                    started,
                    threads=threads,
                    rounds=options.rounds * split,
                    block_seconds=options.block_seconds * 2 / split,
                    equal_steps=True,
                    lead_in_steps=LEAD_IN_STEPS if is_short else 0,
                )
                bare, full = (
                    compare_fastest(blocks["ours"], blocks[name]) for name in ("bare chunked", "bare full logits")
                )
                loss_alone = compare_fastest(blocks["bare chunked"], blocks["bare full logits"])
                where = f"{case.label}, {threads} thread{'s' if threads > 1 else ''}"
                result.cases.append(
                    {
                        "case": case.label,
                        "threads": threads,
                        **{name: summarize(measured) for name, measured in blocks.items()},
                        "ours / bare chunked": bare,
                        "ours / bare full logits": full,
                        "bare chunked / bare full logits": loss_alone,
                    }
                )
                result.targets += [
                    Target(f"ours / bare loop, {where}", bare["ratio"], OVERHEAD_BOUND),
                    Target(f"ours / bare loop with full logits, {where}", full["ratio"], FULL_LOGITS_BOUND),
                ]
    return result
