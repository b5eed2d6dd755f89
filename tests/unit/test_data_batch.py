"""How documents are laid out in rows and rows over ranks; what is counted."""

import numpy as np
import pytest
import torch

from support.corpora import ListedDocuments, corpus_of, row_ids
from trainer.config.data import DataConfig, ValConfig
from trainer.data.batch import BatchSpec, assemble, assemble_all, split_rows
from trainer.data.corpus import Corpus
from trainer.data.loader import BatchLoader
from trainer.data.validation import validation_batches


def spec_of(micro_rows):
    return BatchSpec(0, 0, False, 0, 0, 0, 0, [[np.array(row, np.int64) for row in micro] for micro in micro_rows])


def test_i6_packed_documents_neither_share_positions_nor_predict_each_other():
    listed = ListedDocuments([([1, 2, 3], [1, 1, 1]), ([4, 5, 6, 7, 8], [1, 1, 1, 1, 1])])
    corpus = Corpus([listed], seq_len=10)
    (micro,) = assemble(corpus, spec_of([[[0, 1]]]), pack=True).unpack().micro_batches
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]]
    assert micro.labels.tolist() == [[2, 3, -100, 5, 6, 7, 8, -100, -100, -100]]  # 3 does not predict 4
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert micro.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, -1, -1]]
    assert micro.ids == [["0:0", "0:1"]]
    assert [t.dtype for t in (micro.input_ids, micro.labels, micro.position_ids)] == [torch.int64] * 3
    assert micro.document_ids.dtype == torch.int32


def test_masked_tokens_are_read_but_not_learned():
    corpus = Corpus([ListedDocuments([([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])])], seq_len=8)
    (micro,) = assemble(corpus, spec_of([[[0]]]), pack=True).unpack().micro_batches
    assert micro.labels.tolist() == [[-100, 3, -100, 5, -100, -100, -100, -100]]
    assert corpus.supervised.tolist() == [2]


def test_the_first_token_is_never_a_target():
    corpus = Corpus([ListedDocuments([([1, 2], [1, 0]), ([3, 4], [1, 1])])], seq_len=8)
    assert len(corpus) == 1  # the first document has nothing to predict
    assert corpus.supervised.tolist() == [1]


def test_documents_are_cut_at_seq_len_and_their_targets_counted_after_the_cut():
    corpus = Corpus([ListedDocuments([(range(1, 9), [0, 0, 1, 1, 1, 1, 1, 1]), ([9, 9], [1, 1])])], seq_len=4)
    assert corpus.lengths.tolist() == [4, 2]
    assert corpus.supervised.tolist() == [2, 1]
    (micro,) = assemble(corpus, spec_of([[[0]]]), pack=True).unpack().micro_batches
    assert micro.input_ids.tolist() == [[1, 2, 3, 4]]
    assert micro.labels.tolist() == [[-100, 3, 4, -100]]


def test_unpacked_rows_are_as_wide_as_the_longest_of_their_micro_batch():
    corpus = corpus_of([5, 9, 3, 30], seq_len=20)
    micros = assemble(corpus, spec_of([[[0], [1]], [[2], []], [[3], [0]]]), pack=False).unpack().micro_batches
    assert [tuple(micro.input_ids.shape) for micro in micros] == [(2, 16), (2, 8), (2, 20)]  # never above seq_len
    assert micros[1].ids == [["0:2"], []]
    assert micros[1].labels[1].unique().tolist() == [-100]
    assert micros[1].document_ids[1].unique().tolist() == [-1]


def test_several_sources_are_gathered_from_their_own_stores():
    corpus = corpus_of([2, 3], [4], [2, 2], seq_len=16)
    (micro,) = assemble(corpus, spec_of([[[2, 0, 4, 1]]]), pack=True).unpack().micro_batches
    assert micro.input_ids[0, :11].tolist() == [1000] * 4 + [0] * 2 + [2001] * 2 + [1] * 3
    assert micro.ids == [["1:0", "0:0", "2:1", "0:1"]]


@pytest.mark.parametrize("pack", [True, False])
def test_batches_made_together_are_those_made_one_by_one(pack):
    corpus = corpus_of([5, 9, 3, 30], [2, 2, 11], seq_len=20)
    specs = [
        spec_of(rows) for rows in ([[[0], [1]], [[2], []]], [[[3]]], [[[], []]], [[[4], [6]], [[5], [0]], [[], []]])
    ]
    together = assemble_all(corpus, specs, pack=pack)
    assert [batch.spec for batch in together] == specs
    for one, spec in zip(together, specs, strict=True):
        alone = assemble(corpus, spec, pack=pack)
        assert (one.widths, one.ids) == (alone.widths, alone.ids)
        for mine, other in zip(one.unpack().micro_batches, alone.unpack().micro_batches, strict=True):
            for name in ("input_ids", "labels", "position_ids", "document_ids"):
                a, b = getattr(mine, name), getattr(other, name)
                assert torch.equal(a, b) and a.dtype == b.dtype, name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4, 7, 12])
def test_rows_are_dealt_to_ranks_by_the_documented_rule(rows, world_size, micro_batch_size):
    documents = [np.array([row]) for row in range(rows)]
    per_rank = [
        split_rows(documents, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    stride = world_size * micro_batch_size
    steps = -(-rows // stride)
    for rank, micros in enumerate(per_rank):
        assert [len(micro) for micro in micros] == [micro_batch_size] * steps  # every rank does the same work
        for step, micro in enumerate(micros):
            for slot, row in enumerate(micro):
                number = step * stride + rank * micro_batch_size + slot
                assert row.tolist() == ([number] if number < rows else [])


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_i1_counts_are_those_of_the_tensors_of_all_ranks(world_size, pack):
    masks = np.random.default_rng(0).integers(0, 2, (30, 12))
    documents = [(range(1, 3 + d % 10), [0, *mask[: d % 10], 1]) for d, mask in enumerate(masks)]
    corpus = Corpus([ListedDocuments(documents)], seq_len=8)
    config = DataConfig(seq_len=8, batch_size=7, micro_batch_size=2, pack=pack, epoch_end="flush")
    loaders = [BatchLoader(corpus, config, seed=0, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(6):
        parts = [loader.next_batch() for loader in loaders]
        micros = [micro for part in parts for micro in part.micro_batches]
        tokens = sum(int((micro.document_ids >= 0).sum()) for micro in micros)
        targets = sum(int((micro.labels != -100).sum()) for micro in micros)
        rows = row_ids(parts)
        for part in parts:
            assert (part.tokens, part.supervised_tokens) == (tokens, targets)
            assert part.rows == len(rows) and part.documents == sum(len(row) for row in rows)


def test_packed_batches_carry_the_same_targets_as_unpacked_ones():
    corpus = corpus_of([5, 9, 3, 11, 2, 7], seq_len=16)
    targets = []
    for pack in (True, False):
        config = DataConfig(seq_len=16, batch_size=2, pack=pack, epoch_end="flush")
        loader = BatchLoader(corpus, config, seed=0, rank=0, world_size=1)
        batches = [loader.next_batch() for _ in range(loader.batches_in_epochs(1))]
        micros = [micro for batch in batches for micro in batch.micro_batches]
        pairs = [
            (int(token), int(position), int(label))
            for micro in micros
            for token, position, label in zip(
                micro.input_ids.flatten(), micro.position_ids.flatten(), micro.labels.flatten(), strict=True
            )
            if label != -100
        ]
        targets.append(sorted(pairs))
    assert targets[0] == targets[1] and len(targets[0]) == 5 + 9 + 3 + 11 + 2 + 7 - 6


def test_micro_batches_move_between_devices_with_their_ids():
    corpus = corpus_of([5, 9], seq_len=16)
    loader = BatchLoader(corpus, DataConfig(seq_len=16, batch_size=1), seed=0, rank=0, world_size=1)
    micro = loader.next_batch().micro_batches[0]
    moved = micro.to("meta")
    assert moved.labels.device.type == "meta" and moved.ids == micro.ids


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_batches_are_the_same_every_time_and_on_any_number_of_ranks(world_size):
    corpus = corpus_of([5] * 10, seq_len=8)
    config = DataConfig(seq_len=8, batch_size=4, pack=False, epoch_end="carry", shuffle=True)
    parts = [
        validation_batches(corpus, config, ValConfig(), rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert [len(part) for part in parts] == [3] * world_size
    for _ in range(2):
        seen = [row_ids(batches) for batches in zip(*parts, strict=True)]
        assert [[row[0] for row in batch] for batch in seen] == [
            ["0:0", "0:1", "0:2", "0:3"],
            ["0:4", "0:5", "0:6", "0:7"],
            ["0:8", "0:9"],
        ]
    assert [batch.supervised_tokens for batch in parts[0]] == [16, 16, 8]
    limited = validation_batches(corpus, config, ValConfig(batches=2), rank=0, world_size=1)
    assert [batch.rows for batch in limited] == [4, 4]
