"""Rollouts with a scripted engine and real tokenizers: whose tokens they are, where they end, what is recorded."""

import atexit
import json
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from support import tokenizers as templates
from support.scripted import ScriptedGenerator
from support.tokenizers import byte_tokenizer
from trainer.config.rl import EnvConfig, RLSection
from trainer.core.rng import derive_seed
from trainer.errors import ConfigError, DataError, TrainingError
from trainer.rl.envs import load_environments
from trainer.rl.episodes import evaluate_groups, rollouts
from trainer.rl.rendering import Renderer, stop_ids
from trainer.rl.scoring import Scorer
from trainer.rl.types import Group, Prompt, Request, Rollout, Sampling

USER = "support.user_envs"
GUESS = EnvConfig(name=f"{USER}:Guess")
ALL_TEMPLATES = ["QWEN", "QWEN3", "LLAMA3", "MARKED", "MISTRAL", "R1", "PHI3", "PLAIN", None]


def template_of(name: str | None) -> str | None:
    return None if name is None else getattr(templates, name)


@cache
def scorer_of(configs: tuple[EnvConfig, ...]) -> Scorer:
    """One scoring process for each set of environments, shared by the tests; it ends with pytest."""
    scorer = Scorer(load_environments(configs, 0), 0)
    atexit.register(scorer.close)
    return scorer


class Setup:
    """Everything but the script."""

    def __init__(self, script, *configs: EnvConfig, template: str | None = templates.QWEN, **settings):
        self.tokenizer = byte_tokenizer(template)
        self.renderer = Renderer(self.tokenizer)
        self.scorer = scorer_of(configs)
        self.config = RLSection(**settings)
        self.sampling = Sampling(1.0, stop_ids=stop_ids(self.tokenizer))
        self.engine = ScriptedGenerator(lambda request: script(self, request))

    def run(self, prompts: Sequence[Prompt], samples: int = 1, seq_len: int = 512, **settings) -> list[Group]:
        return rollouts(
            prompts,
            samples,
            engine=self.engine,
            renderer=self.renderer,
            scorer=self.scorer,
            config=self.config,
            sampling=self.sampling,
            seed=7,
            seq_len=seq_len,
            **settings,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def end(self) -> int:
        closing = self.renderer.end_of_turn_id()
        return self.tokenizer.eos_token_id if closing is None else closing


def guess_prompt(number: int, place: int = 0) -> Prompt:
    return Prompt(place, 0, number, ({"role": "user", "content": "Guess my number."},), {"number": number})


def guesses(*said: str):
    """A model that says these one after the other, letter by letter."""

    def script(setup: Setup, request: Request) -> list[int]:
        turn = setup.renderer.text([*request.prompt_ids]).count("too ")
        return [token for letter in said[turn] for token in setup.ids(letter)] + [setup.end]

    return script


# --- one turn -----------------------------------------------------------------------------------------------------------


def reverse_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(10 + n, 0, n, ({"role": "user", "content": f"Reverse: ab{n}"},), {"answer": f"{n}ba"})
        for n in range(count)
    ]


def test_a_turn_is_recorded_exactly():
    def script(setup: Setup, request: Request) -> list[int]:
        return [*setup.ids("0ba"), setup.end]

    setup = Setup(script, EnvConfig(name="reverse-text"))
    setup.engine.update(5)
    groups = setup.run(reverse_prompts(2), samples=3)
    assert [(group.number, group.id, len(group.rollouts), group.version) for group in groups] == [
        (10, "0:0", 3, 5),
        (11, "0:1", 3, 5),
    ]
    assert len(setup.engine.calls) == 1 and len(setup.engine.calls[0]) == 6
    request, rollout = setup.engine.calls[0][0], groups[0].rollouts[0]
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nReverse: ab0<|im_end|>\n"
    assert request.prompt_ids == setup.ids(text + "<|im_start|>assistant\n")
    said = [*setup.ids("0ba"), setup.end]
    assert rollout.ids.tolist() == [*request.prompt_ids, *said]
    assert rollout.trained.tolist() == [False] * len(request.prompt_ids) + [True] * len(said)
    expected = [-(place + 1) / 8 for place in range(len(said))]
    assert rollout.logprobs.tolist() == [0.0] * len(request.prompt_ids) + expected
    assert rollout.versions.tolist() == [-1] * len(request.prompt_ids) + [5] * len(said)
    dtypes = (rollout.ids.dtype, rollout.trained.dtype, rollout.logprobs.dtype, rollout.versions.dtype)
    assert dtypes == (np.int32, np.bool_, np.float32, np.int32)
    assert (rollout.finish_reason, rollout.turns, rollout.reward, rollout.error) == ("stop", 1, 1.0, None)
    assert rollout.parts == {"exact": 1.0}
    assert groups[1].rollouts[2].reward == 2 / 3


def test_seeds_are_addressed_by_prompt_sample_and_turn():
    setup = Setup(lambda setup, request: [setup.end], EnvConfig(name="reverse-text"))
    setup.run(reverse_prompts(2), samples=2)
    setup.run(reverse_prompts(2)[1:], samples=1)
    setup.run(reverse_prompts(1), samples=1, purpose="eval")
    first, second, third = ([request.seed for request in call] for call in setup.engine.calls)
    assert first == [derive_seed(7, "rollout", number, sample, 0) for number in (10, 11) for sample in (0, 1)]
    assert second == [first[2]]
    assert third[0] not in first


def test_a_cut_turn_ends_with_length_and_keeps_its_last_token():
    setup = Setup(lambda setup, request: setup.ids("0ba and so on"), EnvConfig(name="reverse-text"), max_new_tokens=3)
    rollout = setup.run(reverse_prompts(1))[0].rollouts[0]
    assert (rollout.finish_reason, int(rollout.trained.sum())) == ("length", 3)
    assert rollout.reward == 1.0  # all of what was said was scored: no token was taken for a stop token


def test_seq_len_bounds_the_conversation():
    setup = Setup(lambda setup, request: [setup.ids("x")[0]] * 999, EnvConfig(name="reverse-text"), max_new_tokens=999)
    length = len(setup.renderer.prompt_ids(reverse_prompts(1)[0].messages))
    assert setup.run(reverse_prompts(1), seq_len=length + 4)[0].rollouts[0].ids.size == length + 4
    assert setup.engine.calls[0][0].max_new_tokens == 4


def test_a_prompt_without_room_costs_its_samples_only():
    setup = Setup(lambda setup, request: [setup.end], EnvConfig(name="reverse-text"))
    long = Prompt(0, 0, 3, ({"role": "user", "content": "Reverse: " + "a" * 500},), {"answer": "a"})
    groups = setup.run([long, *reverse_prompts(1)], samples=2, seq_len=100)
    for rollout in groups[0].rollouts:
        assert rollout.reward is None and "leaves no room" in rollout.error and "0:3" in rollout.error
        assert rollout.ids.size == 100 and not rollout.trained.any()
    assert [rollout.reward for rollout in groups[1].rollouts] == [0.0, 0.0]
    assert len(setup.engine.calls[0]) == 2


def test_special_tokens_in_the_middle_of_an_answer_are_seen_by_the_reward():
    def script(setup: Setup, request: Request) -> list[int]:
        return [*setup.ids("<think></think>0ba"), setup.end]

    rollout = Setup(script, EnvConfig(name="reverse-text")).run(reverse_prompts(1))[0].rollouts[0]
    assert rollout.reward == 0.0


def test_an_engine_that_breaks_its_contract_is_named():
    setup = Setup(lambda setup, request: [setup.end], EnvConfig(name="reverse-text"))
    setup.engine.generate = lambda requests, sampling: []
    with pytest.raises(TrainingError, match="0 completions for 1 requests"):
        setup.run(reverse_prompts(1))


def test_a_prompt_that_the_template_refuses_is_named():
    setup = Setup(lambda setup, request: [setup.end], EnvConfig(name="reverse-text"), template=templates.MISTRAL)
    prompt = Prompt(0, 0, 4, ({"role": "assistant", "content": "hi"},), {"answer": ""})
    with pytest.raises(DataError, match=r"prompt 0:4.*roles must alternate"):
        setup.run([prompt])


# --- several turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_the_models_tokens_stay_and_the_rest_is_what_the_template_adds(name):
    """Three turns. The model's ids are its own; the whole conversation reads as the template's rendering."""
    setup = Setup(guesses("500", "400", "416"), GUESS, template=template_of(name))
    rollout = setup.run([guess_prompt(416)])[0].rollouts[0]
    assert (rollout.turns, rollout.reward, rollout.parts, rollout.error) == (3, 1.0, {"turns": 3.0}, None)
    assert rollout.finish_reason == "stop"
    said = [[t for letter in text for t in setup.ids(letter)] + [setup.end] for text in ("500", "400", "416")]
    assert rollout.ids[rollout.trained].tolist() == sum(said, [])
    runs = np.flatnonzero(np.diff(np.concatenate([[0], rollout.trained.astype(int), [0]])))
    assert [end - start for start, end in runs.reshape(-1, 2)] == [len(part) for part in said]
    assert (rollout.versions[~rollout.trained] == -1).all() and (rollout.logprobs[~rollout.trained] == 0).all()
    requests = [call[0] for call in setup.engine.calls]
    for earlier, later in zip(requests, requests[1:], strict=False):
        assert later.prompt_ids[: len(earlier.prompt_ids)] == earlier.prompt_ids
    text = setup.renderer.text(rollout.ids.tolist())
    assert text.count("too high") == 1 and text.count("too low") == 1
    if name in ("QWEN", "MARKED", "LLAMA3"):  # templates that never rewrite an earlier turn
        messages = [{"role": "user", "content": "Guess my number."}]
        for answer, reply in (("500", "too high"), ("400", "too low")):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
        rendered = setup.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert setup.renderer.text(requests[2].prompt_ids) == rendered


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_an_unusual_tokenization_of_a_turn_is_kept(name):
    said = "The capital of France"

    def script(setup: Setup, request: Request) -> list[int]:
        return [token for letter in said for token in setup.ids(letter)] + [setup.end]

    setup = Setup(script, EnvConfig(name=f"{USER}:Again"), template=template_of(name))
    rollout = setup.run([Prompt(0, 0, 0, ({"role": "user", "content": "Say it."},))])[0].rollouts[0]
    spelled = script(setup, setup.engine.calls[0][0])
    assert len(setup.ids(said)) < len(spelled) - 1
    first, second = (call[0].prompt_ids for call in setup.engine.calls)
    assert second[: len(first) + len(spelled)] == [*first, *spelled]
    assert rollout.ids.tolist() == [*second, *spelled]


def test_without_a_template_every_message_is_a_line():
    setup = Setup(guesses("5", "7"), GUESS, template=None)
    rollout = setup.run([guess_prompt(7)])[0].rollouts[0]
    eos = setup.tokenizer.eos_token
    assert setup.renderer.text(rollout.ids.tolist()) == f"Guess my number.\n5{eos}\ntoo low\n7{eos}"


def test_episodes_end_apart_and_live_ones_share_each_call():
    setup = Setup(guesses("5", "7"), GUESS, max_turns=2)
    groups = setup.run([guess_prompt(5), guess_prompt(7, 1), guess_prompt(9, 2)], samples=2)
    assert [len(call) for call in setup.engine.calls] == [6, 4]
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert [[r.turns for r in group.rollouts] for group in groups] == [[1, 1], [2, 2], [2, 2]]
    assert groups[2].rollouts[0].trained[-1]  # nothing is appended that nobody answers
    seeds = [request.seed for call in setup.engine.calls for request in call]
    assert len(set(seeds)) == 10
    assert setup.engine.calls[1][0].seed == derive_seed(7, "rollout", 1, 0, 1)


def test_a_step_that_fails_costs_its_sample():
    setup = Setup(guesses("boom"), GUESS)
    rollout = setup.run([guess_prompt(5)])[0].rollouts[0]
    assert rollout.reward is None and "step() raised RuntimeError" in rollout.error and rollout.turns == 1


def test_a_conversation_that_would_be_too_long_is_cut_before_the_environments_words():
    setup = Setup(guesses("5", "7"), GUESS)
    first = len(setup.renderer.prompt_ids(guess_prompt(7).messages)) + 2
    rollout = setup.run([guess_prompt(7)], seq_len=first + 3)[0].rollouts[0]
    assert (rollout.ids.size, rollout.turns, rollout.finish_reason) == (first, 1, "length")
    assert rollout.reward == 0.0


def test_a_cut_turn_ends_the_episode():
    setup = Setup(guesses("555555", "7"), GUESS, max_new_tokens=2)
    rollout = setup.run([guess_prompt(7)])[0].rollouts[0]
    assert (rollout.turns, rollout.finish_reason, rollout.reward) == (1, "length", 0.0)


def test_what_a_message_says_cannot_be_taken_for_the_end_of_the_turn():
    renderer = Renderer(byte_tokenizer(templates.QWEN))
    mark = "xXturn-end-41c7{}Xx"
    messages = [
        {"role": "user", "content": mark.format(0) + mark.format(1)},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": mark.format(0)},
    ]
    end = renderer.end_of_turn_id()
    text = renderer.text(renderer.continuation_ids(messages, 1, end))
    assert text == f"\n<|im_start|>user\n{mark.format(0)}<|im_end|>\n<|im_start|>assistant\n"


def test_another_stop_token_than_the_templates_is_kept_beside_it():
    renderer = Renderer(byte_tokenizer(templates.QWEN))
    messages = [{"role": r, "content": "x"} for r in ("user", "assistant", "user")]
    eos = renderer.tokenizer.eos_token_id
    assert renderer.text(renderer.continuation_ids(messages, 1, eos)).startswith("<|im_end|>\n<|im_start|>user")


# --- stop tokens --------------------------------------------------------------------------------------------------------


def test_stop_tokens(tmp_path):
    tokenizer = byte_tokenizer(templates.QWEN)
    named = lambda *texts: sorted(tokenizer.convert_tokens_to_ids([*texts]))  # noqa: E731
    assert [*stop_ids(tokenizer)] == named("<|endoftext|>", "<|im_end|>")
    assert [*stop_ids(tokenizer, ["</s>"])] == named("<|endoftext|>", "<|im_end|>", "</s>")
    assert [*stop_ids(byte_tokenizer(templates.PLAIN))] == named("<|endoftext|>")
    assert [*stop_ids(byte_tokenizer(None))] == named("<|endoftext|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named("<|eot_id|>", "</s>")}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    expected = named("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>")
    assert [*stop_ids(tokenizer, [], tmp_path)] == expected
    with pytest.raises(ConfigError, match=r"rl.stop: 'zebra crossing' is \d+ tokens"):
        stop_ids(tokenizer, ["zebra crossing"])


# --- evaluation ---------------------------------------------------------------------------------------------------------


def group(id_: str, *rewards: float | None, tokens: int = 2, cut: int = 0) -> Group:
    def rollout(place: int, reward: float | None) -> Rollout:
        trained = np.array([False] + [True] * tokens)
        reason = "length" if place < cut else "stop"
        zeros = np.zeros(tokens + 1, np.int32)
        return Rollout(zeros, trained, zeros.astype(np.float32), zeros, reason, reward=reward)

    return Group(0, id_, [rollout(place, reward) for place, reward in enumerate(rewards)])


def test_evaluation_counts_by_hand():
    groups = [
        group("0:0", 1.0, 0.0, 0.0, 0.0, cut=1),
        group("0:1", 0.5, 0.5, 0.5, 0.5),
        group("1:0", 1.0, None, 0.0, None, tokens=5),
        group("1:1", None, None, None, None, tokens=5),
    ]
    found = evaluate_groups(groups, 1.0, ["a", "b"])
    assert found["a/avg@4"] == 0.375 and found["b/avg@4"] == 0.5
    assert found["avg@4"] == pytest.approx((0.25 + 0.5 + 0.5) / 3)
    assert (found["a/pass@4"], found["b/pass@4"], found["a/pass@1"]) == (0.5, 1.0, 0.125)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert (found["length_tokens"], found["truncated"], found["failed"]) == (3.5, 1 / 16, 6.0)
    assert evaluate_groups(groups, 0.5, ["a", "b"])["a/pass@4"] == 1.0
    assert evaluate_groups(groups[3:], 1.0, ["a", "b"])["avg@4"] is None
    assert "a#0/avg@4" in evaluate_groups(groups, 1.0, ["a", "a"])
