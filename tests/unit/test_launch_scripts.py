"""The Slurm example against stand-ins for Slurm's commands: what it does about the time limit and about the end."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"

SRUN = """#!/usr/bin/env bash
trap 'echo TERM >>"$NOTES/srun"; exit 143' TERM
echo "$@ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >>"$NOTES/arguments"
[ -z "$CODE" ] || exit "$CODE"
while true; do sleep 0.05; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1" = requeue ] && echo "$@" >>"$NOTES/scontrol"
[ "$1" = show ] && echo node-a
exit 0
"""


def start(notes: Path, code: str) -> subprocess.Popen:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (notes / name / "bin").mkdir(parents=True)
        program = notes / name / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{notes}/srun/bin:{notes}/scontrol/bin:{os.environ['PATH']}",
        "NOTES": str(notes / "notes"),
        "CODE": code,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node-a",
        "SLURM_SUBMIT_DIR": str(notes),
    }
    (notes / "notes").mkdir()
    return subprocess.Popen(["bash", str(LAUNCH / "slurm.sh"), "@", "a.toml"], env=environment)


@pytest.mark.parametrize("code", ["0", "1"])
def test_what_ends_by_itself_is_not_requeued(code, tmp_path):
    assert start(tmp_path, code).wait(timeout=60) == int(code)
    assert sorted(path.name for path in (tmp_path / "notes").iterdir()) == ["arguments"]


def test_before_the_time_limit_the_run_is_stopped_and_requeued(tmp_path):
    process, notes = start(tmp_path, ""), tmp_path / "notes"
    deadline = time.monotonic() + 60
    while not (notes / "arguments").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 143
    assert (notes / "srun").read_text() == "TERM\n"
    assert (notes / "scontrol").read_text() == "requeue 7\n"
    assert "@ a.toml --ckpt.grace-seconds 240 260" in (notes / "arguments").read_text()


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_bash_can_read_it(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
