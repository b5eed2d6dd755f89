"""The rows of an epoch: which documents share a row, and in which order the rows come."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import xxhash

from trainer.config.data import DataConfig
from trainer.core.rng import numpy_generator
from trainer.data.corpus import Corpus, Int64
from trainer.data.mixture import epoch_documents
from trainer.data.packing import pack_rows


@dataclass(frozen=True)
class EpochPlan:
    """Rows of one epoch, in the order in which they are trained on.

    Attributes:
        documents: int64 [documents], corpus numbers of all documents, row by row.
        offsets: int64 [rows + 1], where each row begins in `documents`.
    """

    documents: Int64
    offsets: Int64

    def __len__(self) -> int:
        return self.offsets.size - 1

    def rows(self, start: int, end: int) -> list[Int64]:
        """Returns the documents of each of the rows [start, end)."""
        bounds = self.offsets[start : end + 1].tolist()
        return [self.documents[first:last] for first, last in pairwise(bounds)]

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan."""
        digest = xxhash.xxh3_64(self.documents.astype("<i8").tobytes())
        digest.update(self.offsets.astype("<i8").tobytes())
        return digest.hexdigest()


def plan_epoch(
    corpus: Corpus, config: DataConfig, weights: Sequence[float] | None, *, seed: int, epoch: int
) -> EpochPlan:
    """Returns the plan of `epoch`, a pure function of its arguments: the same on every rank and after every resume."""
    documents = epoch_documents(corpus, weights, seed=seed, epoch=epoch, shuffle=config.shuffle)
    if not config.pack:
        return EpochPlan(documents, np.arange(documents.size + 1))
    row_of, rows = pack_rows(corpus.lengths[documents], config.seq_len)
    # Rows were opened longest document first; in that order batches would be sorted by length.
    if config.shuffle:
        place = numpy_generator(seed, "rows", epoch).permutation(rows)
    else:  # by the first document in each row
        _, first = np.unique(row_of, return_index=True)
        place = np.empty(rows, np.int64)
        place[np.argsort(first)] = np.arange(rows)
    row_of = place[row_of]
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=offsets[1:])
    return EpochPlan(documents[np.argsort(row_of, kind="stable")], offsets)
