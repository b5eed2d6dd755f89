"""Two runs held against each other, step by step: their metrics, their samples, and the state they ended with.

Reads what runs leave behind (metrics.jsonl, samples.jsonl, checkpoints); starts nothing and needs no torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.checkpoint.diff import Contents, Difference, float_values, open_contents
from trainer.checkpoint.diff import differences as checkpoint_differences
from trainer.checkpoint.layout import owner_of
from trainer.checkpoint.leaves import same
from trainer.train.sinks.jsonl import read_rows

Rows = Mapping[int, Mapping[str, Any]]
"""Step -> its row of metrics.jsonl, with "ids" (one list per row of the global batch) where samples.jsonl has the step."""

Verdict = Literal["equal", "close", "different"]

IDS = "ids"
_CLOCK = ("_seconds", "_per_second", "_gib", "_bytes", "mfu")  # endings of keys that measure a machine, not a training
_FIRST = ("ids", "epoch", "samples", "tokens", "lr", "loss", "grad_norm")
"""What a step reads before what it computes from it: the order in which differences are told."""


@dataclass(frozen=True)
class Bound:
    """How far apart numbers may lie that another world size adds up in another order; 0 = not at all."""

    relative: float = 0.0

    def judge(self, key: str, a: Any, b: Any) -> Verdict:
        """Compares one value of a metrics row. Counters, ids and learning rates must be equal at every world size."""
        if same(a, b):
            return "equal"
        bounded = self.relative and not (key.startswith("lr") or key == IDS)
        if not bounded or type(a) is not float or type(b) is not float:
            return "different"
        return "close" if abs(a - b) <= self.relative * max(abs(a), abs(b)) else "different"


@dataclass(frozen=True)
class Value:
    """One value of a step in both runs."""

    step: int
    key: str
    a: Any
    b: Any
    verdict: Verdict


@dataclass(frozen=True)
class Distance:
    """How far apart two versions of a tensor lie: the norm of their difference over the norm of the first."""

    name: str
    relative: float


@dataclass
class StateComparison:
    """What two checkpoints of the same step have in common."""

    tensors: int = 0
    differences: list[Difference] = field(default_factory=list)
    worst: dict[str, Distance] = field(default_factory=dict)
    """By owner, of tensors that are close and not equal."""


def run_rows(run_dir: Path, name: str = "metrics.jsonl") -> dict[int, dict[str, Any]]:
    """Returns a run's rows by step, without what a clock measured. "metrics.superseded.jsonl": what resumes repeated.

    Raises:
        DataError: a file cannot be read.
    """
    if not (run_dir / name).exists():
        return {}
    rows = {row["step"]: {k: v for k, v in row.items() if not k.endswith(_CLOCK)} for row in read_rows(run_dir / name)}
    samples = run_dir / name.replace("metrics", "samples")
    for row in read_rows(samples) if samples.exists() else []:
        if row["step"] in rows:
            rows[row["step"]][IDS] = row["ids"]
    for row in rows.values():
        row.pop("generation", None)
    return rows


def compare_rows(a: Rows, b: Rows, bound: Bound, last_step: int) -> Iterator[Value]:
    """Yields every value of every step up to `last_step`, in the order in which a step comes to them.

    A step or key that one side lacks has None there and is "different".
    """
    for step in range(last_step + 1):
        left, right = a.get(step, {}), b.get(step, {})
        for key in sorted(left.keys() | right.keys(), key=_order):
            x, y = left.get(key), right.get(key)
            lacking = key not in left or key not in right
            yield Value(step, key, x, y, "different" if lacking else bound.judge(key, x, y))
        if not left and not right and step > 0:
            yield Value(step, "step", None, None, "different")


def _order(key: str) -> tuple[int, str]:
    return (_FIRST.index(key), "") if key in _FIRST else (len(_FIRST), key)


def compare_states(a: Path, b: Path, bound: Bound) -> StateComparison:
    """Compares two checkpoint directories by value: entries exactly, tensors bit for bit or within `bound`.

    Raises:
        CorruptCheckpoint: one cannot be read.
    """
    left, right = open_contents(a), open_contents(b)
    result = StateComparison(tensors=len(left.tensors()))
    for difference in checkpoint_differences(left, right):
        distance = _distance(difference.key, left, right) if bound.relative else None
        if distance is None or distance.relative > bound.relative:
            text = difference.text if distance is None else f"{difference.text} ({distance.relative:.2g} relative)"
            result.differences.append(Difference(difference.owner, difference.key, text))
            continue
        owner = owner_of(distance.name)
        if owner not in result.worst or distance.relative > result.worst[owner].relative:
            result.worst[owner] = distance
    return result


def spread(values: Iterable[Value], states: StateComparison) -> float:
    """Returns the largest relative distance of values and tensors that are close and not equal; 0 = there is none."""
    apart = [abs(value.a - value.b) / max(abs(value.a), abs(value.b)) for value in values if value.verdict == "close"]
    return max([0.0, *apart, *(distance.relative for distance in states.worst.values())])


def _distance(name: str, a: Contents, b: Contents) -> Distance | None:
    """Returns how far apart a float tensor is in the two; None for what has no distance."""
    if name not in a.layout or name not in b.layout:
        return None
    left, right = a.layout[name], b.layout[name]
    if (left.dtype, left.shape) != (right.dtype, right.shape) or left.dtype not in ("F64", "F32", "BF16", "F16"):
        return None
    x, y = (float_values(contents.bits(name), left.dtype) for contents in (a, b))
    if x is None or y is None or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    norm = float(np.linalg.norm(x))
    return Distance(name, float(np.linalg.norm(x - y)) / norm if norm else float("inf"))
