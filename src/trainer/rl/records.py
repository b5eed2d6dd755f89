"""Groups of rollouts as arrays for a checkpoint, exactly, and as lines to read.

Nothing here imports torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer.core.files import make_dirs, write_atomic
from trainer.errors import CorruptCheckpoint, DataError
from trainer.rl.types import Group, Rollout

if TYPE_CHECKING:
    from trainer.rl.rendering import Renderer

Row = dict[str, Any]
ROLLOUTS_DIR = "rollouts"
_FILE = re.compile(r"step_(\d{8,})\.jsonl")
_DTYPES: dict[str, Any] = {
    "numbers": np.int64,  # [groups]
    "group_sizes": np.int64,  # [groups] rollouts
    "lengths": np.int64,  # [rollouts] tokens
    "turns": np.int32,  # [rollouts]
    "stopped": np.uint8,  # [rollouts]
    "scored": np.uint8,  # [rollouts]
    "rewards": np.float64,  # [rollouts], 0 where not scored
    "ids": np.int32,  # [tokens]
    "trained": np.uint8,  # [tokens / 8], one bit each
    "logprobs": np.float32,  # [trained tokens]
    "versions": np.int32,  # [trained tokens]
}


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns the groups as flat numpy arrays, one per quantity, and under "text" what is JSON: ids, parts and errors.

    Log-probabilities and versions are kept of trained tokens only; elsewhere they are 0 and -1.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = _joined([r.trained for r in rollouts], np.bool_)
    values: dict[str, Any] = {
        "numbers": [group.number for group in groups],
        "group_sizes": [len(group.rollouts) for group in groups],
        "lengths": [r.ids.size for r in rollouts],
        "turns": [r.turns for r in rollouts],
        "stopped": [r.finish_reason == "stop" for r in rollouts],
        "scored": [r.reward is not None for r in rollouts],
        "rewards": [0.0 if r.reward is None else r.reward for r in rollouts],
        "ids": _joined([r.ids for r in rollouts], np.int32),
        "trained": np.packbits(trained),
        "logprobs": _joined([r.logprobs for r in rollouts], np.float32)[trained],
        "versions": _joined([r.versions for r in rollouts], np.int32)[trained],
    }
    text = {
        "ids": [group.id for group in groups],
        "parts": [dict(r.parts) for r in rollouts],
        "errors": [r.error for r in rollouts],
    }
    return {name: np.asarray(values[name], dtype) for name, dtype in _DTYPES.items()} | {"text": text}


def unpack_groups(packed: Mapping[str, Any]) -> list[Group]:
    """Returns the groups that `pack_groups` was given, bit for bit.

    Raises:
        CorruptCheckpoint: the arrays do not belong together.
    """
    try:
        return _unpack({name: np.asarray(packed[name], dtype) for name, dtype in _DTYPES.items()}, packed["text"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"the checkpoint's rollouts cannot be read: {error!r}") from error


def _unpack(arrays: Mapping[str, npt.NDArray[Any]], text: Mapping[str, Any]) -> list[Group]:
    lengths, sizes = arrays["lengths"], arrays["group_sizes"]
    trained = np.unpackbits(arrays["trained"], count=arrays["ids"].size).astype(np.bool_)
    _check("tokens", int(lengths.sum()), arrays["ids"].size, trained.size)
    _check("trained tokens", int(trained.sum()), arrays["logprobs"].size, arrays["versions"].size)
    per_rollout = [arrays[name].size for name in ("turns", "stopped", "scored", "rewards")]
    _check("rollouts", int(sizes.sum()), lengths.size, *per_rollout, len(text["parts"]), len(text["errors"]))
    _check("groups", sizes.size, arrays["numbers"].size, len(text["ids"]))
    logprobs = np.zeros(trained.size, np.float32)
    logprobs[trained] = arrays["logprobs"]
    versions = np.full(trained.size, -1, np.int32)
    versions[trained] = arrays["versions"]
    ends = np.cumsum(lengths).tolist()
    rollouts = [
        Rollout(
            ids=arrays["ids"][start:end].copy(),
            trained=trained[start:end].copy(),
            logprobs=logprobs[start:end].copy(),
            versions=versions[start:end].copy(),
            finish_reason="stop" if arrays["stopped"][row] else "length",
            turns=int(arrays["turns"][row]),
            reward=float(arrays["rewards"][row]) if arrays["scored"][row] else None,
            parts=dict(text["parts"][row]),
            error=text["errors"][row],
        )
        for row, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    stops = np.cumsum(sizes).tolist()
    return [
        Group(int(arrays["numbers"][row]), text["ids"][row], rollouts[start:stop])
        for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
    ]


def _check(what: str, *counts: int) -> None:
    if len(set(counts)) > 1:
        raise ValueError(f"the numbers of {what} differ: {counts}")


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


# --- to read ------------------------------------------------------------------------------------------------------------


def rollouts_path(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's rollouts."""
    return run_dir / ROLLOUTS_DIR / f"step_{step:08d}.jsonl"


def write_rollouts(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    *,
    renderer: "Renderer",
    names: Sequence[str],
    advantages: Sequence[Sequence[float]] | None = None,
) -> Path:
    """Writes one line for each rollout to rollouts/step_<step>.jsonl, replacing the file as a whole; returns its path.

    Args:
        names: of the environments, by position.
        advantages: of each group's rollouts, as `groups` has them.

    Raises:
        OSError: it cannot be written.
    """
    lines = []
    for place, group in enumerate(groups):
        for sample, rollout in enumerate(group.rollouts):
            row: Row = {"step": step, "env": names[int(group.id.partition(":")[0])], "prompt_id": group.id}
            row |= {"number": group.number, "sample": sample, **_readable(rollout, renderer)}
            row["advantage"] = None if advantages is None else float(advantages[place][sample])
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    path = rollouts_path(run_dir, step)
    make_dirs(path.parent)
    write_atomic(path, "".join(lines).encode("utf-8", "replace"))
    return path


def _readable(rollout: Rollout, renderer: "Renderer") -> Row:
    said = np.flatnonzero(rollout.trained)
    start = int(said[0]) if said.size else rollout.ids.size
    versions = rollout.versions[rollout.trained]
    return {
        "prompt": renderer.text(rollout.ids[:start].tolist()),
        "completion": renderer.text(rollout.ids[start:].tolist()),
        "reward": rollout.reward,
        "parts": rollout.parts,
        "length_tokens": int(said.size),
        "finish_reason": rollout.finish_reason,
        "turns": rollout.turns,
        "versions": [int(versions.min()), int(versions.max())] if versions.size else None,
        "error": rollout.error,
    }


def recorded_steps(run_dir: Path) -> list[int]:
    """Returns the steps whose rollouts the run has written, ascending."""
    directory = run_dir / ROLLOUTS_DIR
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match.group(1)) for name in names if (match := _FILE.fullmatch(name)))


def read_rollouts(run_dir: Path, step: int | None = None) -> list[Row]:
    """Returns the lines of a step, by default of the newest.

    Raises:
        DataError: the run has none, or the file cannot be read.
    """
    steps = recorded_steps(run_dir)
    if not steps:
        what = "has no rollouts/step_*.jsonl" if run_dir.is_dir() else "is not a directory"
        raise DataError(f"{run_dir} {what}; give the directory of an RL run (its output_dir)")
    if step is not None and step not in steps:
        near = ", ".join(map(str, sorted(sorted(steps, key=lambda other: abs(other - step))[:5])))
        raise DataError(f"{run_dir} has no rollouts of step {step}; the nearest are {near} ({len(steps)} in all)")
    path = rollouts_path(run_dir, steps[-1] if step is None else step)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
