"""Corpora in memory with chosen lengths, for tests of order, packing and layout."""

from collections.abc import Sequence

import numpy as np

from trainer.core.files import xxh3_bytes
from trainer.data.batch import GlobalBatch, global_row_ids
from trainer.data.corpus import Corpus
from trainer.data.store import StoreMeta


class ListedDocuments:
    """One source whose document d has the given ids and mask, in row d."""

    def __init__(self, documents: Sequence[tuple[Sequence[int], Sequence[int]]], name: str = "listed"):
        self.ids = np.array([token for ids, _ in documents for token in ids], np.int32)
        self.mask = np.array([flag for _, mask in documents for flag in mask], np.uint8)
        self.lengths = np.array([len(ids) for ids, _ in documents], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.rows = np.arange(len(documents))
        self.supervised = np.array([sum(mask[1:]) for _, mask in documents], np.int64)
        self.meta = StoreMeta(
            source=name,
            documents=len(documents),
            tokens=self.ids.size,
            supervised_tokens=int(self.supervised.sum()),
            bad_rows=0,
            bad_examples=(),
            fingerprint=xxh3_bytes(self.ids.tobytes() + self.mask.tobytes() + self.lengths.tobytes()),
        )


def corpus_of(lengths: Sequence[int], *more: Sequence[int], seq_len: int = 2048) -> Corpus:
    """A corpus with one source per list of lengths; document d of source s holds the token 1000 s + d throughout."""
    sources = [
        ListedDocuments([([1000 * source + d] * n, [1] * n) for d, n in enumerate(of_source)], name=f"source{source}")
        for source, of_source in enumerate((lengths, *more))
    ]
    return Corpus(sources, seq_len)


def row_ids(batches: Sequence[GlobalBatch]) -> list[list[str]]:
    """Sample ids by row of a global batch, given each rank's part of it."""
    return global_row_ids([[micro.ids for micro in batch.micro_batches] for batch in batches])


def batch_ids(batch: GlobalBatch) -> list[str]:
    """Sample ids of a batch loaded by a single rank, flat."""
    return [sample for row in row_ids([batch]) for sample in row]
