"""The packing plan: complete, within bounds, as good as best-fit-decreasing, and the same everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.corpora import corpus_of
from trainer.config.data import DataConfig
from trainer.data.epoch import plan_epoch
from trainer.data.packing import pack_rows


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """The textbook algorithm; returns the tokens in each row."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, used in enumerate(rows) if used + length <= capacity]
        if fitting:
            rows[max(fitting, key=lambda index: rows[index])] += length
        else:
            rows.append(length)
    return rows


def chat_lengths(documents: int, mean: float = 400, sigma: float = 0.8, cap: int = 2048) -> np.ndarray:
    draws = np.random.default_rng(0).normal(np.log(mean) - sigma**2 / 2, sigma, documents)
    return np.clip(np.rint(np.exp(draws)), 2, cap).astype(np.int64)


@given(st.integers(1, 40).flatmap(lambda cap: st.tuples(st.just(cap), st.lists(st.integers(1, cap), max_size=80))))
def test_plan_is_best_fit_decreasing(case):
    capacity, lengths = case
    row_of, rows = pack_rows(np.array(lengths, np.int64), capacity)
    assert row_of.shape == (len(lengths),)
    used = np.bincount(row_of, weights=lengths, minlength=rows) if lengths else np.zeros(0)
    assert len(used) == rows and (used <= capacity).all() and (used > 0).all()
    # Ties aside the algorithm is deterministic, so the multiset of filled rows is that of the textbook version.
    assert sorted(used) == sorted(best_fit_decreasing(lengths, capacity))


def test_chat_distribution_is_packed_to_999_per_mille():
    lengths = chat_lengths(50_000)
    row_of, rows = pack_rows(lengths, 2048)
    assert np.bincount(row_of, weights=lengths).max() <= 2048
    assert lengths.sum() / (rows * 2048) >= 0.999


@pytest.mark.parametrize("bad", [0, 9])
def test_lengths_outside_the_row_are_refused(bad):
    with pytest.raises(ValueError, match="must lie in"):
        pack_rows(np.array([3, bad]), 8)


@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=60),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_document_is_in_exactly_one_row_of_an_epoch(lengths, epoch, shuffle, pack):
    corpus = corpus_of(lengths, seq_len=16)
    config = DataConfig(seq_len=16, shuffle=shuffle, pack=pack)
    plan = plan_epoch(corpus, config, None, seed=3, epoch=epoch)
    assert sorted(plan.documents) == list(range(len(corpus)))
    assert plan.offsets[0] == 0 and plan.offsets[-1] == len(corpus) and (np.diff(plan.offsets) > 0).all()
    for row in plan.rows(0, len(plan)):
        assert corpus.lengths[row].sum() <= 16
        assert pack or row.size == 1
    again = plan_epoch(corpus, config, None, seed=3, epoch=epoch)
    assert plan.digest == again.digest


def test_rows_are_not_sorted_by_length():
    corpus = corpus_of(list(chat_lengths(2000, mean=40, cap=200)), seq_len=200)
    plan = plan_epoch(corpus, DataConfig(seq_len=200), None, seed=0, epoch=0)
    longest = np.array([corpus.lengths[row].max() for row in plan.rows(0, len(plan))])
    halves = longest[: len(longest) // 2].mean(), longest[len(longest) // 2 :].mean()
    assert abs(halves[0] - halves[1]) < 0.15 * longest.mean()  # opened in order, the first half would be twice as long
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.15


def test_without_shuffle_rows_follow_the_documents():
    corpus = corpus_of([10, 6, 10, 6, 16], seq_len=16)
    plan = plan_epoch(corpus, DataConfig(seq_len=16, shuffle=False), None, seed=0, epoch=5)
    assert [row.tolist() for row in plan.rows(0, len(plan))] == [[0, 1], [2, 3], [4]]
