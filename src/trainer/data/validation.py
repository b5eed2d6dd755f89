"""Held-out batches: the same ones, in the same order, at every validation."""

from collections.abc import Sequence

from trainer.config.data import DataConfig, ValConfig
from trainer.data.batch import GlobalBatch, assemble
from trainer.data.corpus import Corpus
from trainer.data.loader import BatchSequence


class ValidationBatches(Sequence[GlobalBatch]):
    """The batches of one pass over a corpus; can be iterated over again and again. Assembled when asked for."""

    def __init__(self, sequence: BatchSequence, limit: int):
        self._sequence = sequence
        plan, size = sequence.plan(0), sequence.config.batch_size
        rows = plan.rows(0, len(plan))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._batches = batches[:limit] if limit else batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> GlobalBatch:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        spec = self._sequence.spec(self._batches[index], index=index, epoch=0, epoch_end=index == len(self) - 1)
        return assemble(self._sequence.corpus, spec, pack=self._sequence.config.pack).unpack()


def validation_batches(
    corpus: Corpus, config: DataConfig, val: ValConfig, *, rank: int, world_size: int
) -> ValidationBatches:
    """Returns this rank's part of the held-out batches, in the corpus's order: at most `val.batches` of them, 0 = all."""
    fixed = config.model_copy(update={"shuffle": False})
    return ValidationBatches(BatchSequence(corpus, fixed, seed=0, rank=rank, world_size=world_size), val.batches)
