"""Whole runs of what a config of reinforcement learning can ask for: it takes effect, shows in the metrics, and resumes."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from support import runs
from support.fresh import run_fresh
from support.runs import checkpoint, differences, metrics, read, rl, sft
from trainer.rl.rollout import LocalEngine

SHORT = ("--val.interval", "0", "--ckpt.interval", "0", "--ckpt.no-export-weights")
LETTERS = ("--model.name", "configs/debug/assets/letters-llama")
EXAMPLES = ("--data.sources.0.path", "configs/debug/assets/reverse.jsonl")


def rollouts(run_dir: Path) -> list[dict]:
    return [row for path in sorted((run_dir / "rollouts").iterdir()) for row in read(path)]


def environment(folder: Path, body: str, *flags: str) -> tuple[str, ...]:
    """Returns the flags of a run whose only environment is the class with this body, in a file of its own."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    (folder / "own.py").write_text(
        f"import os, time\nfrom trainer.rl.envs import Environment\n\nclass Own(Environment):\n{lines}"
    )
    names = [word for n in (0, 1) for word in (f"--envs.{n}.name", f"{folder}/own.py:Own")]
    return (*names, *(word.replace("envs.N", f"envs.{n}") for n in (0, 1) for word in flags))


def interrupted(run_dir: Path, *flags: str, at: int) -> None:
    rl(run_dir, *flags, "--stop-step", str(at))
    rl(run_dir, *flags, "--resume")


def check_same(a: Path, b: Path, last: int) -> None:
    assert differences(checkpoint(a, last), checkpoint(b, last)) == ""
    assert metrics(a) == metrics(b)
    assert rollouts(a) == rollouts(b)


# --- what is to be seen -------------------------------------------------------------------------------------------------

SEEN = {
    "reward": ("reward", "reward_std", "reward/exact"),
    "lengths": ("completion_tokens", "completion_tokens_max", "turns", "truncated_share"),
    "nothing to learn": ("equal_share", "unscored", "groups", "stale"),
    "the policy": ("entropy", "kl", "ratio", "ratio_deviation_max", "clip_low", "clip_high", "masked"),
    "engine and trainer": ("mismatch", "mismatch_max", "staleness", "staleness_max"),
    "speed": (
        "rollout_seconds",
        "rollout_wait_seconds",
        "rollout_tokens_per_second",
        "tokens_per_second",
        "step_seconds",
    ),
    "held-out prompts": ("eval_reward", "eval/avg@3", "eval/pass@1", "eval/pass@3", "eval/truncated", "eval_seconds"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("seen") / "run"
    flags = ("--envs.1.name", "reverse-text", "--rl.max-lag", "1", "--objective.kl", "0.1")
    val = ("--val.interval", "2", "--val.samples", "3", "--val.temperature", "1", "--val.pass-reward", "0.1")
    rl(run_dir, "--max-steps", "5", "--val.prompts", "4", *flags, *val)
    return run_dir


def test_everything_is_in_the_metrics(seen):
    rows = read(seen / "metrics.jsonl")
    everything = {key for row in rows for key in row}
    assert {key: set(keys) - everything for key, keys in SEEN.items()} == dict.fromkeys(SEEN, set())
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert 0 < row["entropy"] <= math.log(100) and row["rollout_tokens_per_second"] > 0
        assert row["staleness_max"] == (row["step"] > 1) and row["mismatch_max"] < 1


def test_held_out_prompts_are_measured_every_n_steps_and_at_both_ends(seen):
    rows = {row["step"]: row for row in metrics(seen) if "eval_reward" in row}
    assert [*rows] == [0, 2, 4, 5]
    for row in rows.values():
        assert row["eval_reward"] == row["eval/avg@3"]
        assert row["eval/pass@1"] <= row["eval/pass@3"] <= 1
        assert row["eval/avg@3"] == pytest.approx(
            (row["eval/reverse-text/avg@3"] + row["eval/vowels.py:Vowels/avg@3"]) / 2
        )
    assert any(row["eval/pass@1"] < row["eval/pass@3"] for row in rows.values())


def test_samples_can_be_read_and_rewards_drawn(seen, capsys):
    from trainer.cli import plot
    from trainer.cli import rollouts as show

    assert show.main(["show", str(seen), "--step", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in shown] == [2] * 16
    first = next(row for row in shown if row["env"] == "reverse-text")
    assert (
        first["prompt"].startswith("Reverse: ") and first["parts"].keys() == {"exact"} and first["versions"] == [0, 0]
    )
    assert show.main(["show", str(seen), "--best"]) == 0
    assert "reverse-text" in capsys.readouterr().out
    assert plot.main([str(seen), "--keys", "reward,eval_reward"]) == 0
    assert (seen / "plots" / "metrics.png").stat().st_size > 10_000


# --- environments -------------------------------------------------------------------------------------------------------


def test_environments_are_mixed_by_their_weights(tmp_path):
    weights = ("--envs.0.name", "sort", "--envs.0.weight", "3", "--envs.1.weight", "1")
    rl(tmp_path / "run", *SHORT, *weights, "--max-steps", "4")
    prompts = {row["number"]: row["env"] for row in rollouts(tmp_path / "run")}
    assert Counter(prompts.values()) == {"sort": 12, "arithmetic": 4}


FILTERS = (
    "--envs.0.min-reward",
    "0.1",
    "--envs.0.max-reward",
    "0.2",
    "--rl.max-resamples",
    "8",
    "--envs.1.weight",
    "1e-3",
)


@pytest.mark.parametrize("lag", ["0", "1"])
def test_prompts_that_are_too_hard_or_too_easy_are_replaced_and_counted(lag, tmp_path):
    flags = (*SHORT, *FILTERS, "--max-steps", "4", "--rl.max-lag", lag)
    rl(tmp_path / "a", *flags)
    rewards: dict[int, list[float]] = {}
    for row in rollouts(tmp_path / "a"):
        rewards.setdefault(row["number"], []).append(row["reward"])
    assert all(0.1 <= sum(own) / len(own) <= 0.2 for own in rewards.values())
    left_out = [
        sum(row.get(f"filtered/{why}", 0) for row in metrics(tmp_path / "a")) for why in ("too_hard", "too_easy")
    ]
    assert min(left_out) > 0
    if lag == "0":  # else others wait in the queue
        assert len(rewards) + sum(left_out) == max(rewards) + 1
    interrupted(tmp_path / "b", *flags, at=2)
    check_same(tmp_path / "a", tmp_path / "b", 4)


HOSTILE = """
def prompt(self, index, split):
    return f"number {index}", {"index": index}

def score(self, info, completion):
    match sum(map(ord, completion)) % 12:
        case 0:
            raise ValueError("no such luck")
        case 1:
            return float("nan")
        case 2:
            time.sleep(3600)
        case 3:
            os._exit(7)
    return len(set(completion)) / 100
"""
WORDS = ("raised ValueError: no such luck", "the reward is nan", "gave no answer within 2 s", "exit code 7")


def test_a_reward_function_that_fails_costs_its_samples_and_the_run_goes_on(tmp_path):
    """Some raise, some return NaN, some hang, some end their process: each is told, counted and left out; and resumes."""
    own = environment(tmp_path, HOSTILE, "--envs.N.score-seconds", "2")
    flags = (*SHORT, *own, "--max-steps", "3", "--rl.prompts", "3")
    rl(tmp_path / "a", *flags)
    rows = rollouts(tmp_path / "a")
    errors = [row["error"] for row in rows if row["reward"] is None]
    assert all(any(words in error for error in errors) for words in WORDS)
    assert all("(envs." in error and "own.py:Own" in error and "prompt" in error for error in errors)
    assert sum(row["unscored"] for row in metrics(tmp_path / "a")) == len(errors) < len(rows) / 2
    assert all(row["advantage"] in (None, 0.0) for row in rows if row["reward"] is None)
    interrupted(tmp_path / "b", *flags, at=1)
    check_same(tmp_path / "a", tmp_path / "b", 3)


HANGING = """
def sample(self, rng):
    return f"say {rng.integers(1000)}", {}

calls = 0  # in this scoring process; the next one begins anew

def score(self, info, completion):
    self.calls += 1
    if os.environ["RANK"] == "1" and self.calls == 2:
        time.sleep(3600)
    return len(set(completion)) / 100
"""


@pytest.mark.slow  # 30 s of waiting for what hangs
def test_a_rank_on_which_scoring_hangs_again_and_again_does_not_outlast_the_others(tmp_path):
    """Six hangs of 10 s each would take 60 s, and the other rank waits for 40."""
    own = environment(tmp_path, HANGING, "--envs.N.score-seconds", "10")
    flags = (*SHORT, *own, "--max-steps", "1", "--rl.prompts", "2", "--rl.samples", "12")
    argv = [*runs.DEBUG_RL, "--output-dir", str(tmp_path / "a"), *flags]
    argv += ["--rl.score-processes", "1", "--runtime.timeout-seconds", "40"]
    assert run_fresh(runs._rl, 2, argv) == [0, 0]
    errors = [row["error"] for row in rollouts(tmp_path / "a") if row["reward"] is None]
    assert sum("gave no answer within 10 s" in error for error in errors) == 2
    assert sum("was not called: scoring its batch has taken 20 s" in error for error in errors) == 8
    assert metrics(tmp_path / "a")[-1]["unscored"] == len(errors) == 10


CONVERSATION = """
tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

def prompt(self, index, split):
    return f"look at {index}", {"index": index}

def step(self, info, messages):
    turns = sum(message["role"] == "assistant" for message in messages)
    return None if turns == 3 else [{"role": "tool", "content": f"seen {turns}"}]

def score_conversation(self, info, messages):
    return sum(len(m["content"]) for m in messages if m["role"] == "assistant") / 100
"""


@pytest.mark.parametrize("lag", ["0", "1"])
def test_conversations_with_tools_train_the_models_turns_alone(lag, tmp_path, monkeypatch):
    from trainer.rl import batches

    laid, lay_out = [], batches.lay_out
    monkeypatch.setattr(batches, "lay_out", lambda *args, **named: laid.append(lay_out(*args, **named)) or laid[-1])
    stops = [word for letter in "aeioutnrsldc" for word in ("--rl.stop", letter)]
    own = environment(tmp_path, CONVERSATION)
    flags = (
        *SHORT,
        *own,
        "--max-steps",
        "3",
        "--rl.max-new-tokens",
        "20",
        "--data.seq-len",
        "128",
        "--rl.max-lag",
        lag,
    )
    rl(tmp_path / "a", *flags, *stops)
    rows = rollouts(tmp_path / "a")
    assert {row["turns"] for row in rows} >= {2, 3} and all(
        "seen 1" in row["completion"] for row in rows if row["turns"] > 1
    )
    trained = sum(int((micro.weights > 0).sum()) for batch in laid for micro in batch.micro_batches)
    assert trained == sum(row["length_tokens"] for row in rows)  # without the tools' words
    assert sum(len(row["completion"]) for row in rows) > trained
    assert all(row["ratio_deviation_max"] < 1e-4 for row in metrics(tmp_path / "a") if lag == "0")
    interrupted(tmp_path / "b", *flags, *stops, at=2)
    check_same(tmp_path / "a", tmp_path / "b", 3)


def test_a_task_of_reasoning_gym_by_its_name(tmp_path):
    task = ("--envs.0.name", "reasoning-gym:chain_sum", "--envs.0.args", '["partial=true"]', "--envs.1.weight", "1e-3")
    flags = (*SHORT, *task, "--max-steps", "3", "--data.seq-len", "128")
    rl(tmp_path / "a", *flags)
    assert {row["env"] for row in rollouts(tmp_path / "a")} == {"reasoning-gym:chain_sum"}
    assert all("reward/partial" in row for row in metrics(tmp_path / "a"))
    interrupted(tmp_path / "b", *flags, at=1)
    check_same(tmp_path / "a", tmp_path / "b", 3)


# --- objectives ---------------------------------------------------------------------------------------------------------

PAIRS = [
    ("grpo", "ppo", "token"),
    ("dr_grpo", "gspo", "constant"),
    ("rloo", "cispo", "sequence"),
    ("reinforce_pp", "dppo", "token"),
    ("maxrl", "ipo", "token"),
    ("rloo", "reinforce", "sequence"),
]


@pytest.mark.parametrize("advantage, loss, aggregate", PAIRS)
def test_every_advantage_loss_and_aggregate_trains(advantage, loss, aggregate, tmp_path):
    flags = ("--objective.advantage", advantage, "--objective.loss", loss, "--objective.aggregate", aggregate)
    rl(tmp_path / "run", *SHORT, *flags, "--max-steps", "3")
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(
        math.isfinite(row["loss"]) and row["grad_norm"] > 0 and row["ratio_deviation_max"] < 1e-4 for row in rows
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_keeps_the_policy_near_its_reference(estimator, tmp_path):
    flags = (*SHORT, "--max-steps", "8", "--optim.lr", "3e-3", "--objective.kl-estimator", estimator)
    far = []
    for weight in ("1e-9", "5"):
        rl(tmp_path / weight, *flags, "--objective.kl", weight)
        far.append(abs(metrics(tmp_path / weight)[-1]["kl"]))
        assert abs(metrics(tmp_path / weight)[0]["kl"]) < 1e-4  # the policy is its reference yet
    assert far[1] < far[0] / 2


NOTHING = """
def sample(self, rng):
    return f"say {rng.integers(1000)}", {}

def score(self, info, completion):
    return 0.35
"""


def test_distillation_pulls_the_policy_to_its_teacher(tmp_path):
    """Rewards say nothing; the divergence from the teacher is measured with a weight that does nothing."""
    sft(tmp_path / "teacher", *LETTERS, *EXAMPLES, "--max-steps", "8", "--val.interval", "0", "--optim.lr", "3e-3")
    teacher = str(tmp_path / "teacher" / "weights")
    flags = (*SHORT, *environment(tmp_path, NOTHING), "--max-steps", "12", "--optim.lr", "3e-3")
    measured = ("--objective.kl", "1e-9", "--objective.reference", teacher)
    rl(tmp_path / "run", *flags, *measured, "--objective.distill", "1", "--objective.teacher", teacher)
    divergence = [row["kl"] for row in metrics(tmp_path / "run")]
    assert all(row["equal_share"] == 1 for row in metrics(tmp_path / "run"))
    assert divergence[-1] < divergence[0] / 2


def test_a_mixed_in_loss_learns_its_examples(tmp_path):
    """Rewards say nothing, so the loss of the step is that of the examples."""
    own = environment(tmp_path, NOTHING)
    flags = (*SHORT, *own, *EXAMPLES, "--data.batch-size", "8", "--objective.sft", "1", "--max-steps", "12")
    rl(tmp_path / "run", *flags, "--optim.lr", "3e-3")
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(100), rel=0.05)  # of a model with random weights
    assert losses[-1] < losses[0] - 0.5


CUSTOM = """
from trainer.rl.objective import PolicyLoss


def own_reinforce(tokens, config):
    return PolicyLoss(-tokens.advantages * tokens.logprobs)
"""


def test_a_custom_loss_by_import_path_is_the_loss(tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = (*SHORT, "--max-steps", "3", "--objective.loss")
    rl(tmp_path / "known", *flags, "reinforce")
    custom = (*flags, "custom", "--objective.class-path", "own_losses:own_reinforce")
    interrupted(tmp_path / "own", *custom, at=1)
    check_same(tmp_path / "known", tmp_path / "own", 3)
    rl(tmp_path / "other", *flags, "ppo", "--objective.advantage", "dr_grpo")
    assert metrics(tmp_path / "other") != metrics(tmp_path / "known")


# --- engine and asynchrony ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", ["0", "1"])
def test_j8_the_first_rollout_after_a_resume_is_by_the_resumed_weights(lag, tmp_path, monkeypatch):
    served: list[tuple[int | None, float]] = []
    generate = LocalEngine.generate

    def watched(self, requests, sampling):
        served.append((self._version, float(self._model.embedding.weight.detach().double().sum())))
        return generate(self, requests, sampling)

    monkeypatch.setattr(LocalEngine, "generate", watched)
    flags = (*SHORT, "--rl.max-lag", lag, "--max-steps", "7")
    rl(tmp_path / "whole", *flags)
    whole = dict(served) if lag == "0" else {version: None for version, _ in served}
    served.clear()
    rl(tmp_path / "run", *flags, "--stop-step", "5")
    served.clear()
    rl(tmp_path / "run", *flags, "--resume")
    assert served[0][0] == 5
    if lag == "0":  # else the optimizer may be at work while a thread looks
        assert served == [(version, whole[version]) for version in (5, 6)]
    check_same(tmp_path / "whole", tmp_path / "run", 7)


@pytest.mark.parametrize("steps, lag", [("1", "1"), ("2", "5"), ("1", "3")])
def test_j8_a_run_that_is_shorter_than_its_lag_ends(steps, lag, tmp_path):
    flags = (*SHORT, "--rl.max-lag", lag, "--max-steps", steps)
    rl(tmp_path / "run", *flags)
    assert metrics(tmp_path / "run")[-1]["step"] == int(steps)
    rl(tmp_path / "run", *flags[:-1], "3", "--resume")
    numbers = {row["number"] for row in rollouts(tmp_path / "run")}
    assert numbers == set(range(12))


OFFLOADS = [("optimizer", "adamw"), ("optimizer", "muon"), ("full", "muon")]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode, optimizer", OFFLOADS)
def test_offload_and_optimizers_resume_exactly_on_one_rank_and_two(mode, optimizer, world_size, tmp_path):
    flags = (*SHORT, "--max-steps", "6", "--model.offload", mode, "--optim.type", optimizer)
    rl(tmp_path / "a", *flags, world_size=world_size)
    rl(tmp_path / "b", *flags, "--stop-step", "3", world_size=world_size)
    rl(tmp_path / "b", *flags, "--resume", world_size=world_size)
    check_same(tmp_path / "a", tmp_path / "b", 6)


# --- trainer check resume -----------------------------------------------------------------------------------------------


def check(*flags: str) -> tuple[int, dict, str]:
    done = runs.command("check", "resume", *runs.DEBUG_RL, *flags, "--json", check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stdout + done.stderr


def test_check_resume_says_exact_of_the_debug_config():
    code, found, text = check("--steps", "6")
    assert (code, found.get("verdict")) == (0, "exact"), text
    assert found["resumed_from"] == 2 and found["values"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--signal", "TERM", "--nproc", "2"),
        ("--signal", "KILL", "--nproc", "2", "--rl.max-lag", "1"),
        ("--signal", "TERM", "--ckpt.on-signal", "now", "--data.micro-batch-size", "1", "--rl.max-lag", "1"),
        ("--signal", "KILL", "--nproc", "2", "--parallel.dp-replicate", "2", "--ckpt.async"),
        ("--signal", "KILL", "--objective.iterations", "2", "--objective.old-logprobs", "trainer"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_check_resume_under_signals_and_ranks(flags):
    code, found, text = check("--steps", "8", *flags)
    assert (code, found.get("verdict")) == (0, "exact"), text
