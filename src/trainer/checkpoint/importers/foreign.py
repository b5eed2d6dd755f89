"""What an importer hands over: another trainer's state under our names, read on demand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.errors import CheckpointError


@dataclass(frozen=True)
class ForeignGroup:
    """A param group: the parameters in it under our names, and the entries it had."""

    names: tuple[str, ...]
    entries: Mapping[str, Any]


@dataclass
class ForeignState:
    """
    Attributes:
        kind: whose it is, for messages.
        step: updates done.
        weights: a directory of safetensors, or parameter name -> a function that reads it.
        groups: AdamW's groups; every trainable parameter is in one.
        moment: (parameter, "exp_avg" | "exp_avg_sq") -> its tensor in the parameter's shape; None if it never had one.
        updates: parameter -> the updates that AdamW counted for it; a parameter without one never had a gradient.
        scheduler: the flat state of torch's scheduler (see `schedules`), {} where there is none.
        lr_points: (updates done, lr) from a log, to hold a schedule against.
        horizon: updates of the whole run, if the files say so.
        tokens, samples: counters, 0 where the files hold none.
    """

    kind: str
    step: int
    weights: Path | Mapping[str, Callable[[], Tensor]]
    groups: Sequence[ForeignGroup]
    moment: Callable[[str, str], Tensor | None]
    updates: Mapping[str, int]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    lr_points: Sequence[tuple[int, float]] = ()
    horizon: int | None = None
    tokens: int = 0
    samples: int = 0
    notes: list[str] = field(default_factory=list)


def check_adamw(entries: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns lr, initial_lr, betas, eps and weight_decay of a param group of torch.optim.AdamW as plain numbers.

    Raises:
        CheckpointError: it is of another optimizer, or of a variant that continues differently from ours.
    """
    lacking = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in entries]
    if lacking:
        raise CheckpointError(
            f"{where}: a param group has no {', '.join(lacking)}: this is no AdamW, and nothing else can be imported "
            f"(it has {', '.join(sorted(entries))})"
        )
    for name, wanted in (("amsgrad", False), ("maximize", False)):
        if entries.get(name, wanted) not in (wanted, None):
            raise CheckpointError(f"{where}: {name} = {entries[name]!r}, which this trainer's AdamW does not do")
    decay = _number(entries["weight_decay"], where, "weight_decay")
    if entries.get("decoupled_weight_decay") is False and decay:
        raise CheckpointError(f"{where}: Adam with weight_decay in the gradient; this trainer's AdamW decouples it")
    betas = entries["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise CheckpointError(f"{where}: betas = {betas!r}, expected two numbers")
    lr = _number(entries["lr"], where, "lr")
    return {
        "lr": lr,
        "initial_lr": _number(entries.get("initial_lr", lr), where, "initial_lr"),
        "betas": [_number(beta, where, "betas") for beta in betas],
        "eps": _number(entries["eps"], where, "eps"),
        "weight_decay": decay,
    }


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
        raise CheckpointError(f"{where}: {name} is {value!r}, no number")
    return float(value)


def update_count(value: Any, where: str) -> int:
    """Returns AdamW's step counter, which torch saves as a float32 tensor.

    Raises:
        CheckpointError: it is no count.
    """
    number = _number(value, where, "step")
    if number < 0 or number != int(number):
        raise CheckpointError(f"{where}: step is {number}, no count")
    return int(number)


def agreed_step(
    counts: Mapping[str, int], updates: Mapping[str, int], chosen: int | None, where: str, *, next_step: frozenset[str]
) -> int:
    """Returns how many updates a state has seen, if everything that counts them agrees, or what the user chose.

    counts: where it was found -> the count ("trainer_state.json: global_step" -> 60). updates: AdamW's own counters.
    next_step: those of `counts` that may already name the next step.

    Raises:
        CheckpointError: they disagree. A state written between its parts, or in the middle of an accumulation cycle, or
            one whose counters were lost in an earlier resume, looks like that.
    """
    adamw = sorted(set(updates.values()))
    seen = {"AdamW's step": adamw[-1], **counts} if adamw else dict(counts)
    if chosen is not None:
        return chosen
    if not seen:
        raise CheckpointError(f"{where} does not say how many updates were done; say it with --step N")
    step = next(iter(seen.values()))
    wrong = [name for name, count in seen.items() if count != step and not (name in next_step and count == step + 1)]
    if wrong or len(adamw) > 1:
        lines = [f"  {name} = {count}" for name, count in seen.items()]
        if len(adamw) > 1:
            odd = next(name for name, count in updates.items() if count != adamw[-1])
            lines.append(f"  AdamW's step of {odd} = {updates[odd]}")
        raise CheckpointError(
            "\n".join(
                [
                    f"{where}: its parts have counted different numbers of updates, as after a save in the middle of "
                    "gradient accumulation, of files from different steps, or of a resume that lost its counters:",
                    *lines,
                    "If you know which is right, say it with --step N",
                ]
            )
        )
    return step
