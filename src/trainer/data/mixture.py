"""The documents of an epoch and their order, as a pure function of (seed, epoch)."""

from collections.abc import Sequence

import numpy as np

from trainer.config.data import DataConfig
from trainer.core.rng import numpy_generator
from trainer.data.corpus import Corpus, Int64
from trainer.errors import DataError


def mixture_weights(config: DataConfig) -> tuple[float, ...] | None:
    """Returns the weight of each source, or None if none has one.

    Raises:
        DataError: some sources have a weight and some have none.
    """
    weights = [] if config.fake else [source.weight for source in config.sources]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        missing = [f"data.sources[{index}]" for index, weight in enumerate(weights) if weight is None]
        raise DataError(f"{', '.join(missing)}: weight missing; give every source a weight, or none")
    return tuple(given)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Splits `total` in proportion to `weights`, by largest remainder (the earlier source wins a tie)."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: (counts[source] - exact[source], source))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts


def epoch_documents(corpus: Corpus, weights: Sequence[float] | None, *, seed: int, epoch: int, shuffle: bool) -> Int64:
    """Returns int64 [documents of the epoch]: the documents in the order in which they are drawn.

    Without weights every document comes once. With weights an epoch has as many documents as the corpus, and each source
    contributes its share of them, walking through its own documents without end, in a new order on every pass: no
    document comes again before all others of its source have been seen, also across epochs.
    """
    if weights is None:
        documents = np.arange(len(corpus))
    else:
        documents = _mixed(corpus, weights, seed, epoch, shuffle)
    return numpy_generator(seed, "shuffle", epoch).permutation(documents) if shuffle else documents


def _mixed(corpus: Corpus, weights: Sequence[float], seed: int, epoch: int, shuffle: bool) -> Int64:
    parts, places = [], []
    for source, count in enumerate(shares(len(corpus), weights)):
        own = np.flatnonzero(corpus.sources == source)
        position, end = epoch * count, (epoch + 1) * count
        while position < end:
            number, offset = divmod(position, own.size)
            taken = min(end - position, own.size - offset)
            order = numpy_generator(seed, "mixture", source, number).permutation(own) if shuffle else own
            parts.append(order[offset : offset + taken])
            position += taken
        places.append((np.arange(count) + 0.5) / max(count, 1))
    # Spread every source evenly over the epoch, for shuffle = false; a shuffle follows otherwise.
    return np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]
