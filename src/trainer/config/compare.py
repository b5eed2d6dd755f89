"""What a resume changes: the checkpoint's config held against the one that was given now.

The table of who wins (everything that is not named here is the new config's: checkpoint cadence, logging, micro-batch,
ranks, where things are written):

* the checkpoint: the optimizer's and the schedule's settings, which live on in its state;
* nobody: what changes the order of the data, or what of them is trained on, is a conflict, because the samples seen so far
  would mean something else.

Where a file, a tokenizer or a template lies means nothing; whether the documents are the same ones is seen when they are
there (`BatchLoader.load_state_dict`).

``resume.override`` names keys or tables for which the new config wins all the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.problems import shown
from trainer.config.run import RunConfig
from trainer.config.schema import dotted, leaves

_CHECKPOINT = (
    "optim.type",
    "optim.lr",
    "optim.weight_decay",
    "optim.decay",
    "optim.betas",
    "optim.eps",
    "optim.momentum",
    "optim.adamw_lr",
    "optim.nesterov",
    "optim.adjust_lr",
    "optim.ns_coefficients",
    "optim.ns_steps",
    "optim.class_path",
    "optim.args",
    "scheduler",
)
_START = (
    "resume",
    "overwrite",
    "ckpt.skip_optimizer",
    "ckpt.skip_scheduler",
    "ckpt.skip_dataloader",
    "ckpt.skip_progress",
)
_CONFLICT = (
    "seed",
    "data.sources",
    "data.val_documents",
    "data.fake",
    "data.seq_len",
    "data.pack",
    "data.batch_size",
    "data.epoch_end",
    "data.shuffle",
    "data.train_on",
    "data.train_on_prompt",
    "envs",
    "rl.prompts",
    "rl.samples",
)


_PLACE = re.compile(r"data\.sources\.\d+\.path")


@dataclass(frozen=True)
class Difference:
    key: str
    saved: Any
    current: Any
    winner: Literal["checkpoint", "config", "conflict"]

    @property
    def _changes(self) -> str:
        return "what is trained on" if self.key.startswith("data.train_on") else "the data order"

    def __str__(self) -> str:
        text = f"{self.key}: checkpoint {shown(self.saved)}, config {shown(self.current)}"
        advice = f"take the config's with --resume.override {self.key}"
        match self.winner:
            case "config":
                return f"{text} -> config"
            case "checkpoint":
                return f"{text} -> checkpoint; {advice}"
            case "conflict":
                return f"{text} -> conflict: it changes {self._changes}; set it back, or {advice}"


def differences(saved: RunConfig, current: RunConfig, override: Iterable[str] = ()) -> list[Difference]:
    """Every key whose value differs, in the order of the config, and whose value a resume uses.

    ``override`` is ``resume.override``. A table that only one side has is compared by its keys, with None for the other
    side. `resume` itself, `overwrite` and `ckpt.skip_*` describe one start, not the run: left out.
    """
    before, now = _flat(saved), _flat(current)
    found = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) and not within(key, _START):
            moved = _PLACE.fullmatch(key) and key in before and key in now
            winner = "config" if moved else _winner(key, tuple(override))
            found.append(Difference(key, before.get(key), now.get(key), winner))
    return found


def _flat(config: RunConfig) -> dict[str, Any]:
    return {dotted(key): value for key, value in leaves(config)}


def _winner(key: str, override: tuple[str, ...]) -> Literal["checkpoint", "config", "conflict"]:
    if within(key, override):
        return "config"
    if within(key, _CHECKPOINT):
        return "checkpoint"
    return "conflict" if within(key, _CONFLICT) else "config"


def within(key: str, names: Iterable[str]) -> bool:
    """Whether `names` has the key, or a table that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
