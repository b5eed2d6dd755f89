"""Environments, objectives and models that leave nothing to train on, or cannot be: the run goes on or says why."""

from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, read, rl
from trainer.errors import ConfigError, ModelError, TrainingError

SHORT = ("--max-steps", "4", "--ckpt.interval", "0", "--val.interval", "0")
ENVIRONMENT = """
from trainer.rl.envs import Environment


class Hostile(Environment):
    def __init__(self, words: int = 1, reward: float | None = 0.35):
        self.words, self.reward = words, reward

    def sample(self, rng):
        return f"say {rng.integers(1000)} " * self.words, {}

    def score(self, info, completion):
        return len(completion) + sum(map(ord, completion)) if self.reward is None else self.reward
"""
LOSSES = """
def wrong_signature(tokens):
    return tokens


def impossible(tokens, config):
    return 1 / 0
"""


def hostile(folder: Path, *args: str) -> tuple[str, ...]:
    """Returns the flags of a run of nothing but the environment above."""
    (folder / "hostile.py").write_text(ENVIRONMENT)
    flags: list[str] = []
    for number in range(2):
        flags += [f"--envs.{number}.name", f"{folder}/hostile.py:Hostile"]
        flags += [f"--envs.{number}.args", str(list(args)).replace("'", '"')]
    return tuple(flags)


def log_of(run_dir: Path) -> str:
    return "".join(path.read_text() for path in (run_dir / "logs").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("args", "flags", "why"),
    [
        (["words=60"], (), "20 groups were left out as 'unscored'"),
        (["reward=NaN"], (), "20 groups were left out as 'unscored'"),
        ([], ("--rl.filter-equal",), "20 groups were left out as 'equal'"),
        (  # rewards differ, but only those of completions that are masked
            ["reward=null"],
            ("--rl.filter-equal", "--objective.overlong", "mask", "--rl.max-new-tokens", "1"),
            "20 groups were left out as 'equal'",
        ),
        ([], ("--envs.0.min-reward", "0.5", "--envs.1.min-reward", "0.5"), "20 groups were left out as 'too_hard'"),
        ([], ("--objective.overlong", "mask", "--rl.max-new-tokens", "1"), "16 rollouts were cut or not scored"),
    ],
)
def test_steps_without_anything_to_train_on_say_so_and_change_nothing(args, flags, why, tmp_path):
    run_dir = tmp_path / "run"
    rl(run_dir, *SHORT, *hostile(tmp_path, *args), *flags, "--optim.weight-decay", "0", "--max-steps", "2")
    assert f"step 1 has nothing to train on: {why}" in log_of(run_dir)
    assert [(row["loss"], row["grad_norm"]) for row in metrics(run_dir)] == [(0.0, 0.0)] * 2
    if "words=60" in args:
        assert "which leaves no room to answer in 64" in log_of(run_dir)


TALK = """
from trainer.rl.envs import Environment


class Talk(Environment):
    \"""Some prompts are longer than the model's context of 128 tokens, and the others' conversations become so.\"""

    def sample(self, rng):
        return "say " + "a" * int(rng.choice([60, 200])) + str(rng.integers(1000)), {}

    def step(self, info, messages):
        return "more"

    def score(self, info, completion):
        return float(len(set(completion)))
"""


def test_what_exceeds_the_models_context_costs_its_samples(tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    envs = [word for n in "01" for word in (f"--envs.{n}.name", f"{tmp_path}/talk.py:Talk")]
    stops = [word for letter in "aeioutnrsldc" for word in ("--rl.stop", letter)]
    flags = (*SHORT, *envs, *stops, "--max-steps", "2", "--data.seq-len", "256", "--rl.max-turns", "60")
    rl(tmp_path / "run", *flags)
    assert "data.seq_len = 256, but" in log_of(tmp_path / "run") and "128 positions" in log_of(tmp_path / "run")
    assert "which leaves no room to answer" in log_of(tmp_path / "run")
    rows = [row for path in (tmp_path / "run" / "rollouts").iterdir() for row in read(path)]
    assert {row["finish_reason"] for row in rows} >= {"length"} and max(row["turns"] for row in rows) > 1


def test_a_batch_without_a_trained_rollout_is_kept_over_its_iterations(tmp_path):
    """Every completion is cut and masked; the trainer's own log-probabilities are of nothing, and resume as that."""
    flags = (*SHORT, "--objective.overlong", "mask", "--rl.max-new-tokens", "1", "--objective.iterations", "2")
    flags += ("--objective.old-logprobs", "trainer")
    rl(tmp_path / "a", *flags)
    rl(tmp_path / "b", *flags, "--stop-step", "3")
    rl(tmp_path / "b", *flags, "--resume")
    assert differences(checkpoint(tmp_path / "a", 4), checkpoint(tmp_path / "b", 4)) == ""
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert len(list((tmp_path / "a" / "rollouts").iterdir())) == 2


MIXED = (
    "--objective.sft",
    "0.3",
    "--data.sources.0.path",
    "configs/debug/assets/reverse.jsonl",
    "--data.batch-size",
    "4",
)


@pytest.mark.parametrize("flags", [MIXED, (*MIXED, "--objective.iterations", "2"), (*MIXED, "--rl.max-lag", "1")])
def test_mixed_in_examples_resume_exactly(flags, tmp_path):
    rl(tmp_path / "a", *SHORT, *flags)
    rl(tmp_path / "b", *SHORT, *flags, "--stop-step", "1")
    rl(tmp_path / "b", *SHORT, *flags, "--resume")
    assert differences(checkpoint(tmp_path / "a", 4), checkpoint(tmp_path / "b", 4)) == ""
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_teacher_is_told_apart_by_its_tokenizer(tmp_path):
    rl(tmp_path / "other", *SHORT, "--model.name", "configs/debug/assets/tiny-llama", "--max-steps", "1")
    teacher = tmp_path / "other" / "weights"
    with pytest.raises(
        ModelError, match=rf"objective.teacher = '{teacher}' cannot be used: its tokenizer has other ids"
    ):
        rl(tmp_path / "run", *SHORT, "--objective.distill", "0.5", "--objective.teacher", str(teacher))
    with pytest.raises(ModelError, match="objective.reference = '/no/such' cannot be used"):
        rl(tmp_path / "run2", *SHORT, "--objective.kl", "0.5", "--objective.reference", "/no/such")


def test_distillation_from_a_teacher_resumes_exactly(tmp_path):
    rl(tmp_path / "teacher", *SHORT, "--max-steps", "1")
    flags = (*SHORT, "--objective.distill", "0.5", "--objective.teacher", str(tmp_path / "teacher" / "weights"))
    rl(tmp_path / "a", *flags)
    rl(tmp_path / "b", *flags, "--stop-step", "2")
    rl(tmp_path / "b", *flags, "--resume")
    assert differences(checkpoint(tmp_path / "a", 4), checkpoint(tmp_path / "b", 4)) == ""


def test_a_custom_loss_is_found_before_anything_is_generated_and_named_when_it_fails(tmp_path, monkeypatch):
    (tmp_path / "hostile_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = (*SHORT, "--objective.loss", "custom", "--objective.class-path")
    with pytest.raises(ConfigError, match="'hostile_losses:missing' cannot be imported"):
        rl(tmp_path / "missing", *custom, "hostile_losses:missing")
    assert not (tmp_path / "missing" / "metrics.jsonl").exists() or not read(tmp_path / "missing" / "metrics.jsonl")
    assert not (tmp_path / "missing" / "rollouts").exists()
    for name, what in [("wrong_signature", "TypeError"), ("impossible", r"hostile_losses.py:7: ZeroDivisionError")]:
        with pytest.raises(TrainingError, match=f"'hostile_losses:{name}' failed at .*{what}"):
            rl(tmp_path / name, *custom, f"hostile_losses:{name}")


def test_queued_groups_survive_another_lag_and_another_batch_size(tmp_path):
    """What waited at the save is trained on first, or drawn again where it is too old by now: no prompt is lost."""
    rl(tmp_path / "run", *SHORT, "--rl.max-lag", "1", "--stop-step", "2")
    rl(tmp_path / "run", *SHORT, "--rl.max-lag", "0", "--resume", "--stop-step", "3")
    other = ("--rl.prompts", "3", "--resume.override", "rl.prompts")
    rl(tmp_path / "run", *SHORT, *other, "--max-steps", "5", "--resume")
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    numbers = [sorted({row["number"] for row in read(path)}) for path in files]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [15, 16, 17]]
    assert all(row["staleness_max"] == 0 for row in metrics(tmp_path / "run")[2:])


@pytest.mark.parametrize("prompts", [1, 3])
def test_ranks_without_a_prompt_of_their_own_step_with_the_others(prompts, tmp_path):
    """Two ranks, fewer or an odd number of prompts: the same rollouts as on one, and an exact resume."""
    flags = (*SHORT, "--rl.prompts", str(prompts), "--rl.max-lag", "1", "--max-steps", "3")
    rl(tmp_path / "one", *flags)
    rl(tmp_path / "a", *flags, world_size=2)
    rl(tmp_path / "b", *flags, "--stop-step", "1", world_size=2)
    rl(tmp_path / "b", *flags, "--resume", world_size=2)
    assert differences(checkpoint(tmp_path / "a", 3), checkpoint(tmp_path / "b", 3)) == ""
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    first = [read(tmp_path / name / "rollouts" / "step_00000001.jsonl") for name in ("one", "a")]
    assert [row["completion"] for row in first[0]] == [row["completion"] for row in first[1]]
