"""One global, endless sequence of batches, and a cursor in it that knows nothing of ranks or workers.

Batch k holds the same documents whatever the world size, the micro-batch size, the number of loader processes or the
number of resumes before it: the sequence is a pure function of (corpus, config, seed), and the state of a loader is the
place after the last batch that it *returned*. What loader processes have prepared beyond that is not part of it.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.config.compare import within
from trainer.config.data import DataConfig
from trainer.core.log import logger
from trainer.core.signals import ignore_in_worker
from trainer.data.batch import BatchSpec, GlobalBatch, HostBatch, assemble, assemble_all, laid_out_tokens, split_rows
from trainer.data.corpus import Corpus, Int64
from trainer.data.epoch import EpochPlan, plan_epoch
from trainer.data.mixture import mixture_weights, shares
from trainer.errors import CheckpointMismatch, DataError

NEVER = 2**31  # torchdata's own snapshots are not used: they depend on the number of workers
READ_AHEAD_TOKENS = 2**14
"""Batches that are smaller are made several at a time: a small one takes longer to prepare than to lay out, the more so right
after a step, when neither code nor data are in the processor's cache."""
READ_AHEAD_BATCHES = 32
"""And so many at most: tiny ones would be thousands, of hundreds of epochs."""
_KEEPS_ROWS = {"data.batch_size", "data.epoch_end"}  # settings that cut the sequence of rows differently, nothing else


@dataclass(frozen=True)
class Cursor:
    """A place between two batches."""

    batch: int = 0
    """Batches before it."""
    epoch: int = 0
    row: int = 0
    """Rows of `epoch` before it; 0 rather than all of the epoch before."""
    epoch_rows: int = 0
    """Rows of `epoch` in total; 0 where `row` is 0."""
    planned_epoch: int = 0
    """Epoch of the last row before it."""
    plan: str = ""
    """Digest of that epoch's plan; empty before the first batch."""


class BatchSequence:
    """The batches of a corpus by place; this rank's share of each."""

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        weights: Sequence[float] | None = None,
    ):
        self.corpus, self.config, self.seed, self.weights = corpus, config, seed, weights
        self.rank, self.world_size = rank, world_size
        self._plans: dict[int, EpochPlan] = {}

    def plan(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch; the latest two are kept."""
        if epoch not in self._plans:
            plan = plan_epoch(self.corpus, self.config, self.weights, seed=self.seed, epoch=epoch)
            self._plans = dict([*self._plans.items()][-1:]) | {epoch: plan}
        return self._plans[epoch]

    def batches_from(self, cursor: Cursor) -> Iterator[tuple[BatchSpec, Cursor]]:
        """Yields each batch after `cursor` with the place after it, for ever."""
        epoch, row, index = cursor.epoch, cursor.row, cursor.batch
        while True:
            rows: list[Int64] = []
            first_epoch = planned = epoch
            while len(rows) < self.config.batch_size:
                plan, planned = self.plan(epoch), epoch
                end = min(row + self.config.batch_size - len(rows), len(plan))
                rows += plan.rows(row, end)
                row = end
                if row == len(plan):
                    epoch, row = epoch + 1, 0
                    if self.config.epoch_end == "flush":
                        break
            index += 1
            after = Cursor(index, epoch, row, len(self.plan(epoch)) if row else 0, planned, self.plan(planned).digest)
            yield self.spec(rows, index=index - 1, epoch=first_epoch, epoch_end=row == 0), after

    def spec(self, rows: Sequence[Int64], *, index: int, epoch: int, epoch_end: bool) -> BatchSpec:
        documents = np.concatenate(rows)
        return BatchSpec(
            index=index,
            epoch=epoch,
            epoch_end=epoch_end,
            rows=len(rows),
            documents=documents.size,
            tokens=int(self.corpus.lengths[documents].sum()),
            supervised_tokens=int(self.corpus.supervised[documents].sum()),
            micro_rows=split_rows(
                rows, rank=self.rank, world_size=self.world_size, micro_batch_size=self.config.micro_batch_size
            ),
        )

    def order(self) -> dict[str, Any]:
        """Returns what the sequence depends on, by config key."""
        config = self.config
        return {
            "data.fake" if config.fake else "data.sources": self.corpus.fingerprint,
            "data.sources.weight": list(self.weights) if self.weights else None,
            "seed": self.seed,
            "data.seq_len": config.seq_len,
            "data.pack": config.pack,
            "data.batch_size": config.batch_size,
            "data.shuffle": config.shuffle,
            "data.epoch_end": config.epoch_end,
        }


class _Rows(torch.utils.data.Dataset):
    """Map-style: a batch's spec in, its tokens out. This is what runs in the loader processes."""

    def __init__(self, corpus: Corpus, pack: bool):
        self.corpus, self.pack = corpus, pack

    def __getitem__(self, item: tuple[BatchSpec, Cursor]) -> tuple[HostBatch, Cursor]:
        spec, after = item
        return assemble(self.corpus, spec, pack=self.pack), after


class _Sampler:
    """Iterates over the batches from a place that is set before the first of them is asked for."""

    def __init__(self, sequence: BatchSequence):
        self.sequence = sequence
        self.start = Cursor()

    def __iter__(self) -> Iterator[tuple[BatchSpec, Cursor]]:
        return self.sequence.batches_from(self.start)


@dataclass(frozen=True)
class _InProcess:
    """Without loader processes a batch is made when it is asked for: a data loader around that would take longer than a
    small batch itself."""

    corpus: Corpus
    pack: bool
    sampler: _Sampler
    pin_memory: bool

    def __iter__(self) -> Iterator[tuple[GlobalBatch, Cursor]]:
        ahead: list[tuple[BatchSpec, Cursor]] = []
        tokens = 0
        for item in self.sampler:
            ahead.append(item)
            # Padding counts: rows may hold next to nothing.
            tokens += max(item[0].tokens, laid_out_tokens(self.corpus, item[0], pack=self.pack))
            if tokens >= READ_AHEAD_TOKENS or len(ahead) == READ_AHEAD_BATCHES:
                yield from self._made(ahead)
                ahead, tokens = [], 0

    def _made(self, items: Sequence[tuple[BatchSpec, Cursor]]) -> Iterator[tuple[GlobalBatch, Cursor]]:
        specs = [spec for spec, _ in items]
        try:
            batches: Iterable[HostBatch] = assemble_all(self.corpus, specs, pack=self.pack)
        except Exception:  # one by one: a run may end before the batch that cannot be made
            batches = (assemble(self.corpus, spec, pack=self.pack) for spec in specs)
        for batch, (_, after) in zip(batches, items, strict=True):
            yield (batch.pin_memory() if self.pin_memory else batch).unpack(), after


class BatchLoader:
    """Endless global batches with a resumable cursor.

    Args:
        corpus: the training documents.
        config: batch size, packing, order and loader processes.
        seed: the run's seed.
        rank, world_size: which share of each batch to return.
        allow: config keys (or tables, such as "data") whose difference to a loaded state is wanted.
        pin_memory: return tensors in page-locked memory, for faster copies to a GPU.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        allow: Collection[str] = (),
        pin_memory: bool = False,
    ):
        self._sequence = BatchSequence(
            corpus, config, seed=seed, rank=rank, world_size=world_size, weights=mixture_weights(config)
        )
        self._sampler = _Sampler(self._sequence)
        self._allow = allow
        self._loader: StatefulDataLoader | _InProcess | None = (
            _loader(_Rows(corpus, config.pack), self._sampler, config.num_workers, pin_memory)
            if config.num_workers
            else _InProcess(corpus, config.pack, self._sampler, pin_memory)
        )
        self._iterator: Iterator[tuple[GlobalBatch, Cursor]] | None = None
        self._cursor = self._before = Cursor()
        self._changed: set[str] = set()
        self._rows: dict[int, int] = {}
        self._warn_of_absent_sources()

    def next_batch(self) -> GlobalBatch:
        """Returns this rank's part of the next global batch.

        Raises:
            DataError: the loader is closed, or a loader process died.
        """
        if self._loader is None:
            raise DataError("the batch loader is closed")
        try:
            if self._iterator is None:
                self._iterator = self._batches(self._loader)
            self._before = self._cursor
            batch, self._cursor = next(self._iterator)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(f"{error}; is memory short? data.num_workers = 0 loads in the training process") from error
        return batch

    @staticmethod
    def _batches(loader: "StatefulDataLoader | _InProcess") -> Iterator[tuple[GlobalBatch, Cursor]]:
        if isinstance(loader, _InProcess):
            return iter(loader)
        return ((batch.unpack(), after) for batch, after in loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place after the last returned batch and what the order depends on; JSON-able, of constant size,
        and the same on every rank."""
        return self._state(self._cursor)

    def state_before(self) -> dict[str, Any]:
        """Returns the state as it was before the last batch was taken: loaded, that batch comes again."""
        return self._state(self._before)

    def _state(self, cursor: Cursor) -> dict[str, Any]:
        return {"version": 1, "cursor": asdict(cursor), "order": self._sequence.order()}

    def load_state_dict(self, state: dict[str, Any], allow: Collection[str] | None = None) -> None:
        """Continues after the last batch of the loader that `state` is from.

        A difference in what the order depends on is an error unless `allow` names it. With another batch size or
        epoch_end the rows go on exactly where they stopped. With any other difference the epoch has another order (or
        other rows): training goes on at the same fraction of the same epoch, so in this one epoch some documents may
        come twice and others not at all.

        Raises:
            DataError: batches have been taken already, which would mix two orders.
            CheckpointMismatch: the order differs; every difference is listed.
        """
        if self._iterator is not None:
            raise DataError("the loader's state must be loaded before its first batch is taken")
        try:
            cursor, order = Cursor(**state["cursor"]), state["order"]
            if state["version"] != 1:
                raise ValueError(f"version {state['version']}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(f"the checkpoint's data state cannot be read ({error})") from error
        changed = self._check_order(cursor, order, self._allow if allow is None else allow)
        if changed - _KEEPS_ROWS and cursor.row:
            rows = len(self._sequence.plan(cursor.epoch))
            row = round(cursor.row * rows / cursor.epoch_rows)
            logger.warning(
                "the order of the data changed: going on in epoch {} at row {:,} of {:,}", cursor.epoch, row, rows
            )
            place = (cursor.epoch, row, rows) if row < rows else (cursor.epoch + 1, 0, 0)
            cursor = Cursor(cursor.batch, *place)
        elif changed - _KEEPS_ROWS:
            cursor = Cursor(cursor.batch, cursor.epoch)
        self._cursor = self._before = self._sampler.start = cursor
        self._changed = changed

    def verify(self, saved: dict[str, Any]) -> list[str]:
        """Returns what differs from the loaded state; where another order was allowed, only the batch counts."""
        live = self.state_dict()
        if self._changed:
            saved, live = ({"batch": state["cursor"]["batch"]} for state in (saved, live))
        return [f"{key}: loaded {saved[key]!r}, reads back {live[key]!r}" for key in live if live[key] != saved[key]]

    def batches_in_epochs(self, epochs: int) -> int:
        """Returns how many batches pass over the first `epochs` epochs; a last one that runs on (carry) counts."""
        size = self._sequence.config.batch_size
        rows = [self.rows_in_epoch(epoch) for epoch in range(epochs)]
        if self._sequence.config.epoch_end == "flush":
            return sum(-(-count // size) for count in rows)
        return -(-sum(rows) // size)

    def rows_in_epoch(self, epoch: int) -> int:
        """Returns the number of rows of an epoch."""
        if epoch not in self._rows:
            # without weights only the order changes, and packing depends on lengths alone
            varies = self._sequence.weights is not None and self._sequence.config.pack
            self._rows[epoch] = len(self._sequence.plan(epoch)) if varies or epoch == 0 else self.rows_in_epoch(0)
        return self._rows[epoch]

    def settle(self) -> None:
        """Nothing is under way that a checkpoint would have to know of."""

    def close(self) -> None:
        """Ends the loader processes."""
        self._iterator = self._loader = None  # torch ends them when the last reference goes

    def _check_order(self, cursor: Cursor, saved: dict[str, Any], allow: Collection[str]) -> set[str]:
        """Returns the keys that differ, all of them allowed."""
        current = self._sequence.order()
        changed = {key for key in current | saved if current.get(key) != saved.get(key)}
        refused = sorted(key for key in changed if not within(key, allow))
        if not changed and cursor.plan:
            plan = self._sequence.plan(cursor.planned_epoch).digest
            if plan != cursor.plan:  # another version of numpy or of this package draws another order
                changed = {"data"}
                if not within("data", allow):
                    raise CheckpointMismatch(
                        f"the plan of epoch {cursor.planned_epoch} is not the checkpoint's ({plan}, saved {cursor.plan}) "
                        "although all settings are equal: numpy or exact-trainer changed. Resume with the versions the "
                        "run was started with, or accept another order with --resume.override data"
                    )
        if refused:
            lines = "\n".join(f"  {key}: checkpoint {saved.get(key)!r}, now {current.get(key)!r}" for key in refused)
            if "data.sources" in refused:
                lines += (
                    "\nThe documents behind data.sources are not the same: a file, the tokenizer, its chat template, "
                    "data.train_on, data.train_on_prompt, data.val_documents or the rows skipped as bad have changed."
                )
            tables = sorted({key.split(".")[0] for key in refused})
            raise CheckpointMismatch(
                f"the data would come in another order than in the checkpoint's run:\n{lines}\n"
                f"Restore these settings, or let the new ones win with --resume.override {','.join(tables)}"
            )
        return changed

    def _warn_of_absent_sources(self) -> None:
        if self._sequence.weights is None:
            return
        for source, count in enumerate(shares(len(self._sequence.corpus), self._sequence.weights)):
            if count == 0:
                logger.warning("data.sources[{}]: its weight is too small for even one document per epoch", source)


def _loader(rows: _Rows, sampler: _Sampler, num_workers: int, pin_memory: bool) -> StatefulDataLoader:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch >= 2.12
        return StatefulDataLoader(
            rows,
            batch_size=None,  # the sampler's items are whole batches
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else starting the loader would advance torch's global generator
            snapshot_every_n_steps=NEVER,
            worker_init_fn=ignore_in_worker,
        )


def _unchanged(item: Any) -> Any:
    return item
