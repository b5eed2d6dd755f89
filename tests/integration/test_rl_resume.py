"""Reinforcement learning that stops and resumes is the run that never stopped: rewards, tokens, losses, parameters."""

import os
import signal
from pathlib import Path

import pytest

from support import runs
from support.runs import checkpoint, differences, metrics, read, rl, samples
from trainer.errors import CheckpointMismatch, ConfigError, LaunchError, TrainerError


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Ten steps without a stop."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    rl(run_dir)
    return run_dir


def rollouts(run_dir: Path, step: int) -> list[dict]:
    return read(run_dir / "rollouts" / f"step_{step:08d}.jsonl")


def assert_same(a: Path, b: Path) -> None:
    assert differences(checkpoint(a, 10), checkpoint(b, 10)) == ""
    assert metrics(a) == metrics(b)
    assert samples(a) == samples(b)
    files = [sorted(path.name for path in (run_dir / "rollouts").iterdir()) for run_dir in (a, b)]
    assert files[0] == files[1] and files[0]
    assert all(read(a / "rollouts" / name) == read(b / "rollouts" / name) for name in files[0])


def test_a_run_has_rewards_and_an_on_policy_ratio(whole):
    rows = metrics(whole)
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert all(0 <= row["reward"] <= 1 and row["groups"] == 4 and row["staleness_max"] == 0 for row in steps)
    assert all(row["ratio_deviation_max"] < 1e-4 and row["mismatch_max"] < 1e-4 for row in steps)
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 5, 10]
    assert len(rollouts(whole, 3)) == 16


def test_stop_and_resume_is_bit_exact(whole, tmp_path):
    rl(tmp_path / "run", "--stop-step", "5")
    rl(tmp_path / "run", "--resume")
    assert_same(whole, tmp_path / "run")


def test_sigkill_between_checkpoints(whole, tmp_path):
    run_dir = tmp_path / "run"
    process = runs.start("rl", *runs.DEBUG_RL, "--output-dir", run_dir, "--ckpt.interval", "3")
    runs.wait_for_step(run_dir, 7, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    rl(run_dir, "--ckpt.interval", "3", "--resume")
    assert_same(whole, run_dir)


@pytest.mark.parametrize("owner", ["model", "optimizer", "progress", "data"])
def test_skipping_any_part_of_the_restore_is_seen(owner, whole, tmp_path, monkeypatch):
    """Anti-inert: the comparison above fails if an owner's state is not restored."""
    from trainer.checkpoint.app_state import AppState

    rl(tmp_path / "run", "--stop-step", "5")
    load = AppState.load
    monkeypatch.setattr(AppState, "load", lambda self, path, **_: load(self, path, skip={owner}))
    try:
        rl(tmp_path / "run", "--resume")
    except TrainerError:
        return
    same = differences(checkpoint(whole, 10), checkpoint(tmp_path / "run", 10)) == ""
    assert not (same and metrics(whole) == metrics(tmp_path / "run"))


HARD = [
    ("--rl.max-lag", "1"),
    ("--objective.iterations", "3", "--objective.old-logprobs", "trainer", "--objective.kl", "0.05"),
    ("--rl.filter-equal", "--objective.loss", "gspo", "--objective.aggregate", "sequence", "--optim.type", "muon"),
    ("--model.offload", "full", "--objective.overlong", "mask", "--objective.entropy", "0.01", "--ckpt.async"),
]


@pytest.mark.parametrize("flags", HARD, ids=lambda flags: "_".join(flags).replace("--", ""))
def test_queues_iterations_filters_and_offload_resume_exactly(flags, tmp_path):
    rl(tmp_path / "a", *flags, "--ckpt.interval", "0")
    rl(tmp_path / "b", *flags, "--stop-step", "4", "--ckpt.interval", "2")
    rl(tmp_path / "b", *flags, "--resume", "--stop-step", "7")
    rl(tmp_path / "b", *flags, "--resume")
    assert_same(tmp_path / "a", tmp_path / "b")
    if "--rl.max-lag" in flags:
        assert [row["staleness_max"] for row in metrics(tmp_path / "a") if row["step"]] == [0] + [1] * 9


def test_two_ranks_are_exact_and_the_same_prompts_on_one(whole, tmp_path):
    rl(tmp_path / "a", world_size=2)
    rl(tmp_path / "b", "--stop-step", "5", world_size=2)
    rl(tmp_path / "b", "--resume", world_size=2)
    assert_same(tmp_path / "a", tmp_path / "b")
    rl(tmp_path / "b", "--max-steps", "12", "--resume")  # on one rank
    trained = {name for rows in samples(tmp_path / "b").values() for row in rows for name in row}
    assert trained == {f"{number}:{sample}" for number in range(12 * 4) for sample in range(4)}
    first = [{k: row[k] for k in ("number", "sample", "completion", "reward")} for row in rollouts(whole, 1)]
    assert first == [{k: row[k] for k in first[0]} for row in rollouts(tmp_path / "a", 1)]


def test_from_a_fine_tuned_checkpoint(tmp_path):
    """A fork across kinds takes weights and optimizer; its place in the data is its own."""
    model = (
        "--model.name",
        "configs/debug/assets/letters-llama",
        "--data.sources.0.path",
        "configs/debug/assets/reverse.jsonl",
    )
    runs.sft(tmp_path / "sft", *model, "--max-steps", "2", "--scheduler.warmup-steps", "0", "--val.interval", "0")
    fork = ("--resume.dir", str(tmp_path / "sft"))
    with pytest.raises(CheckpointMismatch, match="--ckpt.skip-dataloader --ckpt.skip-progress"):
        rl(tmp_path / "refused", *fork)
    skips = ("--ckpt.skip-dataloader", "--ckpt.skip-progress", "--ckpt.skip-optimizer", "--ckpt.skip-scheduler")
    rl(tmp_path / "fork", *fork, *skips, "--stop-step", "1")
    assert metrics(tmp_path / "fork")[-1]["step"] == 1


def test_other_environments_are_refused_unless_named(tmp_path):
    rl(tmp_path / "run", "--stop-step", "2")
    with pytest.raises(CheckpointMismatch, match="envs"):
        rl(tmp_path / "run", "--resume", "--envs.0.name", "sort")
    rl(tmp_path / "run", "--resume", "--envs.0.name", "sort", "--resume.override", "envs", "--stop-step", "3")
    assert metrics(tmp_path / "run")[-1]["step"] == 3


def test_what_cannot_be_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match="max_steps instead of epochs"):
        rl(tmp_path / "run", "--max-steps", "none", "--epochs", "2")
    with pytest.raises(ConfigError, match="reverse-text"):
        rl(tmp_path / "run", "--envs.0.name", "revers-text")
    with pytest.raises(LaunchError):
        rl(tmp_path / "used", "--stop-step", "1")
        rl(tmp_path / "used")
