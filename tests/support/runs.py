"""Whole runs of the debug config, in this process, on pooled ranks or as real commands, and what they left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.pool import run_on_ranks

REPO = Path(__file__).parents[2]
DEBUG = ["@", str(REPO / "configs/debug/sft.toml")]
DEBUG_RL = ["@", str(REPO / "configs/debug/rl.toml")]
TIMING = (
    "tokens_per_second",
    "step_seconds",
    "peak_memory_gib",
    "rollout_seconds",
    "rollout_wait_seconds",
    "rollout_tokens_per_second",
    "eval_seconds",
)


def sft(run_dir: Path, *flags: str, world_size: int = 1) -> None:
    """Runs `trainer sft` on the debug config, within this process or on `world_size` gloo ranks."""
    argv = [*DEBUG, "--output-dir", str(run_dir), *map(str, flags)]
    if world_size == 1:
        _sft(argv)
    else:
        run_on_ranks(_sft, world_size, argv)


def _sft(argv: list[str]) -> None:
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.train import run

    os.chdir(REPO)  # the debug config's paths are relative to the repository
    run(load_config(SFTConfig, argv))


@contextmanager
def opened(run_dir: Path, *flags: str, loss: Any = None) -> Iterator[Any]:
    """A fine-tuning run of the debug config before its first step, or right after the load. `loss`: in place of its own."""
    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig
    from trainer.sft.supply import supply
    from trainer.train import setup
    from trainer.train.cross_entropy import cross_entropy

    os.chdir(REPO)
    argv = [*DEBUG, "--output-dir", str(run_dir), *map(str, flags)]
    with setup.start(load_config(SFTConfig, argv), supply(loss or cross_entropy)) as run:
        yield run


def rl(run_dir: Path, *flags: str, world_size: int = 1) -> None:
    """Runs `trainer rl` on the debug config, within this process or on `world_size` gloo ranks."""
    argv = [*DEBUG_RL, "--output-dir", str(run_dir), *map(str, flags)]
    if world_size == 1:
        _rl(argv)
    else:
        run_on_ranks(_rl, world_size, argv)


def _rl(argv: list[str]) -> None:
    from trainer.config.load import load_config
    from trainer.config.run import RLConfig
    from trainer.rl.train import run

    os.chdir(REPO)
    run(load_config(RLConfig, argv))


def command(*argv: str, nproc: int = 1, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `trainer <argv>` as a user would, in new processes."""
    done = subprocess.run(
        _command_line(argv, nproc), cwd=REPO, env=_environment(env), capture_output=True, text=True, timeout=300
    )
    if check and done.returncode != 0:
        raise AssertionError(f"trainer {' '.join(argv)} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def start(*argv: str, nproc: int = 1, **env: str) -> subprocess.Popen[bytes]:
    """Starts `trainer <argv>` in a process group of its own, to be killed."""
    return subprocess.Popen(
        _command_line(argv, nproc),
        cwd=REPO,
        env=_environment(env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str], timeout: float = 180.0) -> str:
    """Returns what a process with a session of its own printed, when it has ended."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _command_line(argv: tuple[str, ...], nproc: int) -> list[str]:
    if nproc == 1:
        return [sys.executable, "-m", "trainer", *map(str, argv)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*torchrun, "-m", "trainer", *map(str, argv)]


def _environment(extra: dict[str, str]) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return env | {"OMP_NUM_THREADS": "1"} | extra


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, timeout: float = 180.0) -> None:
    """Returns once metrics.jsonl has the row of `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and any(row["step"] >= step for row in read(run_dir / "metrics.jsonl")):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended (exit {process.returncode}) before step {step}")
        time.sleep(0.01)
    raise AssertionError(f"no step {step} within {timeout} s")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what is measured by a clock."""
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read(run_dir / "metrics.jsonl")]


def samples(run_dir: Path) -> dict[int, list[list[str]]]:
    """Step -> sample ids of each row of its global batch, as the ranks reported them."""
    return {row["step"]: row["ids"] for row in read(run_dir / "samples.jsonl")}


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def differences(a: Path, b: Path) -> str:
    """Returns "" if two checkpoints are identical, else what `trainer ckpt diff` prints."""
    import contextlib
    import io

    from trainer.cli.ckpt import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["diff", str(a), str(b)])
    assert code in (0, 1), out.getvalue()
    return "" if code == 0 else out.getvalue()
