"""What it costs to give a vLLM server new weights: seconds and bytes, from the model that trains to the server's answer."""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.harness import CACHE, ROOT
from benchmarks.options import Options
from benchmarks.results import Result, Target
from trainer.config.model import ModelConfig
from trainer.config.rl import EngineConfig
from trainer.core.distributed import world_from_env
from trainer.core.files import write_new
from trainer.models.base import CausalLM
from trainer.models.build import build_model
from trainer.rl.types import Sampling
from trainer.rl.vllm.engine import VLLMEngine
from trainer.rl.vllm.publish import Publication, WeightsFolder
from trainer.rl.vllm.server import DEFAULT_PYTHON

SIZES = ((256, 6, 4096), (512, 8, 32768))
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / DEFAULT_PYTHON))
PORT = 8127
PROVED = 2  # updates after which the log-probabilities are held against the trainer's: those are not measured


def run(options: Options) -> Result:
    """Measures writing the weights beside a plain write of the same bytes, and with a server until it serves them.

    Where there is no environment with vLLM (`make vllm`, or VLLM_PYTHON), only the writing is measured.
    """
    served = PYTHON.exists() and not options.smoke
    settings = {"rounds": options.rounds, "dtype": "float32", "vllm": _version() if served else None}
    result = Result("publication", settings)
    for hidden_size, layers, vocab_size in ((32, 1, 256),) if options.smoke else SIZES:
        case = Case(hidden_size, layers, vocab_size, seq_len=256, rows=1, micro_rows=1, documents=1)
        config = ModelConfig(name=str(case.model_dir()), random_init=True, dtype="float32")
        model = build_model(config, mesh=None, device=torch.device("cpu"), seed=0)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=CACHE) as folder:
            measure = _served if served else _written
            found = measure(model, case, Path(folder), options.rounds)
        result.cases.append({"case": f"d{hidden_size}-l{layers}-v{vocab_size}"} | found)
        result.targets += [
            Target(f"{key.replace('_', ' ')}, d{hidden_size}-l{layers}-v{vocab_size}", value)
            for key, value in found.items()
        ]
    return result


def _version() -> str:
    code = "import vllm; print(vllm.__version__)"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def _written(model: CausalLM, case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    weights = WeightsFolder(folder / "weights")
    weights.clear()
    found, _ = _beside_a_plain_write(
        lambda version: weights.publish(model, version, torch.float32), range(rounds), folder
    )
    return found


def _served(model: CausalLM, case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """The server answers with the new weights once `update` returns."""
    started = time.perf_counter()
    engine = VLLMEngine(
        model,
        EngineConfig(type="vllm", launch=True, python=str(PYTHON), port=PORT),
        run_dir=folder,
        world=world_from_env(),
        source=case.model_dir(),
        sampling=Sampling(1.0),
        seq_len=case.seq_len,
    )
    start_seconds = time.perf_counter() - started

    def update(version: int) -> Publication:
        engine.update(version)
        assert engine.publication is not None
        return engine.publication

    try:
        for version in range(PROVED):
            update(version)
        found, seconds = _beside_a_plain_write(update, range(PROVED, PROVED + rounds), folder)
    finally:
        engine.close()
    return found | {"seconds_until_served": seconds, "seconds_to_start_the_server": round(start_seconds, 1)}


def _beside_a_plain_write(
    publish: Callable[[int], Publication], versions: Iterable[int], folder: Path
) -> tuple[dict[str, Any], float]:
    """Publishes each version and, in turn, writes as many bytes with fsync. Returns what was found, and the median seconds
    of a whole call."""
    calls, publications, plain = [], [], []
    for version in versions:
        began = time.perf_counter()
        publications.append(publish(version))
        calls.append(time.perf_counter() - began)
        data = bytes(publications[-1].weights_bytes)
        began = time.perf_counter()
        write_new(folder / f"plain_{version}", data)
        plain.append(time.perf_counter() - began)
        (folder / f"plain_{version}").unlink()
    found = {
        "weights_bytes": publications[-1].weights_bytes,
        "seconds_to_write": round(statistics.median(publication.seconds for publication in publications), 4),
        "seconds_of_a_plain_write": round(statistics.median(plain), 4),
    }
    return found, round(statistics.median(calls), 4)
