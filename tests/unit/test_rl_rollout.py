"""The local engine against the trainer's own forward: what it draws, how probable it calls that, and what it leaves alone."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from support.models import build, gradients, loss_sum, packed, save_reference
from trainer.errors import DataError, TrainingError
from trainer.models.base import CausalLM
from trainer.rl.rollout import LocalEngine
from trainer.rl.sampling import draw, uniforms
from trainer.rl.types import Completion, Request, Sampling

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama without GQA, wide heads": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2, window, yarn": ("qwen2", {**WINDOW, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases, window, tied": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, **WINDOW},
    ),
}
PROMPTS = [[5], [6, 7, 8], [9] * 11, [10, 11], [6, 7, 8], [12, 13, 14, 15, 16, 17, 18], [6, 7, 8], [9, 9]]
SAMPLING = Sampling(temperature=0.8)


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 12) -> list[Request]:
    return [Request(prompt, tokens - i % 3, seed=100 + i) for i, prompt in enumerate(prompts)]


def serve(model: CausalLM, slots: int = 3, **options: Any) -> LocalEngine:
    engine = LocalEngine(model, slots=slots, **options)
    engine.update(0)
    return engine


def logits_behind(model: CausalLM, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """From the trainer's forward: the logits that each of `ids` was drawn from, [len(ids), vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]]))[0].float()
    return logits[len(prompt) - 1 : -1]


def check(model: CausalLM, asked: Sequence[Request], completions: Sequence[Completion], *, bound: float = 1e-4) -> None:
    """Every token is what its uniform number picks from the trainer's distribution, and is as probable as there."""
    for request, completion in zip(asked, completions, strict=True):
        logprobs = (logits_behind(model, request.prompt_ids, completion.ids) / SAMPLING.temperature).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        expected = [
            int(torch.searchsorted(row, number, right=True))
            for row, number in zip(cumulative, uniforms(request.seed, len(completion.ids)), strict=True)
        ]
        assert completion.ids == expected
        ours = logprobs[torch.arange(len(expected)), expected]
        assert (torch.tensor(completion.logprobs) - ours).exp().sub(1).abs().max() < bound


@pytest.mark.parametrize("pack_bytes", [0, 2**28], ids=["shared", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_draws_from_the_trainers_distribution(tmp_path, name, pack_bytes):
    family, changes = MODELS[name]
    save_reference(tmp_path, family, **changes)
    model = build(tmp_path)
    completions = serve(model, pack_bytes=pack_bytes).generate(requests(), SAMPLING)
    check(model, requests(), completions)
    assert [len(completion.ids) for completion in completions] == [12, 11, 10, 12, 11, 10, 12, 11]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert len({tuple(completion.ids[:3]) for completion in completions}) == len(PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_model_of_transformers_draws_the_same(tmp_path, family, snapshot):
    save_reference(tmp_path, family)
    model = build(tmp_path, impl="hf")
    completions = serve(model, snapshot=snapshot).generate(requests(), SAMPLING)
    check(model, requests(), completions)
    if family == "llama":
        native = serve(build(tmp_path)).generate(requests(), SAMPLING)
        assert [c.ids for c in native] == [c.ids for c in completions]


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_bfloat16_is_near(tmp_path, impl):
    save_reference(tmp_path, "qwen3", head_dim=16)
    model = build(tmp_path, dtype="bfloat16", impl=impl)
    for snapshot in (False, True):
        for request, completion in zip(
            requests(), serve(model, snapshot=snapshot).generate(requests(), SAMPLING), strict=True
        ):
            logprobs = (logits_behind(model, request.prompt_ids, completion.ids) / SAMPLING.temperature).log_softmax(-1)
            ours = logprobs[torch.arange(len(completion.ids)), completion.ids]
            assert (torch.tensor(completion.logprobs) - ours).abs().mean() < 0.1


def test_greedy_takes_the_most_probable_at_temperature_one(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    for request, completion in zip(
        requests(), serve(model).generate(requests(), Sampling(temperature=0.0)), strict=True
    ):
        logprobs = logits_behind(model, request.prompt_ids, completion.ids).log_softmax(-1)
        assert completion.ids == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs.amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_neither_slots_nor_order_matter(tmp_path, slots):
    save_reference(tmp_path)
    model = build(tmp_path)
    expected = serve(model, slots=3).generate(requests(), SAMPLING)
    asked = requests()
    order = np.random.default_rng(slots).permutation(len(asked)).tolist()
    completions = serve(model, slots=slots).generate([asked[i] for i in order], SAMPLING)
    assert [completions[order.index(i)].ids for i in range(len(asked))] == [completion.ids for completion in expected]
    for i, completion in enumerate(expected):
        assert completions[order.index(i)].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_earlier_calls_do_not_change_a_bit(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    fresh = serve(model).generate(requests(), SAMPLING)
    engine = serve(model)
    engine.generate([Request([3] * 30, 30, seed=i) for i in range(9)], SAMPLING)
    engine.generate([Request([4], 2, seed=1)], SAMPLING)
    assert engine.generate(requests(), SAMPLING) == fresh


def test_a_stop_token_ends_a_completion_and_belongs_to_it(tmp_path):
    save_reference(tmp_path)
    engine = serve(build(tmp_path))
    free = engine.generate(requests(), SAMPLING)
    stop = free[2].ids[4]
    for completion, unstopped in zip(
        engine.generate(requests(), Sampling(temperature=0.8, stop_ids={stop, 5000})), free, strict=True
    ):
        if stop in unstopped.ids:
            end = unstopped.ids.index(stop) + 1
            assert (completion.ids, completion.finish_reason) == (unstopped.ids[:end], "stop")
            assert len(completion.logprobs) == len(completion.versions) == end
        else:
            assert (completion.ids, completion.finish_reason) == (unstopped.ids, "length")


def test_the_context_cuts_and_nothing_asked_is_nothing_drawn(tmp_path):
    save_reference(tmp_path)  # 64 positions
    model = build(tmp_path)
    asked = [Request([5] * 60, 20, seed=0), Request([6], 0, seed=1), Request([7] * 63, 5, seed=2)]
    completions = serve(model).generate(asked, SAMPLING)
    assert [len(completion.ids) for completion in completions] == [4, 0, 1]
    assert {completion.finish_reason for completion in completions} == {"length"}
    check(model, asked[::2], completions[::2])
    assert serve(model).generate([], SAMPLING) == []


def test_samples_of_one_prompt_read_it_once(tmp_path, monkeypatch):
    save_reference(tmp_path)
    model = build(tmp_path)
    engine = serve(model, slots=4)
    read: list[Sequence[int]] = []
    prefill = engine._decoding.prefill

    def recorded(prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        read.extend(prompts)
        prefill(prompts, slots)

    monkeypatch.setattr(engine._decoding, "prefill", recorded)
    first, second = [5, 6, 7, 8], [9, 10, 11]
    asked = requests([first] * 6 + [second] * 6)
    check(model, asked, engine.generate(asked, SAMPLING))
    assert [list(prompt) for prompt in read] == [first[:-1], second[:-1]]


# --- drawing --------------------------------------------------------------------------------------------------------------


def allowed(logits: np.ndarray, top_k: int, top_p: float) -> list[int]:
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probabilities = np.exp(logits[order] - logits[order].max())
    probabilities /= probabilities.sum()
    before = np.concatenate([[0.0], probabilities.cumsum()[:-1]])
    return sorted(order[before < top_p].tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (6, 0.8), (1, 1.0), (0, 1e-6)])
def test_frequencies_are_those_of_the_distribution_that_is_left(top_k, top_p):
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 2
    draws, temperature = 20_000, 1.5
    sampling = Sampling(temperature, top_p=top_p, top_k=top_k)
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws  # a grid: frequencies are exact to 1 / draws
    ids, logprobs = draw(logits.expand(draws, -1), sampling, uniform)
    kept = allowed(logits.double().numpy() / temperature, top_k, top_p)
    assert sorted(set(ids.tolist())) == kept
    expected = (logits.double() / temperature)[kept].softmax(0)
    frequencies = torch.bincount(ids, minlength=20)[kept] / draws
    assert (frequencies - expected).abs().max() < 2 / draws
    whole = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, whole[ids])


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for number, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (np.nextafter(1.0, 0.0), 3)):
        assert draw(logits, Sampling(1.0), torch.tensor([number], dtype=torch.float64))[0].tolist() == [token]


def test_a_number_has_one_address():
    assert uniforms(7, 3).tolist() == uniforms(7, 30)[:3].tolist()
    assert uniforms(7, 3).tolist() != uniforms(8, 3).tolist()
    assert 0 <= uniforms(-1, 1000).min() and uniforms(2**63, 1000).max() < 1


# --- weights and training -------------------------------------------------------------------------------------------------


def training_step(model: CausalLM, between: Any = lambda: None) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    batch = packed([9, 12], [24], tokens=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_sum(model, batch).backward()  # gradients pending, as between two micro-steps
    between()
    (loss_sum(model, batch) * torch.rand(())).backward()
    found = gradients(model)
    optimizer.step()
    return found | {f"weight {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("impl", "options"),
    [
        ("native", {"pack_bytes": 0}),
        ("native", {}),
        ("native", {"snapshot": True}),
        ("hf", {}),
        ("hf", {"snapshot": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_does_not_see_generation(tmp_path, impl, options, dtype):
    save_reference(tmp_path)
    expected = training_step(build(tmp_path, impl=impl, dtype=dtype))
    model = build(tmp_path, impl=impl, dtype=dtype)
    with torch.no_grad():
        model(torch.tensor([[3, 4]]))  # the first forward checks a model of transformers, in a mode of its own
    model.blocks[0].eval()  # a mode of one part is left alone too
    modes = [module.training for module in model.modules()]
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr]

    found = training_step(model, lambda: serve(model, **options).generate(requests(), SAMPLING))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [module.training for module in model.modules()] == modes
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr]
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_update_serves_the_present_weights_under_their_version(tmp_path, impl):
    save_reference(tmp_path)
    model = build(tmp_path, impl=impl)
    engine, frozen = serve(model), serve(model, snapshot=True)
    old = engine.generate(requests(), SAMPLING)
    storage = {id(tensor): tensor.data_ptr() for tensor in tensors_of(frozen)}
    training_step(model)
    assert frozen.generate(requests(), SAMPLING) == old
    for served in (engine, frozen):
        served.update(4)
        new = served.generate(requests(), SAMPLING)
        check(model, requests(), new)
        assert {version for completion in new for version in completion.versions} == {4}
        assert [c.ids for c in new] != [c.ids for c in old]
    assert {id(tensor): tensor.data_ptr() for tensor in tensors_of(frozen)} == storage


def tensors_of(engine: LocalEngine) -> list[torch.Tensor]:
    decoding: Any = engine._decoding
    if hasattr(decoding, "_model"):
        return list(decoding._model.parameters())
    return list(decoding._weights.targets.values())


def test_large_weights_are_not_copied(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    decoding: Any = serve(model, pack_bytes=0)._decoding
    assert not decoding._weights.targets
    assert decoding._weights.layers[1].down[0] is model.get_parameter("model.layers.1.mlp.down_proj.weight")


def test_an_update_during_generation_shows_in_the_versions(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    engine = serve(model, slots=2, snapshot=True)
    step, calls = engine._decoding.step, [0]
    updating = threading.Thread(target=engine.update, args=(1,))

    def recorded(ids: Any, positions: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 5:
            updating.start()
            while not engine._turn.locked():  # it waits for the end of this step
                time.sleep(0.001)
        return step(ids, positions)

    engine._decoding.step = recorded  # type: ignore[method-assign]
    completions = engine.generate(requests(tokens=20), SAMPLING)
    updating.join(timeout=30)
    assert not updating.is_alive()
    assert [completion.versions for completion in completions[:2]] == [[0] * 5 + [1] * 15, [0] * 5 + [1] * 14]
    assert {version for completion in completions[2:] for version in completion.versions} == {1}


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_closing_ends_what_is_generated_in_another_thread(tmp_path):
    save_reference(tmp_path, max_position_embeddings=4096)
    engine = serve(build(tmp_path), slots=1)
    started, step = threading.Event(), engine._decoding.step
    engine._decoding.step = lambda *args: started.set() or step(*args)
    with ThreadPoolExecutor(1) as thread:
        completions = thread.submit(engine.generate, [Request([5], 4000, seed) for seed in range(100)], SAMPLING)
        assert started.wait(60)
        engine.close()
        with pytest.raises(TrainingError, match="closed while it generated"):
            completions.result(60)


def test_a_closed_engine_reads_no_prompt_any_more(tmp_path):
    """A thread that generates ahead may begin just when the run ends; the cache that was freed must not come back."""
    save_reference(tmp_path)
    engine, begun = serve(build(tmp_path)), []
    engine._decoding.begin = lambda *args: begun.append(args)
    engine.close()
    with pytest.raises(TrainingError, match="closed"):
        engine.generate([Request([5, 6], 4, 0)], SAMPLING)
    assert not begun


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "request 1 has an empty prompt"),
        ([5] * 64, "the prompt has 64 tokens, and the model's context ends at 64"),
        ([5, 97], "token id 97 is not in the model's vocabulary of 97"),
        ([-1], "token id -1 is not in"),
    ],
)
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_wrong_prompts_are_named(tmp_path, impl, prompt, message):
    save_reference(tmp_path)
    with pytest.raises(DataError, match=message):
        serve(build(tmp_path, impl=impl)).generate([Request([5], 3, 0), Request(prompt, 3, 0)], SAMPLING)


def test_weights_must_be_served_first(tmp_path):
    save_reference(tmp_path)
    with pytest.raises(TrainingError, match="call update"):
        LocalEngine(build(tmp_path), slots=2).generate(requests(), SAMPLING)


def test_weights_that_are_not_finite_are_named_and_leave_nothing_behind(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path)
    engine = serve(model)
    expected = engine.generate(requests(), SAMPLING)
    weight = model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    engine.update(1)
    with pytest.raises(TrainingError, match="logits of policy 1 are not finite"):
        engine.generate(requests(), SAMPLING)
    with torch.no_grad():
        weight.copy_(kept)
    engine.update(0)
    assert engine.generate(requests(), SAMPLING) == expected
