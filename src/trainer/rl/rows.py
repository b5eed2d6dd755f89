"""Rollouts laid out in rows: from groups to this rank's micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.rng import numpy_generator
from trainer.data.batch import BatchSpec, GlobalBatch, MicroBatch, assemble, split_rows
from trainer.data.packing import pack_rows
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.types import Rollout

Float32 = npt.NDArray[np.float32]


@dataclass
class RolloutBatch(GlobalBatch):
    """A global batch of rollouts."""

    total_weight: float = 0.0
    """What the summed loss of all ranks is divided by: it counts what the loss's own weights count; never 0."""
    places: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    """Where this rank's rollouts lie, by micro-batch: (rollout, row, first position, tokens)."""

    @property
    def denominator(self) -> float:
        return self.total_weight


@dataclass
class TrainedRollout:
    """A rollout and what the objective needs to know of it.

    Attributes:
        id: for samples.jsonl: "<prompt number>:<sample>".
        advantage: of all its tokens.
        weight: of each of its tokens in the loss.
        old_logprobs: float32 [T]; the denominator of the ratio.
    """

    id: str
    rollout: Rollout
    advantage: float
    weight: float
    old_logprobs: Float32


class _Flat:
    """The rollouts one after the other, as `assemble` reads a corpus; in place of token ids it hands out places of tokens,
    so that whatever belongs to a token can be looked up afterwards."""

    def __init__(self, rollouts: Sequence[TrainedRollout], seq_len: int):
        self.seq_len = seq_len
        self.names = [rollout.id for rollout in rollouts]
        self.lengths = np.array([rollout.rollout.ids.size for rollout in rollouts], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.trained = _joined([rollout.rollout.trained for rollout in rollouts], np.bool_)

    def gather(self, documents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        lengths = self.lengths[documents]
        begins = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(self.starts[documents] - begins, lengths)
        return places, self.trained[places]

    def sample_ids(self, documents: npt.NDArray[np.int64]) -> list[str]:
        return [self.names[document] for document in documents.tolist()]


def lay_out(
    rollouts: Sequence[TrainedRollout],
    *,
    index: int,
    seq_len: int,
    pack: bool,
    micro_batch_size: int,
    total_weight: float,
    seed: int,
    rank: int,
    world_size: int,
) -> RolloutBatch:
    """Returns this rank's part of the batch. Which rows there are does not depend on the rank or their number.

    Packed rows are filled best-fit-decreasing and then shuffled, as documents are.

    Args:
        index: 0-based number of the batch.
        total_weight: `GlobalBatch.denominator`.
        seed: of the run; with `index` it addresses the order of rows.
    """
    flat = _Flat(rollouts, seq_len)
    rows = _rows(flat.lengths, seq_len, pack, numpy_generator(seed, "rollout rows", index))
    micro_rows = split_rows(rows, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
    supervised = int(flat.trained.sum() - sum(bool(r.rollout.trained[0]) for r in rollouts if r.rollout.trained.size))
    spec = BatchSpec(index, 0, False, len(rows), len(rollouts), int(flat.lengths.sum()), supervised, micro_rows)
    micro_batches: list[MicroBatch] = [_padding(micro_batch_size)]
    if rollouts:
        table = _Table(rollouts)
        micro_batches = [table.fill(micro) for micro in assemble(flat, spec, pack=pack).unpack().micro_batches]
    return RolloutBatch(
        index=index,
        epoch=0,  # prompts have no common one
        epoch_end=False,
        micro_batches=micro_batches,
        rows=len(rows),
        documents=len(rollouts),
        tokens=spec.tokens,
        supervised_tokens=supervised,
        total_weight=total_weight,
        places=_places(micro_rows, flat.lengths) if rollouts else [[]],
    )


class _Table:
    """Everything that belongs to a token, by its place in the joined rollouts."""

    def __init__(self, rollouts: Sequence[TrainedRollout]):
        lengths = [rollout.rollout.ids.size for rollout in rollouts]
        self.ids = torch.from_numpy(_joined([r.rollout.ids for r in rollouts], np.int64))
        self.engine = torch.from_numpy(_joined([r.rollout.logprobs for r in rollouts], np.float32))
        self.old = torch.from_numpy(_joined([r.old_logprobs for r in rollouts], np.float32))
        self.advantages = torch.from_numpy(np.repeat(np.array([r.advantage for r in rollouts], np.float32), lengths))
        self.weights = torch.from_numpy(np.repeat(np.array([r.weight for r in rollouts], np.float32), lengths))

    def fill(self, micro: MicroBatch) -> RolloutMicroBatch:
        """Turns the places of tokens in `micro` into what lies there."""
        is_document = micro.document_ids >= 0
        supervised = micro.labels >= 0
        target = micro.labels.clamp(min=0)

        def of_target(values: Tensor) -> Tensor:
            return torch.where(supervised, values[target], 0.0)

        return RolloutMicroBatch(
            input_ids=torch.where(is_document, self.ids[micro.input_ids], 0),
            labels=torch.where(supervised, self.ids[target], micro.labels),
            position_ids=micro.position_ids,
            document_ids=micro.document_ids,
            ids=micro.ids,
            advantages=of_target(self.advantages),
            old_logprobs=of_target(self.old),
            engine_logprobs=of_target(self.engine),
            weights=of_target(self.weights),
        )


def _rows(lengths, seq_len: int, pack: bool, generator: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    if not pack or lengths.size == 0:
        return [np.array([document]) for document in range(lengths.size)]
    row_of, count = pack_rows(lengths, seq_len)
    order = generator.permutation(count)
    return [np.flatnonzero(row_of == row) for row in order]


def _places(micro_rows: list[list[npt.NDArray[np.int64]]], lengths) -> list[list[tuple[int, int, int, int]]]:
    places = []
    for rows in micro_rows:
        here = []
        for row, documents in enumerate(rows):
            first = 0
            for document in documents.tolist():
                here.append((document, row, first, int(lengths[document])))
                first += int(lengths[document])
        places.append(here)
    return places


def _padding(rows: int) -> RolloutMicroBatch:
    """A micro-batch of a batch from which everything was left out: ranks still step together."""
    shape = (rows, 8)
    ids, nothing = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    return RolloutMicroBatch(
        input_ids=ids,
        labels=torch.full(shape, -100),
        position_ids=torch.arange(shape[1]).expand(shape).contiguous(),
        document_ids=torch.full(shape, -1, dtype=torch.int32),
        ids=[[] for _ in range(rows)],
        advantages=nothing,
        old_logprobs=nothing,
        engine_logprobs=nothing,
        weights=nothing,
    )


def _joined(parts: Sequence[npt.NDArray], dtype) -> npt.NDArray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
