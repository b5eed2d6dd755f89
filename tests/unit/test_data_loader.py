"""One global sequence of batches: the same for any ranks, workers and micro-batches, and after any resume."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import batch_ids, corpus_of, row_ids
from trainer.config.data import DataConfig, SourceConfig
from trainer.data.corpus import Corpus
from trainer.data.loader import READ_AHEAD_BATCHES, READ_AHEAD_TOKENS, BatchLoader
from trainer.errors import CheckpointMismatch, DataError


def config_of(**settings) -> DataConfig:
    return DataConfig(**{"seq_len": 16, "pack": False, "batch_size": 4, **settings})


def loaders_of(corpus, config, world_size=1, seed=1, state=None, **kwargs):
    loaders = [
        BatchLoader(corpus, config, seed=seed, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))  # as a checkpoint would carry it
    return loaders


def run(corpus, config, batches, **kwargs):
    """Global rows of sample ids of the next batches, and the loader's state after them."""
    loaders = loaders_of(corpus, config, **kwargs)
    seen = [row_ids([loader.next_batch() for loader in loaders]) for _ in range(batches)]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    for loader in loaders:
        loader.close()
    return seen, states[0]


def flat(batches):
    return [sample for batch in batches for row in batch for sample in row]


def assert_resumes(corpus, config, at, total, **other):
    """A run stopped after `at` batches and resumed, possibly with `other` ranks, is the uninterrupted one."""
    reference, _ = run(corpus, config, total)
    first, state = run(corpus, config, at)
    rest, _ = run(corpus, other.pop("config", config), total - at, state=state, **other)
    assert first + rest == reference
    assert flat(rest) != flat(reference[: total - at])  # what a loader that ignores the state would have given
    return state


def test_without_load_state_dict_the_ids_differ():
    corpus, config = corpus_of([5] * 20), config_of()
    reference, _ = run(corpus, config, 5)
    fresh, _ = run(corpus, config, 2)
    assert fresh == reference[:2] and fresh != reference[3:5]


def test_c2_skipped_micro_batches_are_steps_times_accumulation():
    corpus = corpus_of([5] * 40)  # 40 micro-batches of one row an epoch, accumulation 4
    config = config_of(batch_size=4, micro_batch_size=1)
    reference, _ = run(corpus, config, 10)
    _, state = run(corpus, config, 5)
    assert state["cursor"]["row"] == 20
    (loader,) = loaders_of(corpus, config, state=state)
    assert loader.next_batch().micro_batches[0].ids == [flat(reference)[20:21]]  # the 21st


def test_c3_cursor_of_a_long_run_is_an_epoch_and_a_row():
    corpus = corpus_of([5] * 100)
    config = config_of(batch_size=4, micro_batch_size=1)
    (loader,) = loaders_of(corpus, config)
    assert loader.batches_in_epochs(30) == 750
    for _ in range(500):
        loader.next_batch()
    cursor = loader.state_dict()["cursor"]
    assert (cursor["epoch"], cursor["row"], cursor["batch"]) == (20, 0, 500)
    (resumed,) = loaders_of(corpus, config, state=loader.state_dict())
    rest = [resumed.next_batch() for _ in range(250)]
    assert [rest[0].index, rest[0].epoch, rest[-1].index, rest[-1].epoch] == [500, 20, 749, 29]
    assert rest[-1].epoch_end and Counter(flat([row_ids([batch]) for batch in rest])) == Counter(
        {f"0:{row}": 10 for row in range(100)}
    )


def test_c4_batches_run_on_across_the_epoch_and_so_does_a_resume():
    corpus = corpus_of([3] * 1000)
    config = config_of(batch_size=128, micro_batch_size=8)
    state = assert_resumes(corpus, config, at=8, total=16)
    assert (state["cursor"]["epoch"], state["cursor"]["row"]) == (1, 24)  # 8 x 128 - 1000


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_c8_cursor_counts_batches_whatever_the_accumulation(accumulation):
    corpus = corpus_of([5] * 64)
    config = config_of(batch_size=4, micro_batch_size=4 // accumulation)
    reference, _ = run(corpus, config, 6)
    _, state = run(corpus, config, 5)
    (loader,) = loaders_of(corpus, config, state=state)
    batch = loader.next_batch()
    assert batch.index == 5 and len(batch.micro_batches) == accumulation
    assert row_ids([batch]) == reference[5]
    assert loader.state_dict()["cursor"]["batch"] == 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_d1_state_saved_at_an_epochs_end_goes_on_with_the_next_epoch(num_workers):
    corpus = corpus_of([5] * 20)
    config = config_of(batch_size=2, num_workers=num_workers)
    state = assert_resumes(corpus, config, at=10, total=30)
    assert (state["cursor"]["epoch"], state["cursor"]["row"]) == (1, 0)
    (loader,) = loaders_of(corpus, config, state=state)
    assert loader.batches_in_epochs(3) == 30
    assert [loader.next_batch().epoch_end for _ in range(20)] == [*[False] * 9, True] * 2
    loader.close()


@pytest.mark.parametrize("at", [1, 2, 3, 7, 9])
def test_d2_packing_keeps_no_document_back(at):
    lengths = [10, 10, 4, 12, 3, 3, 16, 7, 9, 2, 5, 11, 6, 6, 13]
    corpus, config = corpus_of(lengths, seq_len=16), config_of(pack=True, batch_size=2)
    assert_resumes(corpus, config, at=at, total=16)
    (loader,) = loaders_of(corpus, config)
    reference, _ = run(corpus, config, loader.batches_in_epochs(4))
    counts = Counter(flat(reference))
    assert len(counts) == len(lengths) and set(counts.values()) <= {4, 5}  # the last batch may run on into epoch 5


def test_d4_resume_in_mid_epoch_keeps_that_epochs_order_and_the_next_ones():
    corpus, config = corpus_of([5] * 64), config_of(batch_size=4)
    assert_resumes(corpus, config, at=16 + 5, total=48)
    reference, _ = run(corpus, config, 48)
    for epoch in range(3):
        assert sorted(flat(reference[16 * epoch : 16 * epoch + 16])) == sorted(f"0:{row}" for row in range(64))


def test_d5_prefetched_batches_are_not_counted_and_a_late_load_is_refused():
    corpus, config = corpus_of([5] * 64), config_of(num_workers=1)
    state = assert_resumes(corpus, config, at=7, total=12)
    (loader,) = loaders_of(corpus, config)
    loader.next_batch()
    with pytest.raises(DataError, match="before its first batch"):
        loader.load_state_dict(state)
    loader.close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 4), (4, 1)])
def test_d6_another_number_of_ranks_continues_the_global_order(before, after):
    corpus, config = corpus_of([5] * 40), config_of(batch_size=4)
    reference, _ = run(corpus, config, 15)
    first, state = run(corpus, config, 5, world_size=before)
    rest, _ = run(corpus, config, 10, world_size=after, state=state)
    assert first + rest == reference


def test_d8_both_ranks_go_on_with_the_fourth_batch():
    corpus, config = corpus_of([5] * 40), config_of(batch_size=4)
    reference, _ = run(corpus, config, 10)
    _, state = run(corpus, config, 3, world_size=2)
    loaders = loaders_of(corpus, config, world_size=2, state=state)
    parts = [loader.next_batch() for loader in loaders]
    assert [part.index for part in parts] == [3, 3]
    assert [part.micro_batches[0].ids[0] for part in parts] == reference[3][:2]
    assert not set(flat([row_ids(parts)])) & set(flat(reference[:3]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_d10_every_batch_is_a_resume_point_and_the_state_does_not_grow(num_workers):
    corpus, config = corpus_of([5] * 64), config_of(num_workers=num_workers)
    assert_resumes(corpus, config, at=5, total=8)
    (loader,) = loaders_of(corpus, config)
    sizes = []
    for _ in range(60):
        loader.next_batch()
        sizes.append(len(json.dumps(loader.state_dict())))
    assert max(sizes) < 1000 and max(sizes) - min(sizes) < 10  # digits of the counters
    loader.close()


def test_d14_epochs_and_seeds_have_orders_of_their_own_and_ranks_are_disjoint():
    corpus, config = corpus_of([5] * 32), config_of(batch_size=8)
    orders = {
        (seed, epoch): tuple(flat(run(corpus, config, 12, seed=seed)[0])[32 * epoch : 32 * epoch + 32])
        for seed in (1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 6
    loaders = loaders_of(corpus, config, world_size=4)
    shares = [set(flat([row_ids([loader.next_batch()]) for _ in range(4)])) for loader in loaders]
    assert sum(len(share) for share in shares) == len(set().union(*shares)) == 32


def test_d16_skipped_batches_are_not_even_read(monkeypatch):
    corpus, config = corpus_of([5] * 64), config_of()
    reference, _ = run(corpus, config, 12)
    _, state = run(corpus, config, 5)
    read = []
    gather = Corpus.gather
    monkeypatch.setattr(Corpus, "gather", lambda self, documents: read.extend(documents) or gather(self, documents))
    run(corpus, config, 7, state=state)
    wanted = flat(reference[5:])
    assert [f"0:{document}" for document in read[: len(wanted)]] == wanted  # small batches are read several at a time


def test_a_batch_that_cannot_be_made_costs_none_before_it(monkeypatch):
    """They are made several at a time: a run that ends before the bad one must not hear of it."""
    corpus, config = corpus_of([5] * 64), config_of()
    reference, _ = run(corpus, config, 5)
    bad = int(flat(run(corpus, config, 6)[0])[5 * 4].split(":")[1])  # the first document of the sixth batch
    gather = Corpus.gather

    def failing(self, documents):
        if bad in documents:
            raise DataError("these tokens cannot be read")
        return gather(self, documents)

    monkeypatch.setattr(Corpus, "gather", failing)
    (loader,) = loaders_of(corpus, config)
    assert [row_ids([loader.next_batch()]) for _ in range(5)] == reference
    assert loader.state_dict()["cursor"]["batch"] == 5
    with pytest.raises(DataError, match="cannot be read"):
        loader.next_batch()
    assert loader.state_dict()["cursor"]["batch"] == 5
    with pytest.raises(DataError, match="cannot be read"):
        loaders_of(corpus, config, state=loader.state_dict())[0].next_batch()


@pytest.mark.parametrize(
    "settings",
    [
        {"pack": True, "seq_len": 2**13, "batch_size": 1},
        {"pack": True, "seq_len": 512, "batch_size": 32, "micro_batch_size": 32, "epoch_end": "flush"},
        {"pack": False, "seq_len": 2**13, "batch_size": 32, "micro_batch_size": 32, "epoch_end": "flush"},
    ],
)
def test_rows_that_are_nearly_empty_are_not_laid_out_far_ahead(settings):
    """A few short documents in long rows: gigabytes of padding before the first step, if only tokens counted."""
    corpus = corpus_of([3] * 4, seq_len=settings["seq_len"])
    (loader,) = loaders_of(corpus, config_of(**settings))
    first = loader.next_batch().micro_batches[0].input_ids
    assert first.numel() <= tokens_made_with(first) <= READ_AHEAD_TOKENS + first.numel()


def test_tiny_batches_are_not_planned_for_thousands_of_steps():
    """On a toy data set these were hundreds of epochs before the first step."""
    (loader,) = loaders_of(corpus_of([2] * 8, seq_len=2), config_of(pack=True, seq_len=2, batch_size=1))
    first = loader.next_batch().micro_batches[0].input_ids
    assert first.numel() == 2 and tokens_made_with(first) == 2 * READ_AHEAD_BATCHES


def tokens_made_with(input_ids: torch.Tensor) -> int:
    """How many tokens were laid out in the memory that this batch lies in."""
    return input_ids.untyped_storage().nbytes() // (3 * input_ids.element_size())


def test_flush_ends_an_epoch_with_a_shorter_batch():
    corpus, config = corpus_of([5] * 10), config_of(epoch_end="flush")
    (loader,) = loaders_of(corpus, config)
    batches = [loader.next_batch() for _ in range(6)]
    assert [batch.rows for batch in batches] == [4, 4, 2, 4, 4, 2]
    assert [batch.epoch_end for batch in batches] == [False, False, True] * 2
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1]
    assert [len(batch.micro_batches) for batch in batches] == [4, 4, 2] * 2
    assert loader.batches_in_epochs(2) == 6
    for at in range(1, 6):
        assert_resumes(corpus, config, at=at, total=9)


def test_carry_marks_the_batch_that_ends_an_epoch():
    corpus = corpus_of([5] * 10)
    (loader,) = loaders_of(corpus, config_of())
    batches = [loader.next_batch() for _ in range(5)]
    assert [batch.rows for batch in batches] == [4] * 5
    assert [batch.epoch_end for batch in batches] == [False, False, False, False, True]
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1]
    assert loader.batches_in_epochs(1) == 3 and loader.batches_in_epochs(2) == 5


def test_a_batch_may_span_several_epochs():
    corpus, config = corpus_of([5] * 3), config_of(batch_size=7)
    batches, state = run(corpus, config, 2)
    assert [len(batch) for batch in batches] == [7, 7]
    assert all(sorted(flat(batches)[start : start + 3]) == ["0:0", "0:1", "0:2"] for start in (0, 3, 6, 9))
    assert (state["cursor"]["epoch"], state["cursor"]["row"]) == (4, 2)
    assert_resumes(corpus, config, at=1, total=4)


@pytest.mark.parametrize("pack", [False, True])
def test_the_sequence_is_the_same_for_every_layout(pack):
    lengths = [3 + d % 11 for d in range(60)]
    corpus = corpus_of(lengths, seq_len=16)
    reference, _ = run(corpus, config_of(pack=pack), 20)
    for world_size in (1, 2, 3, 4):
        for micro_batch_size in (1, 2, 4):
            config = config_of(pack=pack, micro_batch_size=micro_batch_size)
            assert run(corpus, config, 20, world_size=world_size)[0] == reference
    assert run(corpus, config_of(pack=pack, num_workers=2), 20)[0] == reference
    assert run(corpus, config_of(pack=pack, num_workers=2), 20, world_size=2)[0] == reference


def test_loader_processes_deliver_the_same_tensors():
    corpus = corpus_of([3 + d % 11 for d in range(30)], seq_len=16)
    here, there = (loaders_of(corpus, config_of(pack=True, num_workers=workers))[0] for workers in (0, 2))
    for _ in range(8):
        one, two = here.next_batch(), there.next_batch()
        assert (one.index, one.tokens, one.supervised_tokens) == (two.index, two.tokens, two.supervised_tokens)
        for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
            for name in ("input_ids", "labels", "position_ids", "document_ids"):
                assert torch.equal(getattr(a, name), getattr(b, name))
            assert a.ids == b.ids
    there.close()


layouts = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "pack": st.booleans(),
        "epoch_end": st.sampled_from(["carry", "flush"]),
        "shuffle": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=30),
    layouts,
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_any_chain_of_resumes_on_any_ranks_is_the_uninterrupted_run(lengths, layout, legs):
    corpus = corpus_of(lengths, seq_len=16)
    seen, state = [], None
    for batches, world_size, micro_batch_size in legs:
        config = config_of(**layout, micro_batch_size=micro_batch_size)
        part, state = run(corpus, config, batches, world_size=world_size, state=state)
        seen += part
    assert seen == run(corpus, config_of(**layout), len(seen))[0]


def test_loading_leaves_torchs_and_numpys_global_generators_alone():
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()
    for workers in (0, 1):
        run(corpus_of([5] * 20), config_of(num_workers=workers), 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seq_len": 12}, "data.seq_len"),
        ({"pack": True}, "data.pack"),
        ({"batch_size": 5}, "data.batch_size"),
        ({"shuffle": False}, "data.shuffle"),
        ({"epoch_end": "flush"}, "data.epoch_end"),
    ],
)
def test_a_changed_setting_is_refused_by_name_unless_allowed(change, key):
    corpus = corpus_of([5] * 20)
    config = config_of()
    _, state = run(corpus, config, 3)
    changed = config_of(**change)
    with pytest.raises(CheckpointMismatch, match=rf"{key}: checkpoint .*, now (.|\n)*--resume.override data"):
        loaders_of(corpus, changed, state=state)
    for allow in ({"data"}, {key}):
        (loader,) = loaders_of(corpus, changed, state=state, allow=allow)
        assert loader.next_batch().index == 3
    with pytest.raises(CheckpointMismatch):
        loaders_of(corpus, changed, state=state, allow={"dat", "optim", key + "x"})


def test_other_documents_seeds_and_weights_are_refused_together():
    config = config_of(sources=(SourceConfig(path="a", weight=1), SourceConfig(path="b", weight=1)))
    corpus = corpus_of([5] * 10, [5] * 10)
    _, state = run(corpus, config, 2)
    other = config_of(sources=(SourceConfig(path="a", weight=1), SourceConfig(path="b", weight=3)))
    with pytest.raises(CheckpointMismatch) as error:
        loaders_of(corpus_of([5] * 10, [5] * 11), other, state=state, seed=2)
    for key in (
        "data.sources:",
        "a file, the tokenizer, its chat template",
        "data.sources.weight:",
        "seed: checkpoint 1, now 2",
        "--resume.override data,seed",
    ):
        assert key in str(error.value)
    (loader,) = loaders_of(corpus_of([5] * 10, [5] * 11), other, state=state, seed=2, allow={"data", "seed"})
    assert loader.next_batch().epoch == 0


def test_the_path_of_a_source_does_not_matter():
    corpus = corpus_of([5] * 10)
    _, state = run(corpus, config_of(sources=(SourceConfig(path="a.jsonl"),)), 2)
    run(corpus, config_of(sources=(SourceConfig(path="elsewhere/b.jsonl"),)), 1, state=state)


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"epoch_end": "flush"}])
def test_an_allowed_batch_size_goes_on_at_the_very_next_row(change):
    corpus = corpus_of([5] * 20)
    reference = flat(run(corpus, config_of(), 5)[0])
    first, state = run(corpus, config_of(), 2)
    rest, _ = run(corpus, config_of(**change), 3, state=state, allow={"data"})
    seen = flat(first) + flat(rest)
    assert seen == reference[: len(seen)]


def test_an_allowed_other_order_goes_on_at_the_same_part_of_the_epoch():
    _, state = run(corpus_of([5] * 20), config_of(), 7)  # epoch 1, row 8 of 20
    (loader,) = loaders_of(corpus_of([5] * 40), config_of(), state=state, allow={"data"})
    cursor = loader.state_dict()["cursor"]
    assert (cursor["batch"], cursor["epoch"], cursor["row"], cursor["epoch_rows"]) == (7, 1, 16, 40)
    again = loader.state_dict()
    (resumed,) = loaders_of(corpus_of([5] * 40), config_of(), state=again)
    assert row_ids([resumed.next_batch()]) == row_ids([loader.next_batch()])


def test_an_order_drawn_by_other_library_versions_is_noticed():
    corpus = corpus_of([5] * 20)
    _, state = run(corpus, config_of(), 3)
    state["cursor"]["plan"] = "0" * 16
    with pytest.raises(CheckpointMismatch, match="plan of epoch 0"):
        loaders_of(corpus, config_of(), state=state)
    loaders_of(corpus, config_of(), state=state, allow={"data"})


@pytest.mark.parametrize("state", [{}, {"version": 1}, {"version": 2, "cursor": {}, "order": {}}])
def test_a_foreign_state_is_a_mismatch(state):
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        loaders_of(corpus_of([5] * 4), config_of(), state=state)


def test_a_fresh_loaders_state_can_be_saved_and_loaded():
    corpus, config = corpus_of([5] * 20), config_of()
    (loader,) = loaders_of(corpus, config)
    (resumed,) = loaders_of(corpus, config, state=loader.state_dict())
    assert batch_ids(resumed.next_batch()) == batch_ids(loader.next_batch())


def test_a_closed_loader_says_so_and_its_processes_end():
    import multiprocessing

    before = multiprocessing.active_children()  # of other tests
    (loader,) = loaders_of(corpus_of([5] * 20), config_of(num_workers=2))
    loader.next_batch()
    workers = [process for process in multiprocessing.active_children() if process not in before]
    assert len(workers) == 2
    loader.close()
    for worker in workers:
        worker.join(10)
        assert worker.exitcode is not None
    with pytest.raises(DataError, match="closed"):
        loader.next_batch()


def test_a_corpus_can_travel_to_a_spawned_process():
    corpus = corpus_of([5, 6, 7])
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.gather(np.array([2, 0]))[0].tolist() == corpus.gather(np.array([2, 0]))[0].tolist()
