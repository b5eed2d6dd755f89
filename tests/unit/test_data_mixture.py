"""Mixtures: exact shares, no repetition before a source is exhausted, a function of seed and epoch alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.corpora import corpus_of
from trainer.config.data import DataConfig, SourceConfig
from trainer.data.loader import BatchLoader
from trainer.data.mixture import epoch_documents, mixture_weights, shares
from trainer.errors import DataError


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up_and_are_within_one_of_exact(total, weights):
    counts = shares(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1


def test_shares_are_the_largest_remainders():
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(7, [0.5, 0.3, 0.2]) == [4, 2, 1]  # 3.5, 2.1, 1.4


def test_without_weights_every_document_comes_once_an_epoch():
    corpus = corpus_of([5] * 7, [5] * 3)
    for epoch in range(3):
        order = epoch_documents(corpus, None, seed=0, epoch=epoch, shuffle=True)
        assert sorted(order) == list(range(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_weighted_epochs_have_exact_shares_and_exhaust_a_source_before_repeating(shuffle):
    corpus = corpus_of([5] * 5, [5] * 11)  # 16 documents an epoch, 12 of them from the first source
    drawn = {0: [], 1: []}
    for epoch in range(11):
        order = epoch_documents(corpus, [3, 1], seed=0, epoch=epoch, shuffle=shuffle)
        assert Counter(corpus.sources[order]) == {0: 12, 1: 4}
        for source in (0, 1):
            drawn[source].append(Counter(order[corpus.sources[order] == source].tolist()))
    for source, size in ((0, 5), (1, 11)):
        total: Counter = Counter()
        for counts in drawn[source]:
            total += counts
            assert max(total.values()) - min(total[d] for d in range(16) if corpus.sources[d] == source) <= 1
        assert len(total) == size


def test_order_is_a_function_of_seed_and_epoch():
    corpus = corpus_of([5] * 20, [5] * 30)

    def draw(seed, epoch):
        return tuple(epoch_documents(corpus, [1, 2], seed=seed, epoch=epoch, shuffle=True))

    assert draw(1, 4) == draw(1, 4)
    assert len({draw(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6


def test_without_shuffle_sources_alternate_by_their_shares():
    corpus = corpus_of([5] * 8, [5] * 4)
    order = epoch_documents(corpus, [2, 1], seed=0, epoch=0, shuffle=False)
    assert corpus.sources[order].tolist() == [0, 1, 0] * 4
    assert order[corpus.sources[order] == 0].tolist() == list(range(8))


def test_half_given_weights_are_refused_by_name():
    config = DataConfig(sources=(SourceConfig(path="a", weight=1), SourceConfig(path="b")))
    with pytest.raises(DataError, match=r"data.sources\[1\]: weight missing"):
        mixture_weights(config)


def test_weights_reach_the_loader_and_survive_a_resume():
    corpus = corpus_of([5] * 6, [5] * 30)
    config = DataConfig(
        sources=(SourceConfig(path="a", weight=1), SourceConfig(path="b", weight=1)), seq_len=8, pack=True, batch_size=4
    )
    loader = BatchLoader(corpus, config, seed=0, rank=0, world_size=1)
    assert loader.batches_in_epochs(2) == 18
    seen = [loader.next_batch() for _ in range(9)]
    ids = [sample for batch in seen for micro in batch.micro_batches for row in micro.ids for sample in row]
    assert Counter(sample.split(":")[0] for sample in ids) == {"0": 18, "1": 18}
    assert set(Counter(sample for sample in ids if sample.startswith("0:")).values()) == {3}
    resumed = BatchLoader(corpus, config, seed=0, rank=0, world_size=1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.next_batch().micro_batches[0].ids == loader.next_batch().micro_batches[0].ids
