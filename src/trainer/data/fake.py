"""Synthetic documents for benchmarks: log-normal lengths, uniform token ids, everything supervised."""

import math

import numpy as np

from trainer.config.data import FakeConfig
from trainer.core.files import xxh3_bytes
from trainer.core.rng import numpy_generator
from trainer.data.store import StoreMeta

POOL_TOKENS = 1 << 22  # more tokens than this are not drawn: documents then share stretches of one pool


class FakeDocuments:
    """`documents` documents in memory, a pure function of (config, seed, purpose). Same attributes as a `TokenStore`."""

    def __init__(self, config: FakeConfig, *, seed: int, purpose: str, documents: int):
        lengths = numpy_generator(seed, "fake", purpose, "lengths")
        mu = math.log(config.mean_tokens) - config.sigma**2 / 2  # so that the mean, not the median, is mean_tokens
        drawn = np.rint(np.exp(lengths.normal(mu, config.sigma, documents))).astype(np.int64)
        self.lengths = np.maximum(drawn, 2)  # one token to read, one to predict
        total = int(self.lengths.sum())
        pool = max(min(total, POOL_TOKENS), int(self.lengths.max()))
        self.ids = numpy_generator(seed, "fake", purpose, "ids").integers(0, config.vocab_size, pool, dtype=np.int32)
        self.mask = np.ones(pool, np.uint8)
        if total <= pool:
            self.starts = np.cumsum(self.lengths) - self.lengths
        else:
            room = pool - self.lengths + 1
            self.starts = numpy_generator(seed, "fake", purpose, "starts").integers(0, room, documents)
        self.rows = np.arange(documents)
        self.supervised = self.lengths - 1
        content = b"".join(part.tobytes() for part in (self.ids, self.starts, self.lengths))
        self.meta = StoreMeta(
            source="fake",
            documents=documents,
            tokens=total,
            supervised_tokens=total - documents,
            bad_rows=0,
            bad_examples=(),
            fingerprint=xxh3_bytes(content),
        )
