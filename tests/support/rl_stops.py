"""Runs of the debug config of reinforcement learning that get a real signal, or a file, at a chosen moment of a step."""

import os
from collections import Counter
from pathlib import Path

from support.pool import run_on_ranks
from support.runs import DEBUG_RL, REPO
from support.stops import do

SHORT = [
    *(
        "--max-steps",
        "5",
        "--val.interval",
        "2",
        "--val.prompts",
        "4",
        "--ckpt.interval",
        "4",
        "--ckpt.no-export-weights",
    ),
    *("--data.micro-batch-size", "1", "--envs.0.name", "reverse-text"),  # built in: scored without a process of its own
]
"""Five steps of at least three micro-steps on one rank; rewards on held-out prompts before the first step and after the
second, fourth and last."""

Plan = list[tuple[str, int, int, str]]
"""(where, step, how-manieth time in it, what happens): "train" is a micro-step of that step, "rollout" a call for rollouts
while it is the next one, "eval" one for held-out rollouts after it. What: a signal's name, SAVE or STOP."""


def rl_stopped(
    run_dir: Path,
    *flags: str,
    plan: Plan = [],  # noqa: B006
    world_size: int = 1,
    on_rank: int = 0,
    eval_chunk: int | None = None,
) -> int:
    """Runs `trainer rl` on the debug config while `plan` happens to one rank; returns the exit code, equal on all.

    eval_chunk: held-out completions between two looks at whether to stop.
    """
    argv = [*DEBUG_RL, *SHORT, "--output-dir", str(run_dir), *map(str, flags)]
    if world_size == 1:
        return _run(argv, plan, 0, eval_chunk)
    codes = run_on_ranks(_run, world_size, argv, plan, on_rank, eval_chunk)
    assert len(set(codes)) == 1, codes
    return codes[0]


def _run(argv: list[str], plan: Plan, on_rank: int, eval_chunk: int | None) -> int:
    from trainer.config.load import load_config
    from trainer.config.run import RLConfig
    from trainer.rl import supply
    from trainer.train import setup
    from trainer.train.loop import fit

    os.chdir(REPO)
    loaded = load_config(RLConfig, argv)
    counts: Counter[tuple[str, int]] = Counter()
    happened: list[str] = []
    is_here = int(os.environ.get("RANK", "0")) == on_rank

    class Watched(supply.RLSupply):
        def attach(self, run):
            self.progress = run.progress
            loss = self.loss_function

            def watched_loss(model, micro_batch):
                self._passes("train", self.progress.step + 1)
                return loss(model, micro_batch)

            self.loss_function = watched_loss
            super().attach(run)

        def _rollouts(self, prompts, samples, sampling, purpose):
            self._passes(purpose, self.progress.step + (purpose == "rollout"))
            return super()._rollouts(prompts, samples, sampling, purpose)

        def _passes(self, where, step):
            counts[where, step] += 1
            for *when, what in plan:
                if tuple(when) == (where, step, counts[where, step]) and is_here:
                    do(what, Path(loaded.config.output_dir))
                    happened.append(what)

    chunk = supply.EVAL_CHUNK
    supply.EVAL_CHUNK = eval_chunk or chunk
    try:
        with setup.start(loaded, Watched) as run:
            fit(run)
            code = setup.finish(run)
    finally:
        supply.EVAL_CHUNK = chunk
    assert len(happened) == len(plan) * is_here, "the run did not come to every moment of the plan"
    return code
