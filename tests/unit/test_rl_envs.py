"""Environments by name, their prompts and rewards, and the run's sequence of prompts."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.rl import EnvConfig
from trainer.core.rng import numpy_generator
from trainer.errors import ConfigError, DataError
from trainer.rl.builtin_envs import BUILT_IN, Arithmetic, ReverseText, Sort
from trainer.rl.envs import Environment, LoadedEnvironment, Score, load_environments
from trainer.rl.prompts import PromptSequence

USER = "support.user_envs"


def load(name: str, *args: str, seed: int = 0, **settings) -> LoadedEnvironment:
    return load_environments([EnvConfig(name=name, args=args, **settings)], seed)[0]


def reward_of(loaded: LoadedEnvironment, info, answer: str) -> float:
    score = loaded.environment.score(info, answer)
    return score.reward if isinstance(score, Score) else score


def content(loaded: LoadedEnvironment, index: int, split) -> str:
    return loaded.prompt(index, split)[0][-1]["content"]


# --- the environments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_prompts_are_a_function_of_seed_split_and_index(name):
    first, again, other = load(name, seed=3), load(name, seed=3), load(name, seed=4)
    for split in ("train", "eval"):
        prompts = [first.prompt(index, split) for index in range(30)]
        assert [again.prompt(index, split) for index in reversed(range(30))][::-1] == prompts
        assert [other.prompt(index, split) for index in range(30)] != prompts
        assert all(json.loads(json.dumps(info)) == info for _, info in prompts)


@pytest.mark.parametrize("name, args", [(name, ()) for name in BUILT_IN] + [("reverse-text", ("max_length=3",))])
def test_held_out_prompts_never_occur_in_training_whatever_the_seed(name, args):
    train = {content(load(name, *args, seed=seed), index, "train") for seed in (0, 1) for index in range(600)}
    held_out = {content(load(name, *args, seed=seed), index, "eval") for seed in (0, 2) for index in range(60)}
    assert not train & held_out
    assert len(held_out) > 60


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_answer_has_reward_1_and_another_less(name):
    loaded = load(name)
    for index in range(50):
        _, info = loaded.prompt(index, "train")
        rewards = [loaded.environment.score(info, text) for text in (info["answer"], f" {info['answer']}\n", "", "?")]
        numbers = [getattr(reward, "reward", reward) for reward in rewards]
        assert numbers[:2] == [1.0, 1.0]
        assert max(numbers[2:]) < 1.0


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("cba", 1.0),
        ("cb", 2 / 3),
        ("cbaa", 3 / 4),
        ("cab", 1 / 3),
        ("abc", 1 / 3),
        ("bac", 0.0),
        ("", 0.0),
        ("cba" * 1000, 3 / 3000),
    ],
)
def test_reverse_text_rewards_the_share_of_right_places(completion, reward):
    info = {"answer": "cba"}
    score = ReverseText().score(info, completion)
    assert score.reward == reward
    assert score.parts == {"exact": float(reward == 1)}
    assert ReverseText(exact=True).score(info, completion).reward == float(reward == 1)


def test_lengths_are_those_asked_for():
    lengths = Counter(
        len(content(load("reverse-text"), index, "train").removeprefix("Reverse: ")) for index in range(400)
    )
    assert sorted(lengths) == [3, 4, 5, 6]
    assert min(lengths.values()) > 60


def test_sort_sorts_numbers_not_texts():
    text, info = Sort(3, 3, largest=200).sample(np.random.default_rng(0))
    numbers = [int(number) for number in text.removeprefix("Sort: ").split()]
    assert info["answer"].split() == [str(number) for number in sorted(numbers)]
    assert Sort().score({"answer": "7 41 93"}, "7 41 9").reward == 2 / 3


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-*"])
def test_arithmetic_says_what_python_says(operators):
    environment = Arithmetic(terms=4, largest=30, operators=operators)
    for index in range(50):
        text, info = environment.sample(numpy_generator(0, index))
        assert info["answer"] == str(eval(text.removesuffix(" =")))  # the text is our own


@pytest.mark.parametrize(
    "completion, right",
    [("16", 1), ("12 + 4 = 16", 1), ("016", 1), ("16 or 17", 0), ("-16", 0), ("16" * 5000, 0), ("", 0), ("sixteen", 0)],
)
def test_arithmetic_takes_the_last_integer(completion, right):
    assert Arithmetic().score({"answer": "16"}, completion) == right


def test_too_few_different_prompts_is_an_error_instead_of_an_endless_search():
    class Same(Environment):
        def sample(self, rng):
            return "always this", {}

    found = []
    for split in ("train", "eval"):
        try:
            found.append(Same().prompt(0, split))
        except DataError as error:
            assert "too few different prompts" in str(error)
    assert len(found) == 1  # it belongs to exactly one of the splits


# --- by name ------------------------------------------------------------------------------------------------------------


def test_a_users_environment_by_import_path_and_by_file(tmp_path: Path):
    by_path = load(f"{USER}:Double", "largest=9", system="Be brief.")
    assert not by_path.built_in and not by_path.multi_turn
    messages, info = by_path.prompt(0, "train")
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert int(info["answer"]) <= 18
    file = tmp_path / "my_env.py"
    file.write_text(Path(sys.modules[type(by_path.environment).__module__].__file__ or "").read_text())
    by_file = load(f"{file}:Double", "largest=9", system="Be brief.")
    assert by_file.prompt(0, "train") == (messages, info)
    assert load(f"{USER}:Guess").multi_turn


@pytest.mark.parametrize(
    "name, args, expected",
    [
        ("reverse-txt", (), ["envs.0.name", "'reverse-txt'", 'did you mean "reverse-text"?']),
        ("chess", (), ["reverse-text, arithmetic, sort", "package.module:Class"]),
        ("reverse-text", ("min_lenght=3",), ["envs.0.args", "min_lenght", 'did you mean "min_length"?']),
        ("reverse-text", ("min_length",), ["envs.0.args", "not name=value"]),
        ("reverse-text", ("min_length=x",), ["envs.0.args", "not JSON"]),
        ("reverse-text", ("min_length=3", "min_length=4"), ["given twice"]),
        ("reverse-text", ("min_length=7",), ["between 7 and 6"]),
        ("reverse-text", ('min_length="a"',), ["envs.0.args", "ReverseText"]),
        ("sort", ("largest=0",), ["0"]),
        ("arithmetic", ('operators="+/"',), ["choose from"]),
        ("no.such.module:Env", (), ["cannot be imported", "ModuleNotFoundError"]),
        ("reasoning_gym_:chess", (), ["cannot be imported", 'did you mean "reasoning-gym:"?']),
        ("no/such/file.py:Env", (), ["there is no file"]),
        (f"{USER}:Duble", (), ["does not exist", 'did you mean "Double"?']),
        (f"{USER}:NotAnEnvironment", (), ["no subclass of trainer.rl.envs.Environment"]),
        (f"{USER}:BadPrompt", (), ["BadPrompt", "what"]),
        ("verifiers:no-such-taskset", (), ["envs.0.name", "verifiers"]),
    ],
)
def test_what_does_not_exist_is_told_with_what_is_near(name, args, expected):
    with pytest.raises(ConfigError) as caught:
        load(name, *args)
    assert [part for part in expected if part not in str(caught.value)] == []


def test_no_environment_is_an_error():
    with pytest.raises(ConfigError, match="envs"):
        load_environments([], 0)


def test_reasoning_gym_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"exact-trainer\[envs\]"):
        load("reasoning-gym:chain_sum")


def test_reasoning_gym_tasks():
    loaded = load("reasoning-gym:chain_sum", "max_terms=3", 'answer_tag="answer"')
    train = {content(loaded, index, "train") for index in range(100)}
    assert not train & {content(loaded, index, "eval") for index in range(20)}
    _, info = loaded.prompt(0, "train")
    scores = [
        loaded.environment.score(info, text)
        for text in (f"so <answer> {info['answer']}</answer>.", info["answer"], "<answer>?</answer>")
    ]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match='did you mean "chain_sum"'):
        load("reasoning-gym:chain_sums")
    with pytest.raises(ConfigError, match='did you mean "max_terms"'):
        load("reasoning-gym:chain_sum", "max_term=3")
    with pytest.raises(ConfigError, match="does not take"):
        load("reasoning-gym:composite", 'datasets=["chain_sum"]')


def test_tasks_of_reasoning_gym_can_be_composed():
    parts = '[{"name": "chain_sum", "config": {"max_terms": 2}}, {"name": "acre", "weight": 3}]'
    loaded = load("reasoning-gym:composite", f"datasets={parts}")
    seen = [loaded.prompt(number, "train") for number in range(12)]
    sums = ["State the final answer" in messages[-1]["content"] for messages, _ in seen]
    assert 0 < sum(sums) < len(sums)
    assert all(loaded.environment.score(info, info["answer"]).reward == 1.0 for _, info in seen)
    with pytest.raises(ConfigError, match="at least one dataset"):
        load("reasoning-gym:composite")


@pytest.mark.parametrize(
    "task",
    ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24", "countdown"]
    + ["simple_integration", "intermediate_integration", "polynomial_multiplication"],
)
def test_nothing_executes_what_a_model_wrote(task, tmp_path: Path):
    """These scorers call `eval`, or sympy's parser, which does."""
    loaded = load(f"reasoning-gym:{task}")
    _, info = loaded.prompt(0, "train")
    ran = tmp_path / "ran"
    for answer in (f"[open({str(ran)!r}, 'w').close()]", f"__import__('pathlib').Path({str(ran)!r}).touch()"):
        assert reward_of(loaded, info, answer) == 0.0
    assert not ran.exists()


def test_answers_that_need_no_code_are_read_as_before():
    import sympy

    from trainer.rl.answers import expression, literal

    assert [literal(text) for text in ("[1, 'a', [2.5]]", " -3 ", "(0x10 + 2) << 1", "7 // 2")] == [
        [1, "a", [2.5]],
        -3,
        36,
        3,
    ]
    x = sympy.Symbol("x")
    assert expression("2*x**2 + sqrt(8)*sin(x)/3 - log(x) + C") == (
        2 * x**2 + sympy.sqrt(8) * sympy.sin(x) / 3 - sympy.log(x) + sympy.Symbol("C")
    )
    assert expression("(30 - 5) * 3.5") == 87.5
    for text in ("x.is_real", "'x'", "x[0]", "eval(x)", "sympify(x)", "__name__", "lambda: x", "f(*x)", "Symbol(x)"):
        with pytest.raises((ValueError, SyntaxError)):
            expression(text)
        with pytest.raises((ValueError, SyntaxError)):
            literal(f"len({text})")


HASH_DEPENDENT = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
SHOW = """
import json, sys
from trainer.config.rl import EnvConfig
from trainer.rl.envs import load_environment
loaded = [load_environment(EnvConfig(name=f"reasoning-gym:{task}"), 0, 0) for task in sys.argv[1:]]
print(json.dumps([[one.prompt(index, "train") for index in range(3)] for one in loaded]))
"""


def test_tasks_make_the_same_items_in_every_process():
    """They walk over sets of texts, whose order is a process's own: that of a rank, of a resume, of the scoring process."""
    seen = [
        subprocess.run(
            [sys.executable, "-c", SHOW, *HASH_DEPENDENT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    ]
    assert seen[0] == seen[1] == seen[2] and seen[0].count("item") == 3 * len(HASH_DEPENDENT)


ANSWERLESS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose items bring no answer of their own; a scorer judges the model's."""


@pytest.mark.slow
def test_every_task_of_reasoning_gym_makes_prompts_and_knows_its_answer():
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    names = sorted(set(DATASETS) - {"composite"})  # which is made of others
    failed = {}
    for name in names:
        try:
            loaded = load(f"reasoning-gym:{name}")
            _, info = loaded.prompt(0, "train")
            right = loaded.environment.score(info, info["answer"])
            assert isinstance(right, Score)
            assert right.reward == right.parts["partial"] == 1.0 or name in ANSWERLESS, right
            assert name not in ANSWERLESS or info["answer"] == "None"
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    assert len(names) > 100 and failed == {}


@pytest.mark.parametrize(
    "what, expected", [("raise", "KeyError"), ("set", "set"), ("messages", "role"), ("list", "dict")]
)
def test_a_bad_prompt_names_the_environment(what, expected):
    loaded = load(f"{USER}:BadPrompt", f'what="{what}"')
    with pytest.raises(DataError, match=expected) as caught:
        loaded.prompt(5, "train")
    assert "BadPrompt" in str(caught.value) and "prompt(5, 'train')" in str(caught.value)


def test_environments_and_their_worker_need_no_torch():
    code = (
        "import sys, trainer.rl.score_worker, trainer.rl.scoring, trainer.rl.prompts, trainer.rl.builtin_envs;"
        "import trainer.cli.rollouts, trainer.rl.records; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_the_environment_in_the_documentation_works(tmp_path: Path):
    text = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_env.py").write_text(code)
    loaded = load(f"{tmp_path / 'my_env.py'}:Double", "largest=20")
    question, info = content(loaded, 0, "train"), loaded.prompt(0, "train")[1]
    assert question.startswith("What is twice") and loaded.environment.score(info, info["answer"]) == 1.0


# --- the sequence -------------------------------------------------------------------------------------------------------


def sequence(*configs: EnvConfig, seed: int = 0) -> PromptSequence:
    return PromptSequence(load_environments(configs, seed), seed)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_every_prompt_comes_once_before_any_comes_again_and_shares_hold(sizes, weights, seed):
    made = sequence(
        *(EnvConfig(name="sort", prompts=size, weight=w) for size, w in zip(sizes, weights, strict=False)), seed=seed
    )
    places = [made.place(number) for number in range(1500)]
    total = sum(weights[: len(sizes)])
    for position, size in enumerate(sizes):
        own = [index for env, index in places if env == position]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))
        for end in (100, 700, 1500):
            share = sum(env == position for env, _ in places[:end])
            assert abs(share - end * weights[position] / total) <= len(sizes) + 1


def test_access_is_random_and_the_same_for_everybody():
    configs = [EnvConfig(name="sort", prompts=7, weight=3), EnvConfig(name="reverse-text", prompts=50)]
    forward = sequence(*configs)
    expected = [forward.prompt(number) for number in range(600)]
    numbers = np.random.default_rng(0).permutation(600).tolist()
    other = sequence(*configs)
    assert {number: other.prompt(number) for number in numbers} == dict(enumerate(expected))
    assert sequence(*configs).prompt(599) == expected[599]
    assert [prompt.number for prompt in expected] == list(range(600))
    assert [prompt.id for prompt in expected[:4]] == [f"{p.env}:{p.index}" for p in expected[:4]]
    assert Counter(prompt.env for prompt in expected[:16]) == {0: 12, 1: 4}


def test_epochs_have_different_orders_and_so_have_seeds():
    config = EnvConfig(name="sort", prompts=30)
    orders = {
        tuple(sequence(config, seed=seed).place(n)[1] for n in range(s, s + 30)) for seed in (0, 1) for s in (0, 30)
    }
    assert len(orders) == 4


def test_a_rare_environment_gets_its_turn():
    made = sequence(EnvConfig(name="sort", weight=1000), EnvConfig(name="reverse-text"))
    assert sum(made.place(number)[0] for number in range(1001 * 3)) == 3


def test_held_out_prompts_are_numbered_and_not_in_the_sequence():
    made = sequence(EnvConfig(name="sort", prompts=200), EnvConfig(name="reverse-text", prompts=200))
    held_out = made.held_out(10)
    assert [(prompt.number, prompt.env, prompt.index) for prompt in held_out[9:11]] == [(9, 0, 9), (10, 1, 0)]
    seen = {prompt.messages[0]["content"] for prompt in map(made.prompt, range(400))}
    assert len(held_out) == 20 and not seen & {prompt.messages[0]["content"] for prompt in held_out}


def test_the_fingerprint_is_json_and_names_what_the_sequence_depends_on():
    config = EnvConfig(name="sort", args=("largest=9",), prompts=5, weight=2)
    made = sequence(config, seed=3)
    assert json.loads(json.dumps(made.fingerprint)) == made.fingerprint
    assert sequence(config, seed=3).fingerprint == made.fingerprint
    changes = [("args", ("largest=8",)), ("prompts", 6), ("weight", 3.0), ("system", "x")]
    changed = [sequence(config.model_copy(update={key: value}), seed=3).fingerprint for key, value in changes]
    assert all(other != made.fingerprint for other in changed)
    harmless = config.model_copy(update={"score_seconds": 1.0, "max_reward": 0.5})
    assert sequence(harmless, seed=3).fingerprint == made.fingerprint
