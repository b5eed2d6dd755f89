"""Reinforcement learning that is asked to save or to stop, at any moment of a step, goes on as if nobody had asked."""

from pathlib import Path

import pytest

from support.rl_stops import rl_stopped
from support.runs import checkpoint, differences, metrics, read, samples
from trainer.checkpoint.manifest import read_manifest

LAST = 5
NOW = ("--ckpt.on-signal", "now")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Five steps that nobody interrupts."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert rl_stopped(run_dir) == 0
    return run_dir


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir() if path.name != "superseded")


def check_same(run_dir: Path, whole: Path) -> None:
    assert differences(checkpoint(whole, LAST), checkpoint(run_dir, LAST)) == ""
    assert metrics(run_dir) == metrics(whole)
    assert samples(run_dir) == samples(whole)
    for file in (whole / "rollouts").iterdir():
        assert read(run_dir / "rollouts" / file.name) == read(file)


@pytest.mark.parametrize("what, code", [("SIGTERM", 143), ("SIGINT", 130), ("STOP", 143)])
@pytest.mark.parametrize("where", ["rollout", "train"])
def test_a_stop_within_a_step_is_served_at_its_end(where, what, code, whole, tmp_path):
    run_dir = tmp_path / "run"
    assert rl_stopped(run_dir, plan=[(where, 3, 1, what)]) == code
    assert steps(run_dir) == [3]
    assert not (run_dir / "STOP").exists()
    assert rl_stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


@pytest.mark.parametrize("what", ["SIGUSR1", "SAVE"])
@pytest.mark.parametrize("on_signal, saved", [("boundary", 3), ("now", 2)])
def test_a_save_on_request_is_inert_and_can_be_resumed(what, on_signal, saved, whole, tmp_path):
    run_dir, fork = tmp_path / "run", tmp_path / "fork"
    assert rl_stopped(run_dir, "--ckpt.on-signal", on_signal, plan=[("train", 3, 2, what)]) == 0
    assert steps(run_dir) == [saved, 4, LAST]
    assert not (run_dir / "SAVE").exists()
    check_same(run_dir, whole)
    assert rl_stopped(fork, "--resume.dir", checkpoint(run_dir, saved)) == 0
    assert differences(checkpoint(whole, LAST), checkpoint(fork, LAST)) == ""
    assert metrics(fork) == [row for row in metrics(whole) if row["step"] > saved]


BATCHES = [
    (),
    ("--rl.max-lag", "1"),
    ("--objective.iterations", "2", "--objective.old-logprobs", "trainer"),
    ("--model.offload", "full", "--optim.type", "muon", "--rl.filter-equal"),
    ("--objective.sft", "0.3", "--data.sources.0.path", "configs/debug/assets/reverse.jsonl", "--data.batch-size", "4"),
]


@pytest.mark.parametrize("flags", BATCHES, ids=lambda flags: " ".join(flags[:2]) or "plain")
@pytest.mark.parametrize("step", [3, 4])
def test_a_stop_at_once_goes_back_to_the_boundary_with_the_batch_in_hand(step, flags, tmp_path):
    """ckpt.on_signal = "now": weights and place are those of the last boundary, and what was generated since comes again."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert rl_stopped(whole, *flags) == 0
    micro_step = 1 if "--rl.filter-equal" in flags else 2  # what is left of a filtered batch may be two, and 2 its last
    assert rl_stopped(run_dir, *flags, *NOW, plan=[("train", step, micro_step, "SIGTERM")]) == 143
    manifest = read_manifest(checkpoint(run_dir, step - 1))
    assert (manifest.step, manifest.micro_step) == (step - 1, 0)
    assert [row["step"] for row in metrics(run_dir)] == list(range(step))
    assert rl_stopped(run_dir, *flags, *NOW, "--resume") == 0
    check_same(run_dir, whole)


@pytest.mark.parametrize("flags", [(), ("--rl.max-lag", "1")], ids=["lag 0", "lag 1"])
def test_stopped_at_once_again_and_again(flags, tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert rl_stopped(whole, *flags) == 0
    assert rl_stopped(run_dir, *flags, *NOW, plan=[("train", 1, 2, "SIGTERM")]) == 143
    for step, micro_step in [(1, 2), (2, 1), (2, 2), (4, 1)]:  # after the first, in the same step and in later ones
        plan = [("train", step, micro_step, "SIGTERM")]
        assert rl_stopped(run_dir, *flags, *NOW, "--resume", plan=plan) == 143
    assert rl_stopped(run_dir, *flags, *NOW, "--resume") == 0
    check_same(run_dir, whole)


def test_what_a_stop_at_once_leaves_is_not_generated_again(whole, tmp_path):
    """The checkpoint has the groups: the resumed run trains them before it asks for any rollout."""
    run_dir = tmp_path / "run"
    assert rl_stopped(run_dir, *NOW, plan=[("train", 3, 2, "SIGTERM")]) == 143
    with pytest.raises(AssertionError, match="did not come to every moment"):
        rl_stopped(run_dir, *NOW, "--resume", plan=[("rollout", 3, 1, "SAVE")])
    check_same(run_dir, whole)


@pytest.mark.parametrize("step", [0, 2, LAST])
def test_a_stop_within_an_evaluation_is_served_within_it(step, whole, tmp_path):
    """The evaluation is broken off before its next part; the resumed run does it first, and the row is complete."""
    run_dir = tmp_path / "run"
    assert rl_stopped(run_dir, plan=[("eval", step, 1, "SIGTERM")], eval_chunk=4) == 143
    assert max(steps(run_dir)) == step
    assert all("eval_reward" not in row for row in metrics(run_dir) if row["step"] == step)
    assert rl_stopped(run_dir, "--resume", eval_chunk=4) == 0
    check_same(run_dir, whole)


def test_a_stop_before_the_first_step(whole, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    assert rl_stopped(run_dir) == 143
    assert steps(run_dir) == [0]
    assert rl_stopped(run_dir, "--resume") == 0
    check_same(run_dir, whole)


class TestTwoRanks:
    """The signal comes to one rank; both answer, at the same place."""

    @pytest.fixture(scope="class")
    def two(self, tmp_path_factory) -> Path:
        run_dir = tmp_path_factory.mktemp("two") / "run"
        assert rl_stopped(run_dir, world_size=2) == 0
        return run_dir

    @pytest.mark.parametrize(
        "flags, where, saved",
        [((), "rollout", 3), (NOW, "train", 2), ((*NOW, "--model.offload", "full"), "train", 2)],
        ids=["boundary", "now", "now offload"],
    )
    def test_one_rank_hears_it(self, flags, where, saved, two, tmp_path):
        run_dir = tmp_path / "run"
        assert rl_stopped(run_dir, *flags, plan=[(where, 3, 1, "SIGTERM")], world_size=2, on_rank=1) == 143
        assert steps(run_dir) == [saved]
        assert rl_stopped(run_dir, *flags, "--resume", world_size=2) == 0
        check_same(run_dir, two)

    def test_replica_groups_are_exact_and_see_the_same_prompts(self, two, tmp_path):
        """HSDP, two replicas: the engine serves the same weights, and a stop at once resumes exactly."""
        flags = ("--parallel.dp-replicate", "2", "--rl.max-lag", "1", *NOW)
        whole, run_dir = tmp_path / "whole", tmp_path / "run"
        assert rl_stopped(whole, *flags, world_size=2) == 0
        plan = [("train", 3, 2, "SIGTERM")]
        assert rl_stopped(run_dir, *flags, plan=plan, world_size=2, on_rank=1) == 143
        assert steps(run_dir) == [2]
        assert rl_stopped(run_dir, *flags, "--resume", world_size=2) == 0
        check_same(run_dir, whole)
        assert read(whole / "rollouts/step_00000001.jsonl") == read(two / "rollouts/step_00000001.jsonl")
