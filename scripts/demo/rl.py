"""``make demo-rl``: sloppy examples, then rewards; killed, resumed, and held against a run that was never stopped.

    python -m scripts.demo.rl            a small decoder learns to reverse texts, under eight minutes on two cores
    python -m scripts.demo.rl --short    a few steps of everything, about a minute

Everything is done the way a user would do it: through the ``trainer`` command and the files it writes.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from scripts.demo.runs import (
    TRAINER,
    DemoFailed,
    checkpoint,
    compare_checkpoints,
    compare_metrics,
    newest_checkpoint,
    read_metrics,
    train,
    train_and_kill,
)
from scripts.demo.stage import Stage, perform

ROOT = Path(__file__).parents[2]
SAMPLED, GREEDY = 0.75, 0.9
"""What the reward must reach: mean of the last steps' samples, and greedy on held-out prompts."""


@dataclass(frozen=True)
class Plan:
    folder: Path
    sft: tuple[str, ...]
    rl: tuple[str, ...]
    steps: int
    kill_after_step: int


FULL = Plan(Path("runs/demo-rl"), (), (), 140, 67)
SHORT = Plan(
    Path("runs/demo-rl-short"),
    ("--max-steps", "20", "--val.interval", "0", "--ckpt.interval", "0"),
    ("--max-steps", "12", "--ckpt.interval", "3", "--val.interval", "6", "--val.prompts", "16", "--rl.samples", "4"),
    12,
    7,
)


class Demo(Stage):
    """The parts in order, each telling what it does before it does it."""

    parts = 5

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.sft, self.a, self.b = (plan.folder / name for name in ("sft", "A", "B"))

    def run(self) -> None:
        shutil.rmtree(self.plan.folder, ignore_errors=True)
        self.heading(1, "Examples: a small decoder sees 4,000 texts reversed, one letter in eight of them wrong")
        arguments = ["@", "configs/rl/reverse_sft.toml", "--output-dir", str(self.sft), *self.plan.sft]
        self.train("sft", arguments)

        self.heading(2, f"Rewards, run A: {self.plan.steps} steps that nobody disturbs")
        self.train("rl", self.arguments(self.a))

        self.heading(3, f"Rewards, run B: the same, but it gets a kill -9 after step {self.plan.kill_after_step}")
        self.command(f"rl {' '.join(self.arguments(self.b))}")
        last = train_and_kill(self.arguments(self.b), self.b, after_step=self.plan.kill_after_step, kind="rl")
        saved = newest_checkpoint(self.b)
        self.say(
            f"[bold red]Killed[/] in the middle of step {last + 1}. The newest checkpoint is that of step {saved}."
        )
        if not saved < last < self.plan.steps:
            raise DemoFailed(f"the kill came at a bad moment (checkpoint {saved}, step {last}): run the demo again")
        self.train("rl", [*self.arguments(self.b), "--resume"])

        self.compare()
        self.show_what_it_learned()

    def compare(self) -> None:
        self.heading(4, "Is the resumed run the one that never stopped?")
        a, b = (checkpoint(run, self.plan.steps) for run in (self.a, self.b))
        self.command(f"ckpt diff {a} {b}")
        self.console.print(Text(compare_checkpoints(a, b), style="bold green"), soft_wrap=True)
        numbers = compare_metrics(read_metrics(self.a / "metrics.jsonl"), read_metrics(self.b / "metrics.jsonl"))
        self.say(f"metrics.jsonl: all {numbers} rewards, losses, entropies and counters are the same, too.")

    def show_what_it_learned(self) -> None:
        self.heading(5, "What it learned")
        subprocess.run(
            [*TRAINER, "rollouts", "show", str(self.b), "--step", str(self.plan.steps), "-n", "6"], check=True
        )
        from trainer.train.plots import plot_runs

        picture = plot_runs(
            [self.a, self.b],
            self.plan.folder / "reward.png",
            keys=("reward", "entropy", "loss"),
            superseded=True,
            labels=["A, never stopped", "B, killed"],
            title="Learning to reverse texts: the resumed run lies on the uninterrupted one",
        )
        rows = [row for row in read_metrics(self.b / "metrics.jsonl") if row["step"]]
        greedy = [row["eval_reward"] for row in read_metrics(self.b / "metrics.jsonl") if "eval_reward" in row]
        tail = max(1, len(rows) // 14)
        first, last = (sum(row["reward"] for row in part) / tail for part in (rows[:tail], rows[-tail:]))
        self.console.print(
            Panel(
                f"[bold green]identical[/]  killed in step {self.plan.kill_after_step + 1}, resumed, and bit for bit the "
                f"run that never stopped\n\nreward   {first:.2f} -> {last:.2f} sampled, {greedy[0]:.2f} -> {greedy[-1]:.2f} "
                f"greedy on held-out prompts\npicture  {picture}\ntook     {self.elapsed()}\n\n"
                "Your own environment next: docs/rl.md",
                title="done",
            )
        )
        if self.plan is FULL and not (last >= SAMPLED and greedy[-1] >= GREEDY):
            raise DemoFailed(f"the reward should reach {SAMPLED} sampled and {GREEDY} greedy")

    # --- helpers ----------------------------------------------------------------------------------------------------

    def arguments(self, run_dir: Path) -> list[str]:
        model = str(self.sft / "weights")
        return ["@", "configs/rl/reverse.toml", "--output-dir", str(run_dir), "--model.name", model, *self.plan.rl]

    def train(self, kind: str, arguments: list[str]) -> None:
        self.command(f"{kind} {' '.join(arguments)}")
        train(arguments, kind)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo.rl", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps of everything (for CI)")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # too little work for several threads to share
    return perform(lambda: Demo(SHORT if arguments.short else FULL))


if __name__ == "__main__":
    sys.exit(main())
