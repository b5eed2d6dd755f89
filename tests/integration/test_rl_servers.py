"""Whole runs whose rollouts come from servers: stand-ins for vLLM's that compute with the weights that they were given.

That the real server behaves like them is what test_vllm_server.py and test_vllm_run.py check.
"""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.models import build
from support.runs import REPO, checkpoint, differences, metrics, read, rl
from support.vllm_server import StandIn
from trainer.errors import LaunchError, TrainingError
from trainer.rl.rollout import LocalEngine
from trainer.rl.types import Request, Sampling

STEPS, GROUPS, SAMPLES = 5, 4, 4
SHORT = ("--max-steps", str(STEPS), "--val.interval", "0", "--ckpt.interval", "2", "--rl.max-new-tokens", "6")


class Serving:
    """Draws tokens as a server would, one request at a time: so the same request gets the same answer."""

    def __init__(self):
        self.model = build(REPO / "configs/debug/assets/letters-llama", random_init=True, seed=99, vocab_size=100)
        self.engine = LocalEngine(self.model, slots=1, pack_bytes=0)
        self.engine.update(0)
        self.lock = threading.Lock()
        self.answered = 0

    def load(self, directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        with self.lock, torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in found:
                    parameter.copy_(found[name])
            self.engine.update(0)

    def complete(self, prompt: list[int], parameters: dict[str, Any]) -> tuple[list[int], list[float]]:
        sampling = Sampling(parameters["temperature"], stop_ids=parameters["stop_token_ids"])
        with self.lock:
            self.answered += 1
            request = Request(prompt, parameters["max_tokens"], parameters["seed"])
            found = self.engine.generate([request], sampling)[0]
        return found.ids, found.logprobs


@pytest.fixture
def servers():
    made = []
    for _ in range(2):
        serving = Serving()
        server = StandIn(serving.complete)
        server.load = serving.load
        made.append((server, serving))
    yield made
    for server, _ in made:
        server.close()


def urls(servers) -> tuple[str, ...]:
    return (*SHORT, "--engine.type", "vllm", "--engine.urls", ",".join(server.url for server, _ in servers))


def rollouts(run_dir: Path) -> list[dict]:
    return [row for path in sorted((run_dir / "rollouts").iterdir()) for row in read(path)]


def test_two_servers_give_an_on_policy_run_that_resumes(servers, tmp_path):
    """Both serve every version, requests are spread over them, and the resumed weights are there before the first request."""
    flags = urls(servers)
    rl(tmp_path / "whole", *flags)
    assert all(row["mismatch_max"] < 1e-4 and row["ratio_deviation_max"] < 1e-4 for row in metrics(tmp_path / "whole"))
    probes = 2 * 3  # two loads of each server are held against the trainer's
    shares = [serving.answered for _, serving in servers]
    assert sum(shares) >= STEPS * GROUPS * SAMPLES and min(shares) > probes + STEPS
    assert all(row["versions"] == [row["step"] - 1] * 2 for row in rollouts(tmp_path / "whole"))

    rl(tmp_path / "run", *flags, "--stop-step", "3")
    for server, _ in servers:
        server.calls.clear()
    rl(tmp_path / "run", *flags, "--resume")
    for server, _ in servers:
        labels = [body["weight_version"] for path, _, body in server.calls if path == "/finish_weight_update"]
        assert [label.partition(":")[2] for label in labels] == ["3", "4"]
        assert server.paths().index("/finish_weight_update") < server.paths().index("/inference/v1/generate")
    assert differences(checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path / "run", STEPS)) == ""
    assert rollouts(tmp_path / "whole") == rollouts(tmp_path / "run")
    assert not list((tmp_path / "run" / "weights-served").glob("version_*"))


def test_the_same_tokens_as_from_the_engine_in_the_process(servers, tmp_path):
    """Seeds are addressed by prompt and sample, whoever draws."""
    rl(tmp_path / "servers", *urls(servers), "--max-steps", "1")
    rl(tmp_path / "local", *SHORT, "--max-steps", "1")
    texts = [[row["completion"] for row in rollouts(tmp_path / name)] for name in ("servers", "local")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lag", [1, 3])
def test_generating_ahead_every_prompt_is_trained_once_over_resumes(lag, servers, tmp_path):
    flags = (*urls(servers), "--rl.max-lag", str(lag))
    for server, _ in servers:
        server.delay_seconds = 0.002
    rl(tmp_path / "run", *flags, "--stop-step", "2")
    rl(tmp_path / "run", *flags, "--resume", "--stop-step", "3")
    rl(tmp_path / "run", *flags, "--resume")
    rows = rollouts(tmp_path / "run")
    assert Counter(row["number"] for row in rows) == dict.fromkeys(range(STEPS * GROUPS), SAMPLES)
    for row in rows:
        assert row["step"] - 1 - lag <= row["versions"][0] <= row["versions"][1] <= row["step"] - 1
    assert all(row["staleness_max"] <= lag for row in metrics(tmp_path / "run"))


def test_a_failing_server_costs_nothing_and_a_missing_one_is_named(servers, tmp_path):
    flags = urls(servers)
    servers[0][0].trouble["/inference/v1/generate"] = [500, "drop", 503] * 3
    rl(tmp_path / "run", *flags, "--max-steps", "2")
    assert Counter(row["number"] for row in rollouts(tmp_path / "run")) == dict.fromkeys(range(2 * GROUPS), SAMPLES)
    servers[1][0].close()
    with pytest.raises(LaunchError, match=f"{servers[1][0].url}/health did not answer"):
        rl(tmp_path / "other", *flags, "--engine.start-seconds", "0.5")


def test_a_server_of_another_model_ends_the_run_before_it_trains(servers, tmp_path):
    for server, _ in servers:
        server.load = lambda directory: None  # takes the weights and does nothing with them
    with pytest.raises(TrainingError, match="does not serve the model that trains"):
        rl(tmp_path / "run", *urls(servers))
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run")
