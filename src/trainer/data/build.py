"""From the config to the training and the held-out documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.data import DataConfig, SourceConfig
from trainer.core.distributed import World, on_main, raise_together
from trainer.core.log import logger
from trainer.core.rng import numpy_generator
from trainer.data.corpus import Corpus
from trainer.data.fake import FakeDocuments
from trainer.data.mixture import mixture_weights
from trainer.data.store import TokenStore
from trainer.data.tokenize import tokenized
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAKE_VALIDATION_FRACTION = 0.05


@dataclass
class TrainData:
    train: Corpus
    val: Corpus | None
    """Held-out documents, or None where the config holds none out."""


def build_data(
    config: DataConfig, *, tokenizer: "PreTrainedTokenizerFast | None", seed: int, world: World
) -> TrainData:
    """Returns the documents of a run. Collective: rank 0 tokenizes into the cache, the others read it from there.

    Held-out documents are those of data.val_sources, or data.val_documents of the training documents, chosen by `seed`
    and taken out of the training corpus. Synthetic data has its own held-out documents.

    Raises:
        DataError: no source, an unreadable one, bad rows, nothing supervised, fewer documents than shall be held out.
    """
    if config.fake is not None:
        return _fake(config, seed)
    if not config.sources:
        raise DataError("no data: give [[data.sources]] tables, or [data.fake] for synthetic documents")
    if tokenizer is None:
        raise DataError("data.sources need a tokenizer: set model.tokenizer, or a model.name that has one")
    mixture_weights(config)  # an incomplete set of weights is told before an hour of tokenizing, not after
    train = Corpus(_stores(config.sources, config, tokenizer, world), config.seq_len)
    if config.val_sources:
        stores = _stores(config.val_sources, config, tokenizer, world)
        return TrainData(train, Corpus(stores, config.seq_len, name="data.val_sources"))
    if config.val_documents:
        return _hold_out(train, config.val_documents, seed)
    return TrainData(train, None)


def _hold_out(corpus: Corpus, count: int, seed: int) -> TrainData:
    if count >= len(corpus):
        raise DataError(f"data.val_documents = {count}, but the training sources have only {len(corpus)} documents")
    order = numpy_generator(seed, "validation").permutation(len(corpus))
    data = TrainData(corpus.select(np.sort(order[count:])), corpus.select(np.sort(order[:count])))
    for source, store in enumerate(corpus.stores):
        if not (data.train.sources == source).any():
            raise DataError(
                f"data.val_documents = {count} takes every document of data.sources[{source}] ({store.meta.source}); "
                "hold out fewer, or use data.val_sources"
            )
    logger.info("held out {:,} of {:,} documents for validation", count, len(corpus))
    return data


def _fake(config: DataConfig, seed: int) -> TrainData:
    assert config.fake is not None
    count = config.fake.documents
    held_out = config.val_documents or max(1, round(count * FAKE_VALIDATION_FRACTION))
    train = FakeDocuments(config.fake, seed=seed, purpose="train", documents=count)
    val = FakeDocuments(config.fake, seed=seed, purpose="validation", documents=held_out)
    return TrainData(
        Corpus([train], config.seq_len, name="data.fake"), Corpus([val], config.seq_len, name="data.fake validation")
    )


def _stores(
    sources: Sequence[SourceConfig], config: DataConfig, tokenizer: "PreTrainedTokenizerFast", world: World
) -> list[TokenStore]:
    return [_store(source, config, tokenizer, world) for source in sources]


def _store(source: SourceConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerFast", world: World) -> TokenStore:
    """Tokenizes on rank 0; a rank that does not see rank 0's folder (another node without a shared disk) does its own."""
    directory, fingerprint = on_main(_tokenized_directory, source, config, tokenizer)
    store, error = TokenStore.open(directory), None
    if store is None or store.meta.fingerprint != fingerprint:
        try:
            store = tokenized(source, config, tokenizer)
        except DataError as caught:
            error = caught
    raise_together(error, f"tokenizing {source.path}")
    assert store is not None
    found = store.meta.fingerprint
    if found != fingerprint:
        error = DataError(
            f"{source.path}: rank {world.rank} tokenized other documents ({found}) than rank 0 ({fingerprint}); "
            "the files or the tokenizer differ between nodes"
        )
    raise_together(error, f"comparing {source.path}")
    store.meta = replace(store.meta, source=source.path)  # it may have been made from a copy that lay elsewhere
    return store


def _tokenized_directory(
    source: SourceConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerFast"
) -> tuple[Path, str]:
    store = tokenized(source, config, tokenizer)
    return store.directory, store.meta.fingerprint
