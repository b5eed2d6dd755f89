"""A whole `trainer rl` whose rollouts come from a vLLM server that it launches: killed, resumed, stopped, and no server left."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from support import runs
from support.runs import metrics, read
from trainer.rl.vllm.server import DEFAULT_PYTHON

PYTHON = Path(os.environ.get("VLLM_PYTHON", runs.REPO / DEFAULT_PYTHON))
STEPS = 6
GROUPS, SAMPLES = 4, 4  # of the debug config
START_SECONDS = 420.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make vllm"),
]


def flags(run_dir: Path, port: int, *more: str) -> list[str]:
    engine = ["--engine.type", "vllm", "--engine.launch", "--engine.python", str(PYTHON), "--engine.port", str(port)]
    run = ["--max-steps", str(STEPS), "--val.interval", "0", "--ckpt.interval", "1", "--output-dir", str(run_dir)]
    return [*runs.DEBUG_RL, *run, *engine, *more]


def servers(run_dir: Path) -> set[int]:
    """Every process of the servers that a run has started: their output goes to the run's log."""
    log, found = run_dir / "logs" / "vllm.log", set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "fd" / "1").resolve() == log:
                found.add(int(entry.name))
        except OSError:  # it has just ended
            continue
    return found


def assert_ends(run_dir: Path, processes: set[int]) -> None:
    deadline = time.monotonic() + 60
    while left := processes & servers(run_dir):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.2)


def ended_by(number: signal.Signals, run_dir: Path, command: list[str], after: int) -> tuple[int, set[int]]:
    """Runs until the row of step `after`, then sends the signal; returns the exit code and the server's processes."""
    process = runs.start("rl", *command)
    try:
        runs.wait_for_step(run_dir, after, process, timeout=START_SECONDS)
        found = servers(run_dir)
        assert found
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
        return process.wait(120), found
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def finish(command: list[str]) -> None:
    process = runs.start("rl", *command)
    try:
        assert process.wait(START_SECONDS) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def check_rollouts(run_dir: Path, max_lag: int) -> None:
    """Every prompt of the sequence was trained on once, with all its samples, by weights that were new enough."""
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, STEPS + 1))
    rows = [row for step in range(1, STEPS + 1) for row in read(run_dir / "rollouts" / f"step_{step:08d}.jsonl")]
    assert Counter(row["number"] for row in rows) == dict.fromkeys(range(STEPS * GROUPS), SAMPLES)
    for row in rows:
        oldest, newest = row["versions"]
        assert row["step"] - 1 - max_lag <= oldest <= newest <= row["step"] - 1


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "rank_0.log").read_text()


def test_killed_and_resumed_at_once(tmp_path):
    """Lag 0. The new server serves the resumed weights before anything is asked of it: the trainer's own probabilities."""
    run_dir = tmp_path / "run"
    command = flags(run_dir, 8121)
    code, first = ended_by(signal.SIGKILL, run_dir, command, after=3)
    assert code == -signal.SIGKILL
    finish([*command, "--resume"])  # at once: the first server may be on its way out
    assert_ends(run_dir, first)
    assert servers(run_dir) == set()
    check_rollouts(run_dir, max_lag=0)
    assert all(row["mismatch_max"] < 1e-3 and row["ratio_deviation_max"] < 1e-3 for row in metrics(run_dir))
    resumed_at = [event["step"] for event in read(run_dir / "events.jsonl") if event["event"] == "start"][-1]
    proven = [line for line in log_of(run_dir).splitlines() if "log-probabilities within" in line]
    assert f"serves step {resumed_at}:" in proven[-2] and f"serves step {resumed_at + 1}:" in proven[-1]
    assert not list((run_dir / "weights-served").glob("version_*"))


def test_killed_stopped_and_resumed_while_generating_ahead(tmp_path):
    run_dir = tmp_path / "run"
    command = flags(run_dir, 8122, "--rl.max-lag", "1")
    code, first = ended_by(signal.SIGKILL, run_dir, command, after=2)
    assert code == -signal.SIGKILL
    assert_ends(run_dir, first)
    code, second = ended_by(signal.SIGTERM, run_dir, [*command, "--resume"], after=4)
    assert code == 143
    assert second and servers(run_dir) == set()  # it stops its server before it ends
    finish([*command, "--resume"])
    assert servers(run_dir) == set()
    check_rollouts(run_dir, max_lag=1)
    assert all(row["staleness_max"] <= 1 for row in metrics(run_dir))
