"""A real vLLM server in .vllm (`make vllm`): started, asked, given new weights, killed, and held against our own model."""

import copy
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.models import build, save_reference
from trainer.config.rl import EngineConfig
from trainer.core.distributed import world_from_env
from trainer.models.base import CausalLM
from trainer.rl.types import Completion, Request, Sampling
from trainer.rl.vllm.client import ServerError
from trainer.rl.vllm.engine import VLLMEngine
from trainer.rl.vllm.probe import model_logprobs
from trainer.rl.vllm.server import DEFAULT_PYTHON

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / DEFAULT_PYTHON))
SIZES = {"vocab_size": 120, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
SEQ_LEN = 256
BOUND = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there: make vllm"),
]


def engine_of(model: CausalLM, run_dir: Path, sampling: Sampling, port: int, **config) -> VLLMEngine:
    return VLLMEngine(
        model,
        EngineConfig(type="vllm", launch=True, python=str(PYTHON), port=port, **config),
        run_dir=run_dir,
        world=world_from_env(),
        source=run_dir / "model",
        sampling=sampling,
        seq_len=SEQ_LEN,
    )


def requests(count: int, tokens: int) -> list[Request]:
    long = torch.randint(0, 120, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [[5, 17, 40], [9], long]
    return [Request(prompts[number % 3], tokens, seed=1000 + number) for number in range(count)]


def worst(model: CausalLM, asked: list[Request], found: list[Completion], temperature: float) -> float:
    """Largest difference of a token's log-probability between the server and the model that trains."""
    distances = []
    for request, completion in zip(asked, found, strict=True):
        own = model_logprobs(model, [*request.prompt_ids, *completion.ids], temperature)
        distances += [abs(a - b) for a, b in zip(own[len(request.prompt_ids) - 1 :], completion.logprobs, strict=True)]
    return max(distances)


def perturb(model: CausalLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def _running(group: int) -> list[str]:
    """Returns what runs in a process group, without what only waits to be reaped."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [row[-1] for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


def _across_an_update(engine: VLLMEngine, model: CausalLM, sampling: Sampling, told: list[str]) -> tuple[int, float]:
    """Updates the model of step 7 while tokens are generated. Returns the new step, and the largest distance of a token's
    log-probability to that under the weights which it is said to be from."""
    asked = [Request([5, 17, 40], 240, seed) for seed in range(4)]
    for version, delay in enumerate((0.05, 0.02, 0.1, 0.2, 0.4, 0.8), start=8):  # nobody knows how fast the server is
        before = copy.deepcopy(model)
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(engine.generate, asked, sampling)
            time.sleep(delay)
            perturb(model, 3)
            engine.update(version)
            found = future.result()
        told.append(
            f"tokens before and after the update: {[c.versions.count(version - 1) for c in found]} of 240 before"
        )
        if any(len(set(completion.versions)) == 2 for completion in found):
            break
    else:
        pytest.fail("no completion was under way at any update")
    distances = []
    for request, completion in zip(asked, found, strict=True):
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) <= {version - 1, version}
        own = {
            step: model_logprobs(m, [*request.prompt_ids, *completion.ids], sampling.temperature)[2:]
            for step, m in ((version - 1, before), (version, model))
        }
        places = zip(completion.versions, completion.logprobs, strict=True)
        distances += [abs(own[step][place] - theirs) for place, (step, theirs) in enumerate(places)]
    return version, max(distances)


def _refuses_what_is_not_whole(engine: VLLMEngine, version: int, tmp_path: Path) -> None:
    assert engine._keeper is not None
    keeper = engine._keeper
    client, good = keeper.replicas[0].client, engine._folder.path(version)
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    os.truncate(bad / "model.safetensors", 1000)
    with keeper.replicas[0].lock:
        with pytest.raises(ServerError, match="/update_weights answered 500"):
            client.load(bad, "bad", keep_cache=False)
        client.load(good, keeper.label(version), keep_cache=False)


@pytest.mark.parametrize(("tied", "temperature", "port"), [(True, 1.0, 8117), (False, 0.6, 8118)])
def test_a_real_server_serves_the_model_that_trains(tmp_path, tied, temperature, port, capsys):
    save_reference(tmp_path / "model", tie_word_embeddings=tied, **SIZES)
    model = build(tmp_path / "model")
    sampling = Sampling(temperature)
    started = time.perf_counter()
    engine = engine_of(model, tmp_path, sampling, port)
    try:
        told = [f"start {time.perf_counter() - started:.1f} s"]

        # The first weights, at step 5 as after a resume; the server itself began with other ones.
        engine.update(5)
        asked = requests(12, 20)
        first = engine.generate(asked, sampling)
        told.append(f"tied {tied}: |server - trainer| {worst(model, asked, first, temperature):.2g}")
        assert worst(model, asked, first, temperature) < BOUND
        assert all(completion.versions == [5] * 20 for completion in first)
        assert len({tuple(completion.ids) for completion in first}) == len(first)  # seeds differ
        again = engine.generate(asked, sampling)
        assert sum(a.ids == b.ids for a, b in zip(first, again, strict=True)) >= 10  # and count

        # New weights: all of them, also for prompts whose prefix is cached.
        perturb(model, 1)
        started = time.perf_counter()
        engine.update(6)
        publication = engine.publication
        assert publication is not None
        told.append(
            f"update with probe {time.perf_counter() - started:.2f} s, of it {publication.seconds:.3f} s to write "
            f"{publication.weights_bytes:,} bytes"
        )
        second = engine.generate(asked, sampling)
        told.append(f"after an update {worst(model, asked, second, temperature):.2g}")
        assert worst(model, asked, second, temperature) < BOUND
        assert all(completion.versions == [6] * 20 for completion in second)
        started = time.perf_counter()
        perturb(model, 2)
        engine.update(7)
        told.append(f"update without probe {time.perf_counter() - started:.2f} s")
        assert worst(model, asked, engine.generate(asked, sampling), temperature) < BOUND

        # Completions under way go on with the new weights, and every token is told which ones were its own.
        version, mixed = _across_an_update(engine, model, sampling, told)
        assert mixed < BOUND

        # A directory that is not whole changes nothing, and is named.
        _refuses_what_is_not_whole(engine, version, tmp_path)
        assert worst(model, asked, engine.generate(asked, sampling), temperature) < BOUND

        # Stop tokens and greedy decoding.
        greedy = engine.generate(asked[:1], Sampling(0.0))[0]
        assert greedy.ids[0] == int(model(torch.tensor([asked[0].prompt_ids]))[0, -1].argmax())
        assert worst(model, asked[:1], [greedy], 1.0) < BOUND
        stop = greedy.ids[4]
        cut = engine.generate(asked[:1], Sampling(0.0, stop_ids=(stop,)))[0]
        assert cut.ids == greedy.ids[: greedy.ids.index(stop) + 1] and cut.finish_reason == "stop"

        # The process dies; it comes back with the present weights before it answers again.
        assert engine._keeper is not None
        process = engine._keeper.replicas[0].process
        assert process is not None and process.pid is not None
        before = process.pid
        os.killpg(before, signal.SIGKILL)
        started = time.perf_counter()
        third = engine.generate(asked, sampling)
        told.append(f"killed and back after {time.perf_counter() - started:.1f} s")
        assert process.pid != before
        assert worst(model, asked, third, temperature) < BOUND
        assert all(completion.versions == [version] * 20 for completion in third)
        pid = process.pid
    finally:
        engine.close()
        with capsys.disabled():
            print("\n  " + "\n  ".join(told))
    assert pid is not None
    deadline = time.monotonic() + 30
    while left := _running(pid):  # neither it nor a helper of it
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
