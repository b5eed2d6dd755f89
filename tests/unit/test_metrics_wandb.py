"""W&B offline: one id and one row per step over kills and resumes, read back with W&B's own reader of its logs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.train.sinks.wandb_history import offline_logs, records

CHILD = """
import os, signal, sys
from trainer.config.run import RunConfig
from trainer.core.log import setup_logging
from trainer.train.metrics import MetricsLog

run_dir, start, end, process, ending = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
setup_logging("info")
config = RunConfig.model_validate({"wandb": {"mode": os.environ.get("MODE", "offline")}, "log": {"interval": 1000}})
try:
    with MetricsLog(run_dir, config, is_main=True, start_step=start, max_steps=220, run_id="m1id") as log:
        for step in range(start + 1, end + 1):
            log.log({"step": step, "loss": 1 / step, "process": process})
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "raised":
            raise RuntimeError("boom")
except RuntimeError:
    sys.exit(7)
"""


def train(run_dir: Path, start: int, end: int, process: int, ending: str = "clean", **environment: str) -> str:
    """Trains in a process of its own; returns what it wrote to standard error."""
    command = [sys.executable, "-c", CHILD, str(run_dir), str(start), str(end), str(process), ending]
    # W&B's own thread of machine statistics has nothing to do with what is tested.
    env = _environment() | {"WANDB_X_DISABLE_STATS": "true"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == {"clean": 0, "killed": -9, "raised": 7}[ending], done.stderr
    return done.stderr


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") or key == "WANDB_SILENT"}


Sent = tuple[int, int, float]
"""Step, process and loss of a row of history."""


def read_with_wandb(run_dir: Path) -> tuple[list[Sent], set[str]]:
    """All rows of all logs in the order `wandb sync` uploads them, and the run ids; by W&B's own program."""
    rows, ids = [], set()
    for path in offline_logs(run_dir / "wandb", "m1id"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=True)
        for record in map(json.loads, done.stdout.splitlines()):
            if record["type"] == "run":
                ids.add(record["run"]["run_id"])
            if record["type"] == "history":
                rows.append(_sent(record["history"]["item"]))
    return rows, ids


def read_back(run_dir: Path) -> tuple[list[Sent], set[str]]:
    """The same by our reader, which the first test holds against W&B's; it needs no further processes."""
    rows, ids = [], set()
    for path in offline_logs(run_dir / "wandb", "m1id"):
        for _, record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append(_sent(items))
    return rows, ids


def _sent(items: dict[str, Any]) -> Sent:
    assert items["_step"] == items["step"]  # W&B's own counter is ours
    return items["step"], items["process"], items["loss"]


@pytest.mark.parametrize("ending", ["killed", "raised"])
def test_m1_a_crash_past_the_checkpoint_leaves_one_row_per_step(tmp_path: Path, ending: str) -> None:
    """Saved at 200, crashed at 212, resumed to 220.

    Killed: W&B had most rows in memory and lost them. Raised: its log is whole and goes on past the checkpoint.
    """
    train(tmp_path, 0, 212, 0, ending)
    train(tmp_path, 200, 220, 1)
    rows, ids = read_with_wandb(tmp_path)
    assert ids == {"m1id"}
    assert rows == [(step, int(step > 200), 1 / step) for step in range(1, 221)]
    assert read_back(tmp_path) == (rows, ids)


def test_two_resumes_the_second_from_an_older_step_then_a_start_over(tmp_path: Path) -> None:
    train(tmp_path, 0, 10, 0)
    train(tmp_path, 10, 20, 1, "raised")
    train(tmp_path, 8, 25, 2)
    rows, ids = read_back(tmp_path)
    assert ids == {"m1id"}
    assert [row[:2] for row in rows] == [(step, 0 if step <= 8 else 2) for step in range(1, 26)]
    train(tmp_path, 0, 3, 3)
    assert [row[:2] for row in read_back(tmp_path)[0]] == [(1, 3), (2, 3), (3, 3)]


def test_a_log_that_was_uploaded_is_left_alone_and_its_steps_are_not_sent_again(tmp_path: Path) -> None:
    train(tmp_path, 0, 12, 0, "raised")
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    log.with_suffix(".wandb.synced").touch()
    before = log.read_bytes()
    said = train(tmp_path, 10, 20, 1)
    assert "W&B has steps up to 12 already" in said
    assert log.read_bytes() == before
    rows, _ = read_back(tmp_path)
    assert [row[:2] for row in rows] == [(step, int(step > 12)) for step in range(1, 21)]


def test_wandb_switched_on_at_a_resume_gets_the_earlier_rows(tmp_path: Path) -> None:
    train(tmp_path, 0, 12, 0, "killed", MODE="off")
    assert not (tmp_path / "wandb").exists()
    train(tmp_path, 10, 15, 1)
    rows, _ = read_back(tmp_path)
    assert [row[:2] for row in rows] == [(step, int(step > 10)) for step in range(1, 16)]


def test_a_log_of_an_unknown_format_costs_a_warning_only(tmp_path: Path) -> None:
    train(tmp_path, 0, 5, 0)
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    log.write_bytes(b":W&B\xe1\xbe\x07" + log.read_bytes()[7:])
    said = train(tmp_path, 5, 8, 1)
    assert "cannot read the earlier offline W&B logs" in said
    log.unlink()
    rows, _ = read_back(tmp_path)
    assert [row[0] for row in rows] == [6, 7, 8]


def test_wandb_that_cannot_start_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    """Online without an account."""
    nowhere = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "5"}
    said = train(tmp_path / "run", 0, 5, 0, MODE="online", **nowhere)
    assert said.count("W&B is off for the rest of this process") == 1
    assert "wandb login" in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_wandb_is_not_imported_when_it_is_off(tmp_path: Path) -> None:
    child = CHILD + "\nassert 'wandb' not in sys.modules and 'torch' not in sys.modules, 'imported'\n"
    command = [sys.executable, "-c", child, str(tmp_path), "0", "2", "0", "clean"]
    subprocess.run(command, env=_environment() | {"MODE": "off"}, check=True)
