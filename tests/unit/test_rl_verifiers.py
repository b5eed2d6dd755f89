"""Tasksets of the real package `verifiers`, where it is installed: prompts, rewards, splits, and what is refused."""

import sys
from pathlib import Path

import pytest

from support.runs import checkpoint, differences, metrics, read, rl
from trainer.config.rl import EnvConfig
from trainer.errors import ConfigError, DataError
from trainer.rl.envs import LoadedEnvironment, load_environments
from trainer.rl.scoring import Scorer
from trainer.rl.types import Prompt

ADDITION = Path(__file__).parents[1] / "support" / "verifiers_addition.py"


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.raises(ConfigError, match=r"envs\.0\.name needs the package verifiers.*pip install"):
        load_environments([EnvConfig(name="verifiers:gsm8k")], 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where tasksets lie as packages that are installed."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def load(folder: Path, name: str, *args: str, change: tuple[str, str] = ("", ""), **settings) -> LoadedEnvironment:
    text = ADDITION.read_text()
    assert change[0] in text
    (folder / f"{name.replace('-', '_')}.py").write_text(text.replace(*change) if change[0] else text)
    return load_environments([EnvConfig(name=f"verifiers:{name}", args=args, **settings)], 0)[0]


def judge(loaded: LoadedEnvironment, info: dict, *completions: str):
    with Scorer([loaded], 0) as scorer:
        prompt = Prompt(0, 0, 0, (), info)
        return scorer.score([(prompt, [{"role": "assistant", "content": text}]) for text in completions])


def test_prompts_and_rewards_are_those_of_the_task(folder):
    loaded = load(folder, "sums-one")
    messages, info = loaded.prompt(3, "train")
    assert [message["role"] for message in messages] == ["system", "user"]
    number = info["data"]["answer"] // 2
    assert messages[1]["content"] == f"What is {number} + {number}?"
    right, long, wrong, broken = judge(loaded, info, f" {2 * number}\n", f"00{2 * number}", "7", "seven")
    assert (right.reward, right.parts) == (3.0, {"exact_match": 1.0, "brief": 1.0, "words": 3.0})
    assert long.parts["exact_match"] == 1.0 and long.reward == 2.0 + long.parts["brief"]
    assert wrong.parts["exact_match"] == 0.0 and wrong.reward == 1.0
    assert broken.reward is None and "score() raised" in broken.error


def test_the_two_splits_share_no_task_and_come_round_again(folder):
    loaded = load(folder, "sums-two", "num_tasks=60")
    texts = {
        split: [loaded.prompt(index, split)[0][1]["content"] for index in range(60)] for split in ("train", "eval")
    }
    assert not set(texts["train"]) & set(texts["eval"])
    assert len(set(texts["train"])) + len(set(texts["eval"])) == 60
    again = load(folder, "sums-two", "num_tasks=60")
    assert [again.prompt(index, "eval")[0][1]["content"] for index in reversed(range(60))] == texts["eval"][::-1]


def test_arguments_are_the_tasksets_own(folder):
    loaded = load(folder, "sums-three", 'task={"tolerance": 1}')
    info = loaded.prompt(0, "train")[1]
    assert judge(loaded, info, str(info["data"]["answer"] + 1))[0].parts["exact_match"] == 1.0
    with pytest.raises(ConfigError, match=r'envs.0.args.*has no argument .num_task.*did you mean "num_tasks"'):
        load(folder, "sums-three", "num_task=3")
    with pytest.raises(ConfigError, match="num_tasks"):
        load(folder, "sums-three", 'num_tasks="many"')


NEEDS = [
    ("trace: vf.Trace) -> float:\n        return float(len(trace.last_reply) <", "looks into a sandbox"),
    ("    @vf.metric\n", "changes what goes to the model"),
    ("class AdditionTask(vf.Task[AdditionData, vf.State, AdditionTaskConfig]):\n", "needs a container"),
    ("class AdditionTask(vf.Task[AdditionData, vf.State, AdditionTaskConfig]):\n    @vf", "prepares a sandbox"),
    ("    def load(self):\n", "its tasks have tools"),
    ('__all__ = ["AdditionTaskset"]\n', "an environment of its own, Duel"),
]
INSTEAD = [
    "trace: vf.Trace, runtime: vf.Runtime) -> float:\n        return float(len(trace.last_reply) <",
    "    @vf.intercept\n",
    "class AdditionTask(vf.Task[AdditionData, vf.State, AdditionTaskConfig]):\n    NEEDS_CONTAINER = True\n\n",
    "class AdditionTask(vf.Task[AdditionData, vf.State, AdditionTaskConfig]):\n"
    "    async def setup(self, trace, runtime):\n        pass\n\n    @vf",
    "    @classmethod\n    def toolsets(cls, config):\n        return [object()]\n\n    def load(self):\n",
    '__all__ = ["AdditionTaskset", "Duel"]\n\n\nclass Duel(vf.Env[vf.EnvConfig]):\n'
    "    async def run(self, task, agents):\n        pass\n",
]


@pytest.mark.parametrize(("part", "why", "instead"), [(*need, new) for need, new in zip(NEEDS, INSTEAD, strict=True)])
def test_tasks_that_need_more_than_an_answer_are_refused_with_the_reason(part, why, instead, folder):
    with pytest.raises(ConfigError, match=f"cannot be trained on here: .*{why}"):
        load(folder, f"refused{abs(hash(why))}", change=(part, instead))


@pytest.mark.parametrize("name", ["harbor", "nemo_gym", "openenv", "textarena"])
def test_tasksets_that_come_with_the_package_need_more(name, folder):
    with pytest.raises(ConfigError, match=f"verifiers:{name} cannot be"):
        load_environments([EnvConfig(name=f"verifiers:{name}")], 0)


def test_a_single_task_that_needs_more_is_named(folder):
    loaded = load(folder, "sums-four", change=("answer=2 * number", 'answer=2 * number, image="ubuntu"'))
    with pytest.raises(DataError, match="task 0 of verifiers:sums-four needs a sandbox"):
        loaded.prompt(0, "train")
    with pytest.raises(ConfigError, match="verifiers:no-such-taskset cannot be used: ModuleNotFoundError"):
        load_environments([EnvConfig(name="verifiers:no-such-taskset")], 0)


@pytest.mark.slow
def test_a_run_on_its_tasks_resumes_exactly(folder):
    load(folder, "sums-run", change=("int(trace.last_reply)", "len(trace.last_reply)"))
    flags = (
        "--max-steps",
        "3",
        "--val.interval",
        "2",
        "--val.prompts",
        "2",
        "--ckpt.interval",
        "0",
        "--rl.samples",
        "2",
    )
    task = ("--envs.0.name", "verifiers:sums-run", "--envs.1.weight", "1e-3")
    rl(folder / "a", *flags, *task)
    assert {row["env"] for row in read(folder / "a" / "rollouts" / "step_00000001.jsonl")} == {"verifiers:sums-run"}
    rl(folder / "b", *flags, *task, "--stop-step", "1")
    rl(folder / "b", *flags, *task, "--resume")
    assert differences(checkpoint(folder / "a", 3), checkpoint(folder / "b", 3)) == ""
    assert metrics(folder / "a") == metrics(folder / "b")
