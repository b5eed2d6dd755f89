"""The documents of all sources as training sees them: cut at seq_len, the ones without a target left out."""

import json
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trainer.core.files import xxh3_bytes
from trainer.core.log import logger
from trainer.data.store import Documents
from trainer.errors import DataError

Int64 = NDArray[np.int64]


class Corpus:
    """A table of documents over the token stores of one or more sources. Documents are numbered 0, 1, 2, ….

    Attributes:
        sources: int64 [documents], index of each document's source.
        rows: int64 [documents], its row number there.
        lengths: int64 [documents], tokens kept, at most `seq_len`.
        supervised: int64 [documents], how many of them are targets; at least one.
        seq_len: where documents were cut, in tokens.
        fingerprint: hash of what the documents are (not where they lie, nor where they are cut).
    """

    def __init__(self, stores: Sequence[Documents], seq_len: int, *, name: str = "data.sources"):
        """Cuts the documents of `stores` at `seq_len` and logs what is there.

        Args:
            stores: tokenized documents of each source, in the order of the config.
            seq_len: tokens of a row.
            name: the config key the sources came from, for messages.

        Raises:
            DataError: a source has no document with a supervised token (left).
        """
        self.stores = tuple(stores)
        self.seq_len = seq_len
        self.fingerprint = xxh3_bytes(json.dumps([store.meta.fingerprint for store in stores]).encode())
        cut = [_cut(store, seq_len) for store in self.stores]
        self._report(cut, name)
        kept = [np.flatnonzero(supervised) for _, supervised in cut]
        self.sources = np.repeat(np.arange(len(kept)), [indices.size for indices in kept])
        self.rows = _joined([store.rows[indices] for store, indices in zip(self.stores, kept, strict=True)])
        self.starts = _joined([store.starts[indices] for store, indices in zip(self.stores, kept, strict=True)])
        self.lengths = _joined([lengths[indices] for (lengths, _), indices in zip(cut, kept, strict=True)])
        self.supervised = _joined([supervised[indices] for (_, supervised), indices in zip(cut, kept, strict=True)])

    def __len__(self) -> int:
        return self.lengths.size

    def sample_ids(self, documents: Int64) -> list[str]:
        """Returns "<source index>:<row number in that source>" of each document."""
        pairs = zip(self.sources[documents].tolist(), self.rows[documents].tolist(), strict=True)
        return [f"{source}:{row}" for source, row in pairs]

    def select(self, documents: Int64) -> Self:
        """Returns the corpus of only these documents, in the given order; the fingerprint tells it from the whole."""
        chosen = object.__new__(type(self))
        chosen.stores, chosen.seq_len = self.stores, self.seq_len
        for column in ("sources", "rows", "starts", "lengths", "supervised"):
            setattr(chosen, column, getattr(self, column)[documents])
        which = np.stack([chosen.sources, chosen.rows]).tobytes()
        chosen.fingerprint = xxh3_bytes(self.fingerprint.encode() + which)
        return chosen

    def gather(self, documents: Int64) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns token ids int64 [tokens] and mask bool [tokens] of the documents, one after the other."""
        lengths = self.lengths[documents]
        total = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(total) + np.repeat(self.starts[documents] - begins, lengths)
        if len(self.stores) == 1:
            store = self.stores[0]
            return store.ids[positions].astype(np.int64), store.mask[positions].astype(np.bool_)
        ids, mask = np.empty(total, np.int64), np.empty(total, np.bool_)
        source_of_token = np.repeat(self.sources[documents], lengths)
        for source in np.unique(source_of_token):
            here = source_of_token == source
            ids[here] = self.stores[source].ids[positions[here]]
            mask[here] = self.stores[source].mask[positions[here]]
        return ids, mask

    def _report(self, cut: list[tuple[Int64, Int64]], name: str) -> None:
        lines, empty = [], []
        for index, (store, (lengths, supervised)) in enumerate(zip(self.stores, cut, strict=True)):
            meta = store.meta
            kept = supervised > 0
            line = (
                f"{name}[{index}] {meta.source}: {int(kept.sum()):,} documents, {int(lengths[kept].sum()):,} tokens, "
                f"{int(supervised.sum()):,} supervised"
            )
            if dropped := int((~kept).sum()):
                line += f"; left out {dropped:,} documents without a supervised token in their first {self.seq_len:,}"
            if shortened := int((kept & (store.lengths > self.seq_len)).sum()):
                lost = int((store.lengths - lengths)[kept].sum())
                line += f"; cut {shortened:,} documents at {self.seq_len:,} tokens, losing {lost:,}"
            lines.append(line)
            if not kept.any():
                empty.append(index)
        if empty:
            before = ", ".join(f"{meta.source}: {meta.supervised_tokens:,}" for meta in (s.meta for s in self.stores))
            listing = "\n  ".join(lines)
            raise DataError(
                f"nothing to train on in {', '.join(f'{name}[{index}]' for index in empty)}:\n  {listing}\n"
                f"Supervised tokens before cutting at data.seq_len = {self.seq_len}: {before}. If these are zero, no row "
                "has a message of a role in data.train_on, or the chat template marks none of it; if not, raise data.seq_len."
            )
        for line in lines:
            logger.info("{}", line)


def _joined(parts: list[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _cut(store: Documents, seq_len: int) -> tuple[Int64, Int64]:
    """Length and number of targets of each document when cut at `seq_len`. The first token is never a target."""
    lengths = np.minimum(store.lengths, seq_len)
    supervised = np.array(store.supervised)
    long = np.flatnonzero(store.lengths > seq_len)
    for document, start in zip(long, store.starts[long], strict=True):
        supervised[document] = store.mask[start + 1 : start + seq_len].sum()
    return lengths, supervised
