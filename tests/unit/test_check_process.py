"""`trainer check resume`: when the signal is sent, and what the runs are told."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

from support.runs import DEBUG
from trainer.cli.check import Options
from trainer.cli.check_process import TrainingProcess
from trainer.cli.check_resume import ResumeCheck, make_plan
from trainer.config.load import load_config
from trainer.config.run import SFTConfig


def test_a_checkpoint_that_retention_has_removed_was_there(tmp_path):
    """With keep_last = 1 and a save at every step, the next one is committed before anybody has looked again."""
    run = TrainingProcess.__new__(TrainingProcess)
    run.run_dir, run.log = tmp_path, tmp_path / "log"
    step = tmp_path / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")

    def two_saves_later(last_step: int) -> None:
        shutil.rmtree(step, ignore_errors=True)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2}) + "\n")

    with subprocess.Popen(["sleep", "5"]) as run.process:
        assert run.interrupt(signal.SIGKILL, 2, 1, two_saves_later) == 2
        assert run.process.returncode == -signal.SIGKILL


class Quiet:
    def __getattr__(self, name: str):
        raise AssertionError(f"nothing runs here, and {name} is asked for")


def test_the_run_that_never_stops_writes_no_checkpoint_before_its_last(tmp_path):
    """Else a save that changes something would change both runs alike, whatever the config says of saving."""
    often = [
        "--ckpt.at",
        "2,3",
        "--ckpt.at=4",
        "--ckpt.micro-interval",
        "3",
        "--ckpt.minutes",
        "0.001",
        "--ckpt.interval",
        "1",
    ]
    argv = [*DEBUG, *often]
    plan = make_plan(load_config(SFTConfig, argv).config, argv, Options(keep=str(tmp_path / "kept")))
    flags = ResumeCheck(plan, Quiet())._flags(Path("run"), interval=0, resume=False)  # type: ignore[arg-type]
    ckpt = load_config(SFTConfig, flags).config.ckpt
    assert (ckpt.interval, ckpt.at, ckpt.micro_interval, ckpt.minutes, ckpt.at_end) == (0, (), 0, None, True)
