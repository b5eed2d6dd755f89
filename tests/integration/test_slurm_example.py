"""The Slurm example with real runs: stopped before its time limit, queued again, and gone on with the same line.

Slurm's own commands are stand-ins: `srun` starts the command on this machine and passes SIGTERM on, as the real one does.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import runs
from support.runs import DEBUG, REPO, checkpoint, differences, metrics, output_of, read, samples, sft

SRUN = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
"$@" &
task=$!
trap 'kill -TERM "$task"' TERM
code=0
while kill -0 "$task" 2>/dev/null; do # the signal ends a wait, and not the task
  wait "$task"
  code=$?
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >>"$NOTES"; fi
"""


def submit(place: Path, argv: list[str], restarts: int) -> subprocess.Popen[str]:
    """Starts the job as Slurm would: a copy of the script, from the directory where sbatch was called."""
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = place / "slurm_script"
    job.write_text((REPO / "scripts/launch/slurm.sh").read_text())
    environment = runs._environment(
        {
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "NOTES": str(place / "notes"),
            "RANKS_PER_NODE": "2",
            "SLURM_JOB_ID": str(os.getpid()),  # it chooses the port
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_SUBMIT_DIR": str(REPO),
        }
    )
    return subprocess.Popen(
        ["bash", str(job), *argv],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_job_that_is_queued_again_goes_on_as_if_it_had_never_stopped(tmp_path):
    flags = ["--max-steps", "60", "--val.interval", "0", "--ckpt.interval", "0"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    sft(whole, *flags, world_size=2)
    argv = [*DEBUG, *flags, "--output-dir", str(run_dir)]

    job = submit(tmp_path, argv, restarts=0)
    runs.wait_for_step(run_dir, 2, job)
    job.send_signal(signal.SIGUSR1)  # what `#SBATCH --signal=B:USR1@300` asks for: to the script alone
    text = output_of(job)
    assert job.returncode != 0, text
    assert (tmp_path / "notes").read_text() == f"requeue {os.getpid()}\n", text
    stopped = read(run_dir / "metrics.jsonl")[-1]["step"]
    assert 2 <= stopped < 60
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [checkpoint(run_dir, stopped).name]

    job = submit(tmp_path, argv, restarts=1)
    text = output_of(job)
    assert job.returncode == 0, text
    assert (tmp_path / "notes").read_text().count("requeue") == 1
    starts = [row["step"] for row in read(run_dir / "events.jsonl") if row["event"] == "start"]
    assert starts == [0, stopped]
    assert differences(checkpoint(whole, 60), checkpoint(run_dir, 60)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)
