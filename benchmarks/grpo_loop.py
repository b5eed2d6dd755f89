"""Worker: our GRPO run, as `trainer rl` would start it. The gate stands where the loop asks for its next batch.

Everything that a step does is measured: prompts, generation, scoring in its own process, advantages, rows, forward and
backward, the optimizer, metrics and the readable rollouts on disk.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import tomli_w
import torch

from benchmarks.cases import Case
from benchmarks.gate import Gate, Stopped
from trainer.config.load import load_config
from trainer.config.run import RLConfig
from trainer.rl.batches import RolloutBatches
from trainer.rl.rows import RolloutBatch
from trainer.rl.supply import RLSupply
from trainer.train import setup
from trainer.train.loop import fit
from trainer.train.run import Run


class GatedBatches:
    """Batches that wait at the gate before they are made."""

    def __init__(self, run: Run, batches: RolloutBatches, gate: Gate, *, saves: bool):
        self._run, self._batches, self._gate, self._saves = run, batches, gate, saves

    def next_batch(self) -> RolloutBatch:
        if self._saves:
            self._save()
        self._gate.before_step()
        return self._batches.next_batch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def _save(self) -> None:
        """Writes a checkpoint of what is here between two steps, and notes what that took."""
        started = time.perf_counter()
        self._run.save()
        seconds = time.perf_counter() - started
        checkpoints = sorted((Path(self._run.config.output_dir) / "checkpoints").glob("step_*"))
        files = [file.stat().st_size for path in checkpoints[-1:] for file in path.rglob("*") if file.is_file()]
        waiting = len(self._batches.source.buffer.ready) + len(self._batches.source.batch.groups)
        self._gate.note(save_seconds=seconds, save_bytes=float(sum(files)), groups=float(waiting))


def run_config(arguments: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """Returns the config of the run, whose policy stays as random as it is: lengths do not drift."""
    case = Case.from_arguments(arguments["case"])
    return {
        "output_dir": str(output_dir),
        "overwrite": True,
        "max_steps": 10**6,
        "model": {
            "name": str(case.model_dir()),
            "tokenizer": arguments["tokenizer"],
            "random_init": True,
            "dtype": "float32",
        },
        "data": {"seq_len": case.seq_len, "micro_batch_size": case.micro_rows},
        "rl": {key: arguments[key] for key in ("prompts", "samples", "max_new_tokens", "max_lag")},
        "envs": [{"name": arguments["environment"]}],
        "val": {"interval": 0},
        "optim": {"lr": 1e-6},
        "scheduler": {"type": "constant", "warmup_steps": 0},
        "ckpt": {"interval": 0, "at_end": False, "export_weights": False, "keep_last": 1},
        "log": {"level": "error", "progress": "off", "interval": 10**6},
        "runtime": {"device": "cpu"},
    }


def main() -> None:
    arguments = json.loads(sys.argv[1])
    gate = Gate(torch.set_num_threads)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(tomli_w.dumps(run_config(arguments, Path(folder) / "run")))
        try:
            with setup.start(load_config(RLConfig, ["@", str(path)]), RLSupply) as run:
                batches = cast(RolloutBatches, run.supply.batches)
                gated = GatedBatches(run, batches, gate, saves=arguments["saves"])
                run.supply.batches = gated  # type: ignore[assignment]
                fit(run)
        except Stopped:
            pass


if __name__ == "__main__":
    main()
