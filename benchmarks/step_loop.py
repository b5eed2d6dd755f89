"""Worker: our run, as `trainer sft` would start it, and two bare loops, a step of each in turn.

All in one process, so that whatever the machine does at the time meets all of them. An order is for rounds; in a round each
takes one step, ours first, the bare ones in alternating order. The answer's seconds are of the whole rounds; its series tell
each one's, step by step.

Everything that our loop does in a step is measured: reading and laying out the batch, forward and backward, clipping, the
optimizer, the schedule, the row in metrics.jsonl, the console line that is due, scheduled garbage collection. A bare loop's batch
lies ready in memory when its step begins.

All have the same documents, each in an order of its own: on CPU some operations are compiled at their first use for each
shape, and whoever saw a batch first would pay for the others.
"""

import json
import sys
import time
from collections.abc import Mapping

import torch

from benchmarks.bare_loop import BareLoop, batches_in_order, chunked_loss, full_loss
from benchmarks.cases import Case
from benchmarks.gate import Gate
from benchmarks.our_loop import GatedLoader, train
from trainer.config.run import SFTConfig
from trainer.data.batch import GlobalBatch
from trainer.train.run import Run
from trainer.train.supply import BatchSource


class Rounds(GatedLoader):
    """Our run's loader: where the loop asks for its next batch, its step is over and the bare loops take theirs."""

    def __init__(self, loader: BatchSource, bare: Mapping[str, tuple[BareLoop, BatchSource]], gate: Gate):
        super().__init__(loader, gate)
        self._bare = bare
        self._started: tuple[float, float] | None = None  # of our step; wall and CPU seconds
        self._tokens = self._count = 0

    def next_batch(self) -> GlobalBatch:
        if self._started is not None:
            self._note("ours", self._started, self._tokens)
            for name in list(self._bare)[:: 1 if self._count % 2 else -1]:
                loop, batches = self._bare[name]
                batch = batches.next_batch()
                started = _now()
                loop.step(batch)
                self._note(name, started, batch.tokens)
        self._count += 1
        self._gate.before_step()
        self._started = _now()
        batch = self._loader.next_batch()
        self._tokens = batch.tokens
        return batch

    def _note(self, name: str, started: tuple[float, float], tokens: int) -> None:
        seconds, cpu_seconds = (end - start for end, start in zip(_now(), started, strict=True))
        found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
        self._gate.append(**{f"{name}: {quantity}": value for quantity, value in found.items()})


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    gate = Gate(torch.set_num_threads)

    def rounds(run: Run) -> Rounds:
        assert isinstance(run.config, SFTConfig)
        losses = {"bare chunked": chunked_loss, "bare full logits": full_loss}
        bare = {
            name: (BareLoop(run.config, loss), batches_in_order(run.config, run.config.seed + 1 + number))
            for number, (name, loss) in enumerate(losses.items())
        }
        return Rounds(run.loader, bare, gate)

    train(Case.from_arguments(json.loads(sys.argv[1])), rounds)


if __name__ == "__main__":
    main()
