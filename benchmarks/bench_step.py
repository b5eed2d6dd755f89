"""Our training step against a bare loop: what the trainer adds to it, and what the chunked loss saves."""

import math

from benchmarks.cases import Case, cases
from benchmarks.harness import Block, Participant, compare, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.results import Result, Target
from trainer.data.loader import READ_AHEAD_TOKENS

OVERHEAD_BOUND = 0.97
FULL_LOGITS_BOUND = 1.1
BLOCK_TOKENS = READ_AHEAD_TOKENS  # so that each block has its share of what our loop does only now and then
PROCESSES = 2  # of each case, so that no ratio hangs on how one process came to lie in memory
LOOP_SECONDS = 8  # per second of rounds x block_seconds: single blocks lie percents apart, as the quartiles show
LOOPS = ("ours", "bare chunked", "bare full logits")


def run(options: Options) -> Result:
    """Compares our loop with a bare loop over the same chunked loss, and with one over full logits."""
    result = Result("step", options.settings() | {"unit": "useful tokens per second"})
    for case in cases(smoke=options.smoke):
        worker = {"step": our_worker("benchmarks.step_loop", case.arguments())}
        blocks = {threads: {name: [] for name in LOOPS} for threads in options.threads}
        for _ in range(1 if options.smoke else PROCESSES):
            with participants(worker, threads=max(options.threads)) as (step,):
                for threads in options.threads:
                    for name, measured in _blocks(step, case, threads, options).items():
                        blocks[threads][name] += measured
        for threads in options.threads:
            _compare(result, case, threads, blocks[threads])
    return result


def _blocks(step: Participant, case: Case, threads: int, options: Options) -> dict[str, list[Block]]:
    """Returns one process's share of each loop's blocks; in a block the loops take steps in turn."""
    steps = 1 if options.smoke else max(1, BLOCK_TOKENS // (case.rows * case.seq_len))
    warm_up = step.block(steps, threads)
    seconds = options.rounds * options.block_seconds * LOOP_SECONDS * len(LOOPS)
    count = math.ceil(max(options.rounds, round(seconds / warm_up.seconds)) / PROCESSES)
    answers = [step.block(steps, threads).notes for _ in range(count)]
    return {
        name: [
            Block(
                seconds=answer[f"{name}: seconds"],
                cpu_seconds=answer[f"{name}: cpu_seconds"],
                steps=steps,
                tokens=int(answer[f"{name}: tokens"]),
            )
            for answer in answers
        ]
        for name in LOOPS
    }


def _compare(result: Result, case: Case, threads: int, steps: dict[str, list[Block]]) -> None:
    ours, bare, full = (steps[name] for name in LOOPS)
    found = {
        "ours / bare chunked": compare(ours, bare),
        "ours / bare full logits": compare(ours, full),
        "bare chunked / bare full logits": compare(bare, full),
    }
    result.cases.append(
        {
            "case": case.label,
            "threads": threads,
            **{name: summarize(measured) for name, measured in steps.items()},
            **found,
        }
    )
    where = f"{case.label}, {threads} thread{'s' if threads > 1 else ''}"
    result.targets += [
        Target(f"ours / bare loop, {where}", found["ours / bare chunked"]["ratio"], OVERHEAD_BOUND),
        Target(
            f"ours / bare loop with full logits, {where}", found["ours / bare full logits"]["ratio"], FULL_LOGITS_BOUND
        ),
    ]
