"""`trainer check resume`: says "exact" of a sound trainer, and of a faulty one what is wrong and where.

Faults are put into the child processes from outside (see support/sabotage/sitecustomize.py).
"""

import json
import os
from pathlib import Path

import pytest

from support import runs

SABOTAGE = Path(__file__).parents[1] / "support" / "sabotage"


def check(*flags: str, sabotage: str = "", **env: str):
    """Runs the command on the debug config; returns (exit code, parsed JSON, everything printed)."""
    if sabotage:
        env |= {"SABOTAGE": sabotage, "PYTHONPATH": os.pathsep.join([str(SABOTAGE), os.environ["PYTHONPATH"]])}
    done = runs.command("check", "resume", *runs.DEBUG, *flags, check=False, **env)
    text = done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout) if "--json" in flags else {}, text


def test_a_sound_trainer_is_exact(tmp_path):
    code, _, text = check("--steps", "6", "--at", "3", TMPDIR=str(tmp_path))
    assert code == 0, text
    assert "exact  killed in step" in text and "resumed from step 2" in text
    assert "80 tensors, bit for bit equal, and so is every entry, counter and cursor" in text
    for step in range(7):
        assert any(line.split()[:1] == [str(step)] for line in text.splitlines()), f"no line of step {step}"
    assert list(tmp_path.glob("trainer-check-*")) == []  # what was only a check leaves nothing
    assert "runs kept" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "key", "step", "cause"),
    [
        ("skip:optimizer", "loss", 4, "optimizer's state"),
        ("skip:data", "ids", 3, "the samples of step 1"),
        ("nudge:model", "loss", 3, "the weights were not restored exactly"),
        ("skip:progress", "ids", 1, "counted on from step 0: the progress counters were not restored"),
    ],
)
def test_a_part_that_is_not_restored_is_named(fault, key, step, cause, tmp_path):
    """Without AdamW's moments the first resumed loss is still right: it is computed before the update."""
    code, found, text = check("--steps", "6", "--at", "3", "--json", "--keep", str(tmp_path / "kept"), sabotage=fault)
    assert code == 1, text
    assert found["verdict"] == "different"
    assert found["first"]["key"] == key and found["first"]["step"] in (step, step - 1)
    assert cause in found["cause"], found["cause"]
    # The run was repeated by itself.
    assert "the kernels are deterministic" in found["cause"] or fault in ("skip:data", "skip:progress")
    assert {difference["owner"] for difference in found["checkpoint_differences"]} >= {"model"}
    assert sorted(path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()) == [
        "never-stopped",
        "repeated",
        "resumed",
    ]


@pytest.mark.slow
def test_a_kernel_that_is_not_deterministic_is_told_from_a_fault_of_the_resume():
    code, found, text = check("--steps", "6", "--at", "3", "--json", sabotage="noise")
    assert code == 1, text
    assert "this is not the resume" in found["cause"] and "not deterministic" in found["cause"]


@pytest.mark.slow
def test_sigterm_and_another_number_of_processes(tmp_path):
    flags = ("--steps", "8", "--at", "3", "--signal", "TERM", "--nproc", "2", "--resume-nproc", "1", "--json")
    code, found, text = check(*flags)
    assert code == 0, text
    assert found["verdict"] == "within bound" and found["resumed_from"] >= 3  # saved when the signal came
    assert found["checkpoint_differences"] == []


@pytest.mark.slow
def test_a_measured_bound_hides_no_lost_optimizer():
    flags = ("--steps", "6", "--at", "3", "--nproc", "2", "--resume-nproc", "1", "--json")
    code, found, text = check(*flags, sabotage="skip:optimizer")
    assert code == 1, text
    assert found["verdict"] == "different" and found["measured_spread"] < 5e-5 and found["bound"] == 1e-4


MUON = ("--optim.type", "muon", "--optim.lr", "0.02", "--optim.adamw-lr", "3e-3")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
@pytest.mark.parametrize(
    "more",
    [
        MUON,
        ("--signal", "TERM", "--ckpt.async"),
        (*MUON, "--signal", "TERM", "--ckpt.on-signal", "now", "--nproc", "2"),
        (*MUON, "--nproc", "2", "--resume-nproc", "1"),
    ],
    ids=["muon", "term-async", "muon-term-now-2", "muon-2-1"],
)
def test_muon_and_offload(more, mode):
    code, found, text = check("--steps", "6", "--at", "3", "--json", "--model.offload", mode, *more)
    assert code == 0, text
    assert found["verdict"] == ("within bound" if "--resume-nproc" in more else "exact")
    assert (found["measured_spread"] is not None) == ("--resume-nproc" in more)
    assert found["checkpoint_differences"] == []


def test_a_run_that_fails_is_no_verdict(tmp_path):
    code, _, text = check("--steps", "4", "--keep", str(tmp_path / "kept"), "--data.seq-len", "2")
    assert code == 2
    assert "the run ended with exit code" in text and "never-stopped.log" in text
    assert "exact  " not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "11"], "max_steps = 10"),
        (["--steps", "4", "--at", "4"], "something is left to resume"),
        (["--signal", "HUP"], "expected KILL or TERM"),
        (["--at"], "--at needs a value"),
        (["--nproc", "0"], "expected a number from 1"),
        (["--bound", "1e-3"], "everything must be equal"),
        (["--optim.lrr", "1"], "optim.lrr"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(flags, message):
    from trainer.cli.check import main
    from trainer.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        main(["resume", *runs.DEBUG, *flags])
