"""The engine over servers: versions, parity, what may be served before the first rollout, and several ranks.

The servers here are stand-ins that compute with the weights they were given, so a wrong update shows in their numbers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.models import build, save_reference, write_config
from support.pool import run_on_ranks
from support.vllm_server import StandIn
from trainer.config.rl import EngineConfig
from trainer.core.distributed import build_mesh, world_from_env
from trainer.errors import ConfigError, DataError, TrainingError
from trainer.models.base import CausalLM
from trainer.rl.types import Request, Sampling
from trainer.rl.vllm.engine import VLLMEngine, logprobs_mode
from trainer.rl.vllm.probe import model_logprobs

PLAIN = Sampling(1.0)
TOKENS = 48


class Serving:
    """A stand-in that computes: most probable tokens, with the weights it was given."""

    def __init__(self, model_dir: Path, *, keeps_head: bool = False, temperature: bool = True):
        self.model = build(model_dir, random_init=True, seed=99)
        self.keeps_head, self.temperature = keeps_head, temperature
        self.loads = 0

    def load(self, directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        self.loads += 1
        with torch.no_grad():
            if self.keeps_head and self.loads == 2:
                self.model.output.weight = torch.nn.Parameter(self.model.output.weight.clone())
            for name, parameter in self.model.named_parameters():
                if name in found:
                    parameter.copy_(found[name])

    def complete(self, prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        for _ in range(parameters["max_tokens"]):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([prompt + ids]))[0, -1].argmax()))
            if ids[-1] in parameters["stop_token_ids"]:
                break
        temperature = parameters["temperature"] if self.temperature else 1.0
        return ids, model_logprobs(self.model, prompt + ids, temperature)[len(prompt) - 1 :]


def serving(model_dir: Path, **options: Any) -> StandIn:
    model = Serving(model_dir, **options)
    server = StandIn(model.complete)
    server.load = model.load
    return server


def engine_of(
    model: CausalLM, tmp_path: Path, *servers: StandIn, sampling: Sampling = PLAIN, **config: Any
) -> VLLMEngine:
    settings = {"type": "vllm", "urls": tuple(server.url for server in servers), "start_seconds": 5.0} | config
    return VLLMEngine(
        model,
        EngineConfig(**settings),
        run_dir=tmp_path,
        world=world_from_env(),
        source=tmp_path / "model",
        sampling=sampling,
        seq_len=TOKENS,
    )


@pytest.fixture
def model_dir(tmp_path) -> Path:
    save_reference(tmp_path / "model", tie_word_embeddings=True)
    return tmp_path / "model"


@pytest.fixture
def parts(model_dir, tmp_path):
    with serving(model_dir) as server:
        model = build(model_dir)
        engine = engine_of(model, tmp_path, server)
        yield model, server, engine
        engine.close()


def change(model: CausalLM, factor: float = 1.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def requests(count: int = 3, tokens: int = 5) -> list[Request]:
    return [Request([5 + number, 17, 40], tokens, seed=number) for number in range(count)]


def test_completions_have_the_models_logprobs_and_their_versions(parts):
    model, server, engine = parts
    engine.update(7)
    for request, completion in zip(requests(), engine.generate(requests(), PLAIN), strict=True):
        own = model_logprobs(model, [*request.prompt_ids, *completion.ids], 1.0)
        assert completion.logprobs == pytest.approx(own[2:], abs=1e-5)
        assert completion.versions == [7] * 5 and completion.finish_reason == "length"
    seeds = [call[2]["sampling_params"]["seed"] for call in server.calls if call[0].endswith("generate")]
    assert sorted(seeds[-3:]) == [0, 1, 2]


def test_nothing_is_generated_before_weights_are_served(parts):
    with pytest.raises(TrainingError, match="update"):
        parts[2].generate(requests(), PLAIN)


def test_a_resumed_engine_serves_the_resumed_weights_first(parts, tmp_path):
    model, server, engine = parts
    change(model, 1.3)  # as a checkpoint of step 5 would
    engine.update(5)
    paths = server.paths()
    assert paths.index("/finish_weight_update") < paths.index("/inference/v1/generate")
    found = engine.generate(requests(1), PLAIN)[0]
    own = model_logprobs(model, [*requests(1)[0].prompt_ids, *found.ids], 1.0)
    assert found.versions == [5] * 5 and found.logprobs == pytest.approx(own[2:], abs=1e-5)


def test_an_update_replaces_the_weights_and_the_same_step_is_not_sent_again(parts, tmp_path):
    model, server, engine = parts
    engine.update(0)
    before = engine.generate(requests(1), PLAIN)[0]
    change(model)
    engine.update(1)
    after = engine.generate(requests(1), PLAIN)[0]
    assert after.logprobs != before.logprobs and after.versions == [1] * 5
    engine.update(1)
    assert server.paths().count("/update_weights") == 2
    assert [path.name for path in (tmp_path / "weights-served").iterdir()] == ["version_00000001"]
    assert engine.publication is not None and engine.publication.weights_bytes > 0


def test_stop_tokens_end_a_completion(parts):
    _, _, engine = parts
    engine.update(0)
    whole = engine.generate(requests(1), PLAIN)[0].ids
    cut = engine.generate(requests(1), Sampling(1.0, stop_ids=(whole[2],)))[0]
    assert cut.ids == whole[: whole.index(whole[2]) + 1] and cut.finish_reason == "stop"


def test_a_completion_across_an_update_has_both_versions(parts):
    _, server, engine = parts
    engine.update(1)
    mine = server.label.partition(":")[0]
    server.spans = lambda n: [{"version": f"{mine}:{v}", "start": s, "end": e} for v, s, e in ((1, 0, 2), (2, 2, n))]
    assert engine.generate(requests(1), PLAIN)[0].versions == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("{mine}:3", "serves step 3 yet, and step 4 is due"),
        ("default", "not this run's"),
        ("ffffffff:4", "not this run's"),
    ],
)
def test_tokens_of_other_weights_are_never_taken(model_dir, tmp_path, label, reason):
    with serving(model_dir) as server:
        engine = engine_of(build(model_dir), tmp_path, server, start_seconds=1.0)
        engine.update(4)
        other = label.replace("{mine}", server.label.partition(":")[0])
        server.spans = lambda n: [{"version": other, "start": 0, "end": n}]
        with pytest.raises(TrainingError, match=reason):
            engine.generate(requests(1), PLAIN)
        engine.close()


def test_another_server_answers_for_one_that_is_behind(model_dir, tmp_path):
    with serving(model_dir) as a, serving(model_dir) as b:
        engine = engine_of(build(model_dir), tmp_path, a, b)
        engine.update(4)
        a.spans = lambda n: [{"version": "default", "start": 0, "end": n}]
        assert all(found.versions == [4] * 5 for found in engine.generate(requests(4), PLAIN))
        engine.close()


def test_a_prompt_that_fills_the_context_is_refused_and_others_are_cut(parts):
    _, _, engine = parts
    engine.update(0)
    with pytest.raises(DataError, match=f"{TOKENS}"):
        engine.generate([Request([1] * TOKENS, 4, 0)], PLAIN)
    assert len(engine.generate([Request([1] * (TOKENS - 2), 4, 0)], PLAIN)[0].ids) == 2


def test_close_leaves_no_weights_behind(model_dir, tmp_path):
    with serving(model_dir) as server:
        engine = engine_of(build(model_dir), tmp_path, server)
        engine.update(0)
        assert (tmp_path / "weights-served").exists()
        engine.close()
        assert not (tmp_path / "weights-served").exists()


# --- parity ---------------------------------------------------------------------------------------------------------


def test_a_head_that_keeps_older_weights_is_found_at_the_first_real_update(model_dir, tmp_path):
    with serving(model_dir, keeps_head=True) as server:
        model = build(model_dir)
        engine = engine_of(model, tmp_path, server)
        engine.update(0)
        change(model)
        with pytest.raises(TrainingError, match=r"step 1 .* at most 0\.001 .*float32(?s:.*)embeddings are tied"):
            engine.update(1)
        engine.close()


def test_logprobs_at_another_temperature_are_told_apart(model_dir, tmp_path):
    with serving(model_dir, temperature=False) as server:
        engine = engine_of(build(model_dir), tmp_path, server, sampling=Sampling(0.6))
        with pytest.raises(TrainingError, match="those at temperature 1(?s:.*)--logprobs-mode processed_logprobs"):
            engine.update(0)
        engine.close()


def test_logprobs_at_the_runs_temperature_pass(model_dir, tmp_path):
    with serving(model_dir) as server:
        engine = engine_of(build(model_dir), tmp_path, server, sampling=Sampling(0.6))
        engine.update(0)
        engine.close()


def test_every_server_is_probed_at_its_first_two_loads_only(model_dir, tmp_path):
    with serving(model_dir) as a, serving(model_dir) as b:
        model = build(model_dir)
        engine = engine_of(model, tmp_path, a, b)
        counts = []
        for version in range(3):
            engine.update(version)
            counts.append([server.paths().count("/inference/v1/generate") for server in (a, b)])
            change(model, 1.01)
        first = counts[0][0]
        assert first >= 3 and counts == [[first] * 2, [2 * first] * 2, [2 * first] * 2]
        engine.close()


def test_an_injected_forward_takes_the_models_place(model_dir, tmp_path):
    with serving(model_dir) as server:
        model = build(model_dir)
        asked: list[list[int]] = []

        def wrong(ids: list[int]) -> list[float]:
            asked.append(ids)
            return [0.0] * (len(ids) - 1)

        engine = VLLMEngine(
            model,
            EngineConfig(type="vllm", urls=(server.url,)),
            run_dir=tmp_path,
            world=world_from_env(),
            source=model_dir,
            sampling=PLAIN,
            seq_len=TOKENS,
            trainer_logprobs=wrong,
        )
        with pytest.raises(TrainingError, match="does not serve the model that trains"):
            engine.update(0)
        assert len(asked) >= 3
        engine.close()


# --- log-probabilities that a server can return ---------------------------------------------------------------------


def test_the_mode_follows_from_the_sampling():
    assert logprobs_mode(Sampling(0.7)) == logprobs_mode(PLAIN) == "processed_logprobs"
    assert logprobs_mode(Sampling(1.0, top_p=0.9)) == logprobs_mode(Sampling(1.0, top_k=3)) == "raw_logprobs"


def test_samplings_without_right_logprobs_are_refused(model_dir, tmp_path):
    with serving(model_dir) as server:
        with pytest.raises(ConfigError, match="temperature 0.7 together with top_p"):
            engine_of(build(model_dir), tmp_path, server, sampling=Sampling(0.7, top_p=0.9))
        engine = engine_of(build(model_dir), tmp_path, server, sampling=Sampling(1.0, top_p=0.9))
        engine.update(0)
        with pytest.raises(ConfigError):
            engine.generate(requests(), Sampling(0.5))
        assert engine.generate(requests(1), Sampling(0.0))[0].versions == [0] * 5
        engine.close()


# --- several ranks --------------------------------------------------------------------------------------------------


def _on_rank(root: str, url: str) -> list[tuple[list[int], list[float], list[int]]]:
    world = world_from_env()
    path = Path(root)
    model = build(path / "model", mesh=build_mesh("cpu", 1, -1, world.size))
    engine = VLLMEngine(
        model,
        EngineConfig(type="vllm", urls=(url,), start_seconds=20.0),
        run_dir=path,
        world=world,
        source=path / "model",
        sampling=PLAIN,
        seq_len=TOKENS,
    )
    engine.update(2)
    own = requests()[world.rank :: world.size]
    found = engine.generate(own, PLAIN)
    engine.close()
    return [(completion.ids, completion.logprobs, completion.versions) for completion in found]


def test_ranks_update_together_and_generate_each_for_itself(model_dir, tmp_path):
    with serving(model_dir) as server:
        first, second = run_on_ranks(_on_rank, 2, str(tmp_path), server.url)
        assert server.paths().count("/update_weights") == 1
    model = build(model_dir)
    found = [first[0], second[0], first[1]]
    for request, (ids, logprobs, versions) in zip(requests(), found, strict=True):
        own = model_logprobs(model, [*request.prompt_ids, *ids], 1.0)
        assert logprobs == pytest.approx(own[2:], abs=1e-5) and versions == [2] * 5


def _fails_on_rank(root: str, url: str) -> str:
    world = world_from_env()
    path = Path(root)
    model = build(path / "model", mesh=build_mesh("cpu", 1, -1, world.size), random_init=True)
    config = EngineConfig(type="vllm", urls=(url,), start_seconds=0.5)
    try:
        VLLMEngine(model, config, run_dir=path, world=world, source=path / "model", sampling=PLAIN, seq_len=TOKENS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_missing_server_ends_every_rank(tmp_path):
    write_config(tmp_path / "model")
    with StandIn() as gone:
        url = gone.url
    found = run_on_ranks(_fails_on_rank, 2, str(tmp_path), url)
    assert all(text.startswith(f"LaunchError: {url}/health did not answer") for text in found)
