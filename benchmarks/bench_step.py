"""Our training step against a bare loop: what the trainer adds to it, and what the chunked loss saves."""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import Case, cases
from benchmarks.cycles import Steps, compare_steps, standard_error
from benchmarks.harness import Participant, our_worker, participants
from benchmarks.options import Options
from benchmarks.results import Result, Target
from trainer.data.loader import READ_AHEAD_TOKENS

OVERHEAD_BOUND = 0.97
FULL_LOGITS_BOUND = 1.1
PROCESSES = 4  # of each case, so that no ratio hangs on how one process came to lie in memory
PRECISION = 0.004  # standard error of ours / bare at which a case has been measured long enough
LOOP_SECONDS = 12  # per second of rounds x block_seconds, at most: a large step needs minutes for that precision
FEWEST_CYCLES = 4
CYCLES_BETWEEN_LOOKS = 8  # fewer know too little of their own spread
LOOPS = ("ours", "bare chunked", "bare full logits")
QUANTITIES = ("seconds", "cpu_seconds", "tokens")


def run(options: Options) -> Result:
    """Compares our loop with a bare loop over the same chunked loss, and with one over full logits."""
    processes = 1 if options.smoke else PROCESSES
    settings = {"processes": processes, "precision": PRECISION, "unit": "useful tokens per second"}
    result = Result("step", options.settings() | settings)
    for case in cases(smoke=options.smoke):
        worker = {"step": our_worker("benchmarks.step_loop", case.arguments())}
        measured: dict[int, list[dict[str, Steps]]] = {threads: [] for threads in options.threads}
        for _ in range(processes):
            with participants(worker, threads=max(options.threads)) as (step,):
                for threads in options.threads:
                    measured[threads].append(_measure(step, case, threads, options))
        for threads in options.threads:
            _compare(result, case, threads, measured[threads])
    return result


def _measure(step: Participant, case: Case, threads: int, options: Options) -> dict[str, Steps]:
    """Returns one process's share of each loop's steps, which the loops take in turn.

    A block is a cycle: as many steps as our loader prepares at once. There are so many that the process knows its ratio as
    well as it must for the mean over all of them to have `PRECISION`, or as fit into its share of the time.
    """
    cycle = 1 if options.smoke else max(1, READ_AHEAD_TOKENS // (case.rows * case.seq_len))
    warm_up = step.block(cycle, threads)
    seconds = options.rounds * options.block_seconds * LOOP_SECONDS * len(LOOPS) / PROCESSES
    most = 1 if options.smoke else max(FEWEST_CYCLES, round(seconds / warm_up.seconds))
    series: list[dict[str, list[float]]] = []
    while len(series) < most:
        series.append(step.block(cycle, threads).series)
        if len(series) % CYCLES_BETWEEN_LOOKS == 0:
            ours, bare, _ = (_steps(series, name) for name in LOOPS)
            if standard_error(ours, bare) <= PRECISION * math.sqrt(PROCESSES):
                break
    return {name: _steps(series, name) for name in LOOPS}


def _steps(series: Sequence[dict[str, list[float]]], name: str) -> Steps:
    return Steps(**{quantity: np.array([one[f"{name}: {quantity}"] for one in series]) for quantity in QUANTITIES})


def _compare(result: Result, case: Case, threads: int, measured: Sequence[dict[str, Steps]]) -> None:
    ours, bare, full = ([process[name] for process in measured] for name in LOOPS)
    found = {
        "ours / bare chunked": compare_steps(ours, bare),
        "ours / bare full logits": compare_steps(ours, full),
        "bare chunked / bare full logits": compare_steps(bare, full),
    }
    result.cases.append(
        {
            "case": case.label,
            "threads": threads,
            **{name: _summary(steps) for name, steps in zip(LOOPS, (ours, bare, full), strict=True)},
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


def _summary(processes: Sequence[Steps]) -> dict[str, float]:
    """Returns a loop's means over the processes."""
    return {
        "tokens_per_second": round(float(np.mean([steps.rate for steps in processes])), 1),
        "step_seconds": round(float(np.mean([steps.step_seconds for steps in processes])), 6),
        "steps": sum(steps.seconds.size for steps in processes),
    }
