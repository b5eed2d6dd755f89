"""Batches as tensors, and how rows of documents are laid out in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.corpus import Int64

if TYPE_CHECKING:
    from collections.abc import Iterator

IGNORE = -100
"""Label of a position that is not supervised."""
WIDTH_MULTIPLE = 8  # unpacked rows are padded to a multiple of this: few distinct shapes, and tensor cores like it


@dataclass
class MicroBatch:
    """One rank's rows of one micro-step. Packed rows have T == seq_len, unpacked ones T <= seq_len."""

    input_ids: Tensor
    """int64 [rows, T]; padding is 0."""
    labels: Tensor
    """int64 [rows, T]: the token to predict at each position, -100 where there is none to learn: a document's last
    token, roles that are not trained on, padding."""
    position_ids: Tensor
    """int64 [rows, T]; starts at 0 in each document, and again in the padding."""
    document_ids: Tensor
    """int32 [rows, T]; 0, 1, 2, … within a row, -1 for padding."""
    ids: list[list[str]]
    """Sample ids "<source>:<row>" of each row's documents; an empty list for a row of padding."""

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Returns the same micro-batch on `device`; the copy does not block where the tensors are pinned."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors), ids=self.ids)


@dataclass
class GlobalBatch:
    """This rank's part of one optimizer step's rows. The counts are those of all ranks, known without communication."""

    index: int
    """0-based number since the start of the data; batch k feeds step k + 1."""
    epoch: int
    """Epoch of its first row."""
    epoch_end: bool
    """Its last row is the last one of an epoch."""
    micro_batches: list[MicroBatch]
    """In the order of the micro-steps; equally many on every rank, missing rows are padding."""
    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    measures: dict[str, float] = field(default_factory=dict)
    """What was measured while it was made; goes into the step's row of metrics."""

    @property
    def denominator(self) -> float:
        """What the summed loss of all ranks is divided by."""
        return max(1, self.supervised_tokens)


@dataclass(frozen=True)
class BatchSpec:
    """Everything about a batch but its tokens; small, so it can travel to a loader process."""

    index: int
    epoch: int
    epoch_end: bool
    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    micro_rows: list[list[Int64]]
    """This rank's rows by micro-step, each an array of corpus document numbers; an empty one is padding."""


@dataclass
class HostBatch:
    """A batch's tokens in two buffers: a loader process hands over two file descriptors, not four per micro-step."""

    spec: BatchSpec
    tokens: Tensor
    """int64 [3, total]: ids, labels and positions of all rows, one after the other."""
    document_ids: Tensor
    """int32 [total]."""
    widths: list[int]
    """Tokens of a row in each micro-batch."""
    ids: list[list[list[str]]]
    """Sample ids by micro-batch and row."""

    def pin_memory(self) -> Self:
        """Moves the buffers to page-locked memory (torch's loader calls this)."""
        self.tokens = self.tokens.pin_memory()
        self.document_ids = self.document_ids.pin_memory()
        return self

    def unpack(self) -> GlobalBatch:
        """Returns the batch; its tensors are views of the buffers."""
        spec = self.spec
        return GlobalBatch(
            index=spec.index,
            epoch=spec.epoch,
            epoch_end=spec.epoch_end,
            micro_batches=list(self._micro_batches()),
            rows=spec.rows,
            documents=spec.documents,
            tokens=spec.tokens,
            supervised_tokens=spec.supervised_tokens,
        )

    def _micro_batches(self) -> "Iterator[MicroBatch]":
        start = 0
        for rows, width, ids in zip(self.spec.micro_rows, self.widths, self.ids, strict=True):
            end = start + len(rows) * width
            shape = (len(rows), width)
            input_ids, labels, positions = self.tokens[:, start:end].view(3, *shape).unbind()
            yield MicroBatch(input_ids, labels, positions, self.document_ids[start:end].view(shape), ids)
            start = end


def split_rows(rows: Sequence[Int64], *, rank: int, world_size: int, micro_batch_size: int) -> list[list[Int64]]:
    """Returns this rank's rows by micro-step.

    Row i goes to micro-step i // (world_size x micro_batch_size) and there to rank
    (i % (world_size x micro_batch_size)) // micro_batch_size. Every rank gets equally many micro-batches of equally many
    rows, so that ranks never wait for one that has nothing to do; missing rows are empty.
    """
    stride = world_size * micro_batch_size
    nothing = np.empty(0, np.int64)
    micro_rows = []
    for first in range(rank * micro_batch_size, len(rows) + rank * micro_batch_size, stride):
        own = list(rows[first : first + micro_batch_size])
        micro_rows.append(own + [nothing] * (micro_batch_size - len(own)))
    return micro_rows


def global_row_ids(per_rank: Sequence[Sequence[Sequence[list[str]]]]) -> list[list[str]]:
    """Returns the sample ids of a global batch in its own order, from those of each rank's micro-batches.

    Args:
        per_rank: for each rank in order, `[micro_batch.ids for micro_batch in batch.micro_batches]`.
    """
    by_step = zip(*per_rank, strict=True)
    return [row for micro_batches in by_step for micro_batch in micro_batches for row in micro_batch if row]


class Documents(Protocol):
    """What is laid out in rows: a corpus, or rollouts."""

    lengths: Int64
    seq_len: int

    def gather(self, documents: Int64, /) -> tuple[Int64, NDArray[np.bool_]]: ...

    def sample_ids(self, documents: Int64, /) -> list[str]: ...


def assemble(corpus: Documents, spec: BatchSpec, *, pack: bool) -> HostBatch:
    """Reads the tokens of a batch and lays them out."""
    return assemble_all(corpus, [spec], pack=pack)[0]


def assemble_all(corpus: Documents, specs: Sequence[BatchSpec], *, pack: bool) -> list[HostBatch]:
    """The same for several batches. All rows of all are handled at once: no Python loop over documents."""
    micro_rows = [micro for spec in specs for micro in spec.micro_rows]
    rows = [row for micro in micro_rows for row in micro]
    edges = np.cumsum([0, *(row.size for row in rows)])  # of rows, in documents
    documents = np.concatenate(rows).astype(np.int64, copy=False)
    lengths = corpus.lengths[documents]
    ends = np.cumsum(lengths)
    begins = ends - lengths  # of each document in `ids`
    row_begins = np.concatenate(((0,), ends))[edges]
    used = row_begins[1:] - row_begins[:-1]

    widths = _widths(micro_rows, used, corpus.seq_len, pack)
    row_widths = np.repeat(widths, [len(micro) for micro in micro_rows])
    row_starts = np.cumsum(row_widths) - row_widths
    total = int(row_widths.sum())

    ids, mask = corpus.gather(documents)
    place = np.arange(max(total, ids.size))
    positions = place[: ids.size] - np.repeat(begins, lengths)
    target = place[: ids.size] + np.repeat(row_starts - row_begins[:-1], used)
    ordinals = place[: documents.size] - np.repeat(edges[:-1], edges[1:] - edges[:-1])

    labels = np.full(ids.size, IGNORE, np.int64)
    labels[:-1] = np.where(mask[1:], ids[1:], IGNORE)
    labels[ends - 1] = IGNORE  # the next token belongs to another document

    tokens = np.zeros((3, total), np.int64)
    tokens[1] = IGNORE
    tokens[2] = place[:total] - np.repeat(row_starts + used, row_widths)  # right for padding, overwritten elsewhere
    for part, values in zip(tokens, (ids, labels, positions), strict=True):
        part[target] = values
    document_ids = np.full(total, -1, np.int32)
    document_ids[target] = np.repeat(ordinals, lengths)
    names = iter(corpus.sample_ids(documents))
    row_names = [[list(islice(names, row.size)) for row in micro] for micro in micro_rows]
    return _parted(specs, torch.from_numpy(tokens), torch.from_numpy(document_ids), widths, row_names)


def _parted(
    specs: Sequence[BatchSpec],
    tokens: Tensor,
    document_ids: Tensor,
    widths: list[int],
    row_names: list[list[list[str]]],
) -> list[HostBatch]:
    """Returns the batches that were laid out one after the other; they share the memory."""
    batches, micro, start = [], 0, 0
    for spec in specs:
        last = micro + len(spec.micro_rows)
        end = start + sum(len(rows) * width for rows, width in zip(spec.micro_rows, widths[micro:last], strict=True))
        batches.append(
            HostBatch(spec, tokens[:, start:end], document_ids[start:end], widths[micro:last], row_names[micro:last])
        )
        micro, start = last, end
    return batches


def row_width(longest_tokens: int, seq_len: int) -> int:
    """Returns the tokens of each row in an unpacked micro-batch whose longest document has `longest_tokens`."""
    return min(seq_len, -(-max(1, longest_tokens) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def laid_out_tokens(corpus: Documents, spec: BatchSpec, *, pack: bool) -> int:
    """Returns how many tokens this rank's rows of a batch have at most once they are laid out, padding included."""
    rows = sum(map(len, spec.micro_rows))
    if pack or not rows:
        return rows * corpus.seq_len
    documents = np.concatenate([row for micro in spec.micro_rows for row in micro])
    return rows * row_width(int(corpus.lengths[documents].max(initial=1)), corpus.seq_len)


def _widths(micro_rows: list[list[Int64]], used: Int64, seq_len: int, pack: bool) -> list[int]:
    if pack:
        return [seq_len] * len(micro_rows)
    widths, start = [], 0
    for micro in micro_rows:
        widths.append(row_width(int(used[start : start + len(micro)].max()), seq_len))
        start += len(micro)
    return widths
