"""Our training step against a bare loop: what the trainer adds to it, and what the chunked loss saves."""

from benchmarks.cases import Case, cases
from benchmarks.harness import WARM_UP_STEPS, Block, Participant, compare, our_worker, participants, summarize
from benchmarks.options import Options
from benchmarks.results import Result, Target

OVERHEAD_BOUND = 0.97
FULL_LOGITS_BOUND = 1.1
LOOPS = ("ours", "bare chunked", "bare full logits")


def run(options: Options) -> Result:
    """Compares our loop with a bare loop over the same chunked loss, and with one over full logits."""
    result = Result("step", options.settings() | {"unit": "useful tokens per second"})
    for case in cases(smoke=options.smoke):
        worker = {"step": our_worker("benchmarks.step_loop", case.arguments())}
        with participants(worker, threads=max(options.threads)) as (step,):
            for threads in options.threads:
                _compare(result, case, threads, _rounds(step, threads, options))
    return result


def _rounds(step: Participant, threads: int, options: Options) -> dict[str, list[Block]]:
    """Returns each loop's steps, of as many rounds as fit the time of the options' blocks."""
    warm_up = step.block(1 if options.smoke else WARM_UP_STEPS, threads)
    seconds = options.rounds * options.block_seconds * 2 * len(LOOPS)
    count = max(options.rounds, round(seconds / (warm_up.seconds / warm_up.steps)))
    answers = [step.block(1, threads).notes for _ in range(count)]
    return {
        name: [
            Block(
                seconds=answer[f"{name}: seconds"],
                cpu_seconds=answer[f"{name}: cpu_seconds"],
                steps=1,
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
