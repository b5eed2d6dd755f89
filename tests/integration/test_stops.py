"""Runs that are asked to save or to stop, at any point, go on as if nobody had asked."""

import signal
from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, read, samples, sft
from support.stops import SHORT, stopped
from trainer.checkpoint.manifest import read_manifest
from trainer.errors import LaunchError


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert stopped(run_dir) == 0
    return run_dir


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir() if path.name != "superseded")


def check_same(run_dir: Path, whole: Path) -> None:
    assert differences(checkpoint(whole, 4), checkpoint(run_dir, 4)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)


@pytest.mark.parametrize("what, code", [("SIGTERM", 143), ("SIGINT", 130), ("STOP", 143)])
def test_a_stop_within_a_cycle_is_served_at_its_end(what, code, whole, tmp_path):
    run_dir = tmp_path / "run"
    assert stopped(run_dir, plan=[("train", 6, what)]) == code
    assert steps(run_dir) == [2]
    assert read_manifest(checkpoint(run_dir, 2)).micro_step == 0
    assert not (run_dir / "STOP").exists()
    assert stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


@pytest.mark.parametrize("what", ["SIGUSR1", "SAVE"])
@pytest.mark.parametrize("on_signal", ["boundary", "now"])
def test_a_save_on_request_is_inert(what, on_signal, whole, tmp_path):
    run_dir = tmp_path / "run"
    assert stopped(run_dir, "--ckpt.on-signal", on_signal, plan=[("train", 6, what)]) == 0
    assert steps(run_dir) == ([2, 3, 4] if on_signal == "boundary" else [1, 3, 4])
    assert not (run_dir / "SAVE").exists()
    check_same(run_dir, whole)


class TestNow:
    """ckpt.on_signal = "now": in the middle of a cycle, with its gradients."""

    @pytest.fixture(scope="class")
    def half(self, tmp_path_factory) -> Path:
        """Stopped after six of the sixteen micro-steps."""
        run_dir = tmp_path_factory.mktemp("half") / "run"
        assert stopped(run_dir, "--ckpt.on-signal", "now", plan=[("train", 6, "SIGTERM")]) == 143
        return run_dir

    def test_the_checkpoint_says_where_it_was_taken(self, half):
        assert steps(half) == [1]
        manifest = read_manifest(checkpoint(half, 1))
        assert (manifest.step, manifest.micro_step) == (1, 2)
        assert [row["step"] for row in metrics(half)] == [0, 1]

    def test_the_resumed_run_finishes_the_cycle(self, half, whole, tmp_path):
        run_dir = tmp_path / "run"
        assert stopped(run_dir, "--resume.dir", half, plan=[("train", 10, "SAVE")]) == 0  # 16 - 6 micro-steps are left
        assert not (run_dir / "SAVE").exists()
        assert differences(checkpoint(whole, 4), checkpoint(run_dir, 4)) == ""
        assert metrics(run_dir) == metrics(whole)[2:]
        assert samples(run_dir) == {step: ids for step, ids in samples(whole).items() if step > 1}
        rows = {row["step"]: row for row in read(run_dir / "metrics.jsonl")}
        tokens = {step: rows[step]["tokens_per_second"] * rows[step]["step_seconds"] for step in (2, 3)}
        trained = {row["step"]: row["tokens"] for row in metrics(whole)[1:]}
        # Only what this process has done counts: two of the four micro-steps of step 2.
        assert tokens == pytest.approx({2: (trained[2] - trained[1]) / 2, 3: trained[3] - trained[2]})

    def test_in_the_short_cycle_at_an_epochs_end(self, tmp_path):
        """Ten micro-batches in an epoch: the third cycle has two, and the stop comes between them."""
        flags = ("--data.sources=[]", "--data.fake.vocab-size=384", "--data.fake.documents=10", "--data.no-pack")
        flags += ("--data.val-documents=0", "--val.interval=0", "--data.epoch-end=flush", "--max-steps=6")
        flags += ("--data.batch-size=4", "--data.micro-batch-size=1", "--ckpt.interval=0", "--ckpt.on-signal=now")
        whole, run_dir = tmp_path / "whole", tmp_path / "run"
        assert stopped(whole, *flags) == 0
        assert stopped(run_dir, *flags, plan=[("train", 9, "SIGTERM")]) == 143
        manifest = read_manifest(checkpoint(run_dir, 2))
        assert (manifest.step, manifest.micro_step) == (2, 1)
        assert stopped(run_dir, *flags, "--resume") == 0
        assert differences(checkpoint(whole, 6), checkpoint(run_dir, 6)) == ""
        assert metrics(run_dir) == metrics(whole)
        assert samples(run_dir) == samples(whole)

    @pytest.mark.parametrize("lost", ["gradients", "loss", "position"])
    def test_every_part_of_it_is_needed(self, lost, half, whole, tmp_path, monkeypatch):
        """Anti-inert: without one of them the run goes on, and is another one."""
        from trainer.train import loop, pending

        if lost == "gradients":
            monkeypatch.setattr(pending, "set_gradients", lambda *_: None)
            monkeypatch.setattr("trainer.checkpoint.app_state.AppState.verify", lambda *_: None)
        elif lost == "loss":
            load = pending.Pending.load_state_dict
            monkeypatch.setattr(
                pending.Pending,
                "load_state_dict",
                lambda self, state: load(self, state | {"loss_sums": [0.0]}),
            )
            monkeypatch.setattr("trainer.checkpoint.app_state.AppState.verify", lambda *_: None)
        else:
            step = loop.train_step
            monkeypatch.setattr(loop, "train_step", lambda *args, **named: step(*args, **named | {"done": 0}))
        run_dir = tmp_path / "run"
        stopped(run_dir, "--resume.dir", half)
        same = differences(checkpoint(whole, 4), checkpoint(run_dir, 4)) == ""
        assert not (same and metrics(run_dir) == metrics(whole)[2:])

    def test_stopped_again_and_again(self, half, whole, tmp_path):
        run_dir = tmp_path / "run"
        now = ("--ckpt.on-signal", "now")
        assert stopped(run_dir, "--resume.dir", half, *now, plan=[("train", 1, "SIGTERM")]) == 143
        assert read_manifest(checkpoint(run_dir, 1)).micro_step == 3
        assert stopped(run_dir, "--resume", *now, plan=[("train", 4, "SIGTERM")]) == 143
        assert read_manifest(checkpoint(run_dir, 2)).micro_step == 3
        assert stopped(run_dir, "--resume", *now) == 0
        assert differences(checkpoint(whole, 4), checkpoint(run_dir, 4)) == ""
        assert metrics(run_dir) == metrics(whole)[2:]

    @pytest.mark.parametrize("mode", ["optimizer", "full"])
    def test_wherever_the_gradients_are(self, mode, whole, tmp_path):
        run_dir, flags = tmp_path / "run", ("--ckpt.on-signal", "now", "--model.offload", mode)
        assert stopped(run_dir, *flags, plan=[("train", 6, "SIGTERM")]) == 143
        assert read_manifest(checkpoint(run_dir, 1)).micro_step == 2
        assert stopped(run_dir, *flags, "--resume") == 0
        check_same(run_dir, whole)

    def test_at_another_cut_the_cycle_begins_anew(self, half, whole, tmp_path):
        """The weights are those of the boundary, so nothing but time is lost."""
        run_dir = tmp_path / "run"
        sft(run_dir, *SHORT, "--resume.dir", half, "--data.micro-batch-size", "8")
        assert samples(run_dir) == {step: ids for step, ids in samples(whole).items() if step > 1}
        losses = [row["loss"] for row in metrics(whole)[2:]]
        assert [row["loss"] for row in metrics(run_dir)] == pytest.approx(losses, rel=2e-4)


@pytest.mark.parametrize("place, step", [(1, 0), (10, 2), (19, 4)])  # a validation has nine micro-steps
def test_e11_a_stop_within_a_validation_is_served_within_it(place, step, whole, tmp_path):
    """The validation is broken off; the resumed run does it first, and the row is as if nothing had happened."""
    run_dir = tmp_path / "run"
    assert stopped(run_dir, plan=[("val", place, "SIGTERM")]) == 143
    assert max(steps(run_dir)) == step
    assert all("val_loss" not in row for row in metrics(run_dir) if row["step"] == step)
    assert stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


def test_a_validation_at_the_stop_step_is_completed_too(whole, tmp_path):
    """Launched again as it was: there is no step to train, but the row of the last one has to be finished."""
    run_dir = tmp_path / "run"
    assert stopped(run_dir, "--stop-step", "2", plan=[("val", 10, "SIGTERM")]) == 143
    assert stopped(run_dir, "--stop-step", "2", "--resume") == 0
    assert metrics(run_dir) == metrics(whole)[:3]
    assert stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


def test_a_save_within_a_validation(whole, tmp_path):
    run_dir = tmp_path / "run"
    assert stopped(run_dir, plan=[("val", 10, "SIGUSR1")]) == 0
    assert steps(run_dir) == [2, 3, 4]
    check_same(run_dir, whole)
    fork = tmp_path / "fork"
    assert stopped(fork, "--resume.dir", checkpoint(run_dir, 2)) == 0
    assert metrics(fork) == metrics(whole)[2:]  # the row of step 2 was not complete when the checkpoint was taken


def test_a_stop_before_the_first_step(whole, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    assert stopped(run_dir) == 143
    assert steps(run_dir) == [0]
    assert stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


def test_a_stop_in_the_last_step_finds_the_run_complete(whole, tmp_path):
    run_dir = tmp_path / "run"
    assert stopped(run_dir, "--val.interval", "0", plan=[("train", 16, "SIGTERM")]) == 0
    assert (run_dir / "weights" / "model.safetensors").exists()


class TestTwoRanks:
    """The signal comes to one rank; both answer, at the same place. `--data.micro-batch-size 1`: four micro-steps."""

    FLAGS = ("--data.micro-batch-size", "1")

    @pytest.fixture(scope="class")
    def two(self, tmp_path_factory) -> Path:
        run_dir = tmp_path_factory.mktemp("two") / "run"
        assert stopped(run_dir, *self.FLAGS, world_size=2) == 0
        return run_dir

    @pytest.mark.parametrize(
        "on_signal, mode, step, micro_step", [("boundary", "none", 2, 0), ("now", "none", 1, 2), ("now", "full", 1, 2)]
    )
    def test_e10_one_rank_hears_it(self, on_signal, mode, step, micro_step, two, tmp_path):
        run_dir = tmp_path / "run"
        flags = (*self.FLAGS, "--ckpt.on-signal", on_signal, "--model.offload", mode)
        assert stopped(run_dir, *flags, plan=[("train", 6, "SIGTERM")], world_size=2, on_rank=1) == 143
        assert steps(run_dir) == [step]
        assert read_manifest(checkpoint(run_dir, step)).micro_step == micro_step
        assert stopped(run_dir, *flags, "--resume", world_size=2) == 0
        check_same(run_dir, two)

    def test_e11_in_a_validation(self, two, tmp_path):
        run_dir = tmp_path / "run"
        assert stopped(run_dir, *self.FLAGS, plan=[("val", 10, "SIGINT")], world_size=2, on_rank=1) == 130
        assert stopped(run_dir, *self.FLAGS, "--resume", world_size=2) == 0
        check_same(run_dir, two)

    def test_replica_groups_begin_the_cycle_anew(self, two, tmp_path):
        """HSDP keeps each group's own sum inside, where it cannot be saved."""
        run_dir = tmp_path / "run"
        flags = (*self.FLAGS, "--parallel.dp-replicate", "2", "--ckpt.on-signal", "now")
        assert stopped(run_dir, *flags, plan=[("train", 6, "SIGTERM")], world_size=2) == 143
        assert read_manifest(checkpoint(run_dir, 1)).micro_step == 0
        assert stopped(run_dir, *flags, "--resume", world_size=2) == 0
        assert samples(run_dir) == samples(two)
        losses = [row["loss"] for row in metrics(two)[1:]]
        assert [row["loss"] for row in metrics(run_dir)[1:]] == pytest.approx(losses, rel=2e-4)

    def test_gradients_of_two_ranks_are_left_out_on_one(self, two, tmp_path):
        run_dir, flags = tmp_path / "run", (*self.FLAGS, "--ckpt.on-signal", "now")
        stopped(run_dir, *flags, plan=[("train", 6, "SIGTERM")], world_size=2)
        assert stopped(run_dir, *flags, "--resume") == 0
        assert samples(run_dir) == samples(two)


def test_c3_a_resume_that_would_train_nothing_is_an_error(tmp_path):
    run_dir = tmp_path / "run"
    assert stopped(run_dir, "--stop-step", "2") == 0
    with pytest.raises(LaunchError, match="nothing would be trained: the run is at step 2 of 4"):
        stopped(run_dir, "--resume", "--stop-step", "2")
    assert stopped(run_dir, "--resume") == 0
    assert stopped(run_dir, "--resume") == 0  # complete: that is no error


def test_handlers_do_not_outlive_the_run():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
