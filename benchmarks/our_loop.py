"""Worker: our run, as `trainer sft` would start it. The gate stands where the loop asks for its next batch.

Everything that the loop does in a step is measured: reading and laying out the batch, forward and backward, clipping, the
optimizer, the schedule, the row in metrics.jsonl, the console line that is due, scheduled garbage collection.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from benchmarks.cases import Case
from benchmarks.gate import Gate, Stopped
from trainer.config.load import load_config
from trainer.config.run import SFTConfig
from trainer.data.batch import GlobalBatch
from trainer.sft.supply import supply
from trainer.train import setup
from trainer.train.cross_entropy import cross_entropy
from trainer.train.loop import fit
from trainer.train.run import Run
from trainer.train.supply import BatchSource


class GatedLoader:
    """A loader that waits at the gate before it hands out a batch."""

    def __init__(self, loader: BatchSource, gate: Gate):
        self._loader, self._gate = loader, gate

    def next_batch(self) -> GlobalBatch:
        self._gate.before_step()
        batch = self._loader.next_batch()
        self._gate.count(batch.tokens)
        return batch

    def settle(self) -> None:
        self._loader.settle()

    def close(self) -> None:
        self._loader.close()


def train(case: Case, batches: Callable[[Run], Any]) -> None:
    """Trains as `trainer sft` would until there is no further order; `batches` makes a loader that has no state."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(tomli_w.dumps(case.run_config(Path(folder) / "run")))
        loaded = load_config(SFTConfig, ["@", str(path)])
        loss_function = partial(cross_entropy, chunk_tokens=loaded.config.model.loss_chunk_tokens)
        with suppress(Stopped), setup.start(loaded, supply(loss_function)) as run:
            run.supply.batches = batches(run)
            fit(run)


def main() -> None:
    gate = Gate(torch.set_num_threads)
    train(Case.from_arguments(json.loads(sys.argv[1])), lambda run: GatedLoader(run.loader, gate))


if __name__ == "__main__":
    main()
