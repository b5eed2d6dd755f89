"""Starting, killing and comparing training runs, from outside: through the command line and the run directory."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAINER = [sys.executable, "-m", "trainer"]

POLL_SECONDS = 0.005
COMPARED = ("loss", "lr", "grad_norm", "tokens", "samples", "epoch", "val_loss", "reward", "entropy", "eval_reward")
"""Entries of a metrics row that a resume must reproduce; the others measure time and memory."""


class DemoFailed(Exception):
    """Something did not come out as it must; the message says what."""


def train(arguments: Sequence[str], kind: str = "sft") -> None:
    """Runs ``trainer sft|rl`` to its end, its output shown. Raises DemoFailed if it fails."""
    code = subprocess.run([*TRAINER, kind, *arguments]).returncode
    if code:
        raise DemoFailed(f"trainer {kind} ended with exit code {code}")


def train_and_kill(arguments: Sequence[str], run_dir: Path, *, after_step: int, kind: str = "sft") -> int:
    """Runs ``trainer sft|rl`` and ends it with SIGKILL in the middle of the step that follows ``after_step``.

    Returns the last step that it had logged. Raises DemoFailed if it ends by itself before.
    """
    process = subprocess.Popen([*TRAINER, kind, *arguments])
    metrics = run_dir / "metrics.jsonl"
    try:
        while not (rows := read_metrics(metrics)) or rows[-1]["step"] < after_step:
            if process.poll() is not None:
                raise DemoFailed(f"trainer {kind} ended with exit code {process.returncode} before step {after_step}")
            time.sleep(POLL_SECONDS)
        time.sleep(rows[-1].get("step_seconds", 0.0) / 2)
    finally:
        # No handler, no clean-up, no last checkpoint: a process cannot see this signal coming.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\n")  # the cursor, which the killed progress bar had hidden
    if process.returncode != -signal.SIGKILL:
        raise DemoFailed(f"trainer {kind} was not killed in time: it ended with exit code {process.returncode}")
    return read_metrics(metrics)[-1]["step"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, which may be growing; [] if there is none yet."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def newest_checkpoint(run_dir: Path) -> int:
    """The step of the newest checkpoint that ``trainer ckpt ls`` calls committed. Raises DemoFailed if there is none."""
    listed = subprocess.run([*TRAINER, "ckpt", "ls", str(run_dir), "--json"], capture_output=True, text=True)
    if listed.returncode:
        raise DemoFailed(f"trainer ckpt ls failed: {listed.stderr.strip()}")
    steps = [row["step"] for row in json.loads(listed.stdout) if row["status"] == "committed"]
    if not steps:
        raise DemoFailed(f"{run_dir} has no checkpoint: there is nothing to resume from")
    return max(steps)


def compare_checkpoints(a: Path, b: Path) -> str:
    """What ``trainer ckpt diff`` says of two identical checkpoints. Raises DemoFailed with its words if they differ."""
    result = subprocess.run([*TRAINER, "ckpt", "diff", str(a), str(b)], capture_output=True, text=True)
    output = (result.stdout + result.stderr).strip()
    if result.returncode or not re.search(r"^identical\b", result.stdout, flags=re.MULTILINE):
        raise DemoFailed(f"the two runs ended differently:\n{output}")
    return output


def compare_metrics(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> int:
    """How many numbers the rows of both runs have in common. Raises DemoFailed naming the first that differs."""
    if [row["step"] for row in a] != [row["step"] for row in b]:
        raise DemoFailed(f"other steps were logged: {[row['step'] for row in a]} and {[row['step'] for row in b]}")
    numbers = 0
    for one, other in zip(a, b, strict=True):
        for key in COMPARED:
            if one.get(key) != other.get(key):
                raise DemoFailed(f"step {one['step']}: {key} is {one.get(key)} and {other.get(key)}")
            numbers += key in one
    if not all(math.isfinite(row["loss"]) for row in a if "loss" in row):
        raise DemoFailed("a loss is not finite")
    return numbers
