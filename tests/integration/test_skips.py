"""`ckpt.skip_*`: what a resume leaves out, and that all the rest is there."""

from pathlib import Path

import pytest
import torch

from support.runs import checkpoint, metrics, opened, samples, sft
from trainer.errors import CheckpointMismatch, ConfigError, LaunchError
from trainer.optim.schedule import Schedule


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """Five of ten steps."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    sft(run_dir, "--stop-step", "5")
    return run_dir


def resumed(source: Path, run_dir: Path, *flags: str):
    """A run right after the load, before its first step."""
    return opened(run_dir, "--resume.dir", source, *flags)


def counters(run) -> set[float]:
    return {state["step"].item() for state in run.optimizer.state.values()}


def moments(run) -> float:
    return sum(state["exp_avg"].abs().sum().item() for state in run.optimizer.state.values())


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
def test_a10_skip_optimizer(mode, half, tmp_path):
    from trainer.train.loop import take_step

    other = ("--model.offload", mode, "--optim.lr", "1e-3", "--optim.weight-decay", "0.5", "--optim.betas", "0.8,0.9")
    with resumed(half, tmp_path / "a") as run:
        weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        assert counters(run) == {5.0}
        assert moments(run) > 0
        schedule, cursor = run.schedule.state_dict(), run.loader.state_dict()
    with resumed(half, tmp_path / "b", *other, "--ckpt.skip-optimizer") as run:
        assert counters(run) == {0.0}
        assert moments(run) == 0
        assert (run.progress.step, run.schedule.state_dict(), run.loader.state_dict()) == (5, schedule, cursor)
        groups = run.optimizer.param_groups
        assert {group["initial_lr"] for group in groups} == {1e-3}
        assert {group["lr"] for group in groups} == {1e-3 * run.schedule.schedule.factor(5)}
        assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.5, (0.8, 0.9)), (0.0, (0.8, 0.9))]
        for group in groups:
            group["lr"] = 0.0
        take_step(run, run.loader.next_batch())
        assert counters(run) == {1.0}
        assert all(torch.equal(p, weights[name]) for name, p in run.model.named_parameters())


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
@pytest.mark.parametrize(
    ("flags", "lr", "decay"),
    [
        ((), 1e-2, 0.01),
        (("--ckpt.skip-scheduler",), 1e-2, 0.01),
        (("--ckpt.skip-optimizer",), 1e-3, 0.1),
        (("--resume.override", "optim.lr,optim.weight_decay"), 1e-3, 0.1),
        (("--resume.override", "optim.lr"), 1e-3, 0.01),
    ],
    ids=["plain", "skip scheduler", "skip optimizer", "override both", "override lr"],
)
def test_a9_one_rule_in_every_mode(mode, flags, lr, decay, ten_to_the_minus_2, tmp_path):
    """The checkpoint's lr and decay win over the config's, which is told; the config's win where a flag says so."""
    constant = ("--scheduler.type", "constant", "--scheduler.warmup-steps", "0")
    other = ("--model.offload", mode, "--optim.lr", "1e-3", "--optim.weight-decay", "0.1", "--val.interval", "0")
    with resumed(ten_to_the_minus_2, tmp_path / "run", *constant, *other, *flags) as run:
        decays = {group["name"]: group["weight_decay"] for group in run.optimizer.param_groups}
        assert {group["lr"] for group in run.optimizer.param_groups} == {lr}
        assert {group["initial_lr"] for group in run.optimizer.param_groups} == {lr}
        assert decays == {"decay": decay, "no_decay": 0.0}
        winner = {True: "checkpoint", False: "config"}
        told = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
        assert f"optim.lr: checkpoint 0.01, config 0.001 -> {winner[lr == 1e-2]}" in told
        assert f"optim.weight_decay: checkpoint 0.01, config 0.1 -> {winner[decay == 0.01]}" in told


def test_what_decays_can_be_overridden(ten_to_the_minus_2, tmp_path):
    """The new rule moves parameters, so it needs regroup; each brings its entries, but for the decay."""
    flags = ("--optim.decay", "all", "--resume.override", "optim.decay", "--scheduler.type", "constant")
    with pytest.raises(CheckpointMismatch, match="--resume.regroup"):
        with resumed(ten_to_the_minus_2, tmp_path / "a", *flags):
            pass
    with resumed(ten_to_the_minus_2, tmp_path / "b", *flags, "--resume.regroup") as run:
        groups = [(group["name"], group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
        assert groups == [("decay", 1e-2, 0.01)]
        assert counters(run) == {2.0}


@pytest.fixture(scope="module")
def ten_to_the_minus_2(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("lr") / "run"
    constant = ("--scheduler.type", "constant", "--scheduler.warmup-steps", "0")
    sft(run_dir, *constant, "--optim.lr", "1e-2", "--stop-step", "2", "--val.interval", "0")
    return run_dir


def test_skip_optimizer_lets_the_optimizer_change(half, tmp_path):
    with pytest.raises(CheckpointMismatch, match=r"optim\.type.*--ckpt\.skip-optimizer"):
        sft(tmp_path / "refused", "--resume.dir", half, "--optim.type", "sgd")
    with resumed(half, tmp_path / "sgd", "--optim.type", "sgd", "--ckpt.skip-optimizer") as run:
        assert type(getattr(run.optimizer, "inner", run.optimizer)).__name__ == "SGD"


def test_skip_scheduler(half, tmp_path):
    """A fresh schedule over the steps that are left; its peak is the checkpoint's, not the config's."""
    run_dir = tmp_path / "run"
    fresh = ("--scheduler.type", "cosine", "--scheduler.warmup-steps", "2", "--optim.lr", "1.0")
    sft(run_dir, "--resume.dir", half, *fresh, "--ckpt.skip-scheduler", "--stop-step", "8")
    sft(run_dir, "--resume", *fresh)
    schedule = Schedule("cosine", total_steps=5, warmup_steps=2)
    expected = [3e-3 * schedule.factor(step) for step in range(5)]
    assert [row["lr"] for row in metrics(run_dir)] == pytest.approx(expected, rel=1e-12)
    assert max(expected) == 3e-3
    with pytest.raises(ConfigError, match=r"warmup outlasts.*5 steps are left for the new schedule"):
        sft(tmp_path / "long", "--resume.dir", half, "--scheduler.warmup-steps", "6", "--ckpt.skip-scheduler")


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
def test_skip_scheduler_is_not_misled_by_the_lr_of_the_moment(mode, tmp_path):
    """Saved in the warmup, where the groups' lr is far below their peak: 5e-5, never 5e-13."""
    warmup = ("--optim.lr", "5e-5", "--scheduler.warmup-steps", "8")
    sft(tmp_path / "run", *warmup, "--stop-step", "1", "--val.interval", "0")
    constant = ("--scheduler.type", "constant", "--scheduler.warmup-steps", "0", "--model.offload", mode)
    with resumed(tmp_path / "run", tmp_path / "b", *constant, "--ckpt.skip-scheduler") as run:
        assert [group["lr"] for group in run.optimizer.param_groups] == [5e-5, 5e-5]


def test_skip_dataloader(half, tmp_path):
    run_dir = tmp_path / "run"
    flags = ("--data.batch-size", "4", "--stop-step", "6")  # the order may change: none is taken over
    sft(run_dir, "--resume.dir", half, "--ckpt.skip-dataloader", *flags)
    assert samples(run_dir)[6] == samples(half)[1][:4]
    (row,) = metrics(run_dir)
    assert row["step"] == 6
    assert row["tokens"] > metrics(half)[-1]["tokens"]


def test_skip_progress(half, tmp_path):
    run_dir = tmp_path / "run"
    with resumed(half, run_dir, "--ckpt.skip-progress") as run:
        assert (run.progress.step, run.progress.tokens, run.progress.samples) == (0, 0, 0)
        assert counters(run) == {5.0}
        assert run.loader.state_dict()["cursor"]["batch"] == 5
    with pytest.raises(ConfigError, match="set another output_dir"):
        sft(half, "--resume", "--ckpt.skip-progress")


def test_everything_left_out_is_a_start_from_the_weights(half, tmp_path):
    flags = [f"--ckpt.skip-{part}" for part in ("optimizer", "scheduler", "dataloader", "progress")]
    with resumed(half, tmp_path / "run", *flags) as run:
        assert (run.progress.step, counters(run), moments(run)) == (0, {0.0}, 0)
        assert run.loader.state_dict()["cursor"]["batch"] == 0
        assert run.schedule.schedule.start_step == 0


def test_flags_are_of_one_start(half, tmp_path):
    """The next resume does not find them in the checkpoint's config."""
    run_dir = tmp_path / "run"
    sft(run_dir, "--resume.dir", half, "--ckpt.skip-optimizer", "--stop-step", "6")
    with resumed(run_dir, tmp_path / "b") as run:
        assert run.progress.step == 6
        assert counters(run) == {1.0}


def test_a_fork_into_a_used_directory_is_refused(half, tmp_path):
    """Its steps would stand among those of the run that is there already, and the higher ones pass for newer."""
    sft(tmp_path / "run", "--stop-step", "1", "--val.interval", "0")
    with pytest.raises(LaunchError, match="already holds a run"):
        sft(tmp_path / "run", "--resume.dir", checkpoint(half, 5))
