"""Runs of the debug config that get a real signal, or a file, at a chosen micro-step."""

import os
import signal
from collections import Counter
from pathlib import Path

from support.pool import run_on_ranks
from support.runs import DEBUG, REPO

SHORT = ["--max-steps", "4", "--val.interval", "2", "--ckpt.interval", "3", "--data.val-documents", "60"]
"""Four steps of four micro-steps; validation, in several batches, before the first and after the second and fourth."""

Plan = list[tuple[str, int, str]]
"""("train" or "val", the how-manieth forward of the process, what happens in it): a signal's name, SAVE or STOP."""


def stopped(run_dir: Path, *flags: str, plan: Plan = [], world_size: int = 1, on_rank: int = 0) -> int:  # noqa: B006
    """Runs `trainer sft` on the debug config while `plan` happens to one rank; returns the exit code, equal on all."""
    argv = [*DEBUG, *SHORT, "--output-dir", str(run_dir), *map(str, flags)]
    if world_size == 1:
        return _run(argv, plan, 0)
    codes = run_on_ranks(_run, world_size, argv, plan, on_rank)
    assert len(set(codes)) == 1, codes
    return codes[0]


def _run(argv: list[str], plan: Plan, on_rank: int) -> int:
    import torch

    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.supply import supply
    from trainer.train import setup
    from trainer.train.cross_entropy import cross_entropy
    from trainer.train.loop import fit

    os.chdir(REPO)
    counts: Counter[str] = Counter()
    loaded = load_config(SFTConfig, argv)

    def loss(model, micro_batch):
        kind = "train" if torch.is_grad_enabled() else "val"
        counts[kind] += 1
        for where, number, what in plan:
            if (where, number) == (kind, counts[kind]) and int(os.environ.get("RANK", "0")) == on_rank:
                do(what, Path(loaded.config.output_dir))
        return cross_entropy(model, micro_batch)

    with setup.start(loaded, supply(loss)) as run:
        fit(run)
        return setup.finish(run)


def do(what: str, run_dir: Path) -> None:
    """Sends this process a signal, or touches SAVE or STOP in its run directory."""
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    else:
        (run_dir / what).touch()
