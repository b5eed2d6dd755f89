"""How far a run is: the only counters there are."""

from dataclasses import asdict, dataclass
from typing import Any

from trainer.data.batch import GlobalBatch


@dataclass
class Progress:
    """Counters over the whole run, not this process.

    Attributes:
        step: optimizer updates done (a skipped non-finite update counts: its batch is used up).
        tokens: training tokens seen, padding not counted; validation is never counted.
        supervised_tokens: those of them that had a label.
        samples: rows of global batches seen.
        documents: documents in those rows.
        epoch: the epoch of the newest batch's first row, from 0.
        skipped_updates: updates left out because a gradient was not finite.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    samples: int = 0
    documents: int = 0
    epoch: int = 0
    skipped_updates: int = 0

    def advance(self, batch: GlobalBatch, *, applied: bool) -> None:
        """Counts one step over `batch`; called once the update is done and before anything is saved."""
        self.step += 1
        self.tokens += batch.tokens
        self.supervised_tokens += batch.supervised_tokens
        self.samples += batch.rows
        self.documents += batch.documents
        self.epoch = batch.epoch
        self.skipped_updates += not applied

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])
