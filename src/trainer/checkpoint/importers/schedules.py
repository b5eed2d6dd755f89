"""The learning-rate schedule of another trainer's state, as one of ours.

Where the files hold the whole shape (torch's LinearLR, CosineAnnealingLR and SequentialLR), it is read. Where they hold
only a position (LambdaLR), the config's schedule is taken if it gives the saved learning rates, and refused if not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.errors import CheckpointError
from trainer.optim.schedule import LR_TOLERANCE, SMALLEST_START_FACTOR, Schedule

_START = 2 * SMALLEST_START_FACTOR  # of the peak: ramps that begin at 0 lie that close to ours, which begins at 1e-8


def schedule_of_torch(state: Mapping[str, Any]) -> Schedule | None:
    """Returns the schedule in the state of torch's LinearLR, CosineAnnealingLR, ConstantLR or a SequentialLR of these.

    state: flat names, as "_schedulers.0.total_iters". None: it is another scheduler, whose shape is not in its state.

    Raises:
        CheckpointError: its entries are not what such a scheduler has, or its shape is none of ours.
    """
    try:
        parts = _parts(state)
        if parts is None:
            return None
        schedule = _schedule_of(state, parts)
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise CheckpointError(f"the saved learning-rate scheduler cannot be read: {error!r}") from error
    if schedule is None:
        raise CheckpointError(
            f"the state's learning rate goes on as {_shapes(parts)}, which is no schedule of this trainer; let the config's "
            "apply from here on with --schedule config"
        )
    return schedule


def flatten_scheduler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a scheduler's state_dict with the states of the schedulers inside it under "_schedulers.0.T_max"."""
    inner: Any = state.get("_schedulers")
    flat = {name: value for name, value in state.items() if name != "_schedulers"}
    parts: list[Any] = inner if isinstance(inner, list) else []
    for number, part in enumerate(parts):
        if isinstance(part, dict):
            flat |= {f"_schedulers.{number}.{name}": value for name, value in part.items()}
    return flat


def _shapes(parts: Sequence[Mapping[str, Any]]) -> str:
    names = ("T_max", "eta_min", "start_factor", "end_factor", "factor", "total_iters")
    return ", then ".join(f"({', '.join(f'{name} {part[name]}' for name in names if name in part)})" for part in parts)


def _schedule_of(state: Mapping[str, Any], parts: list[dict[str, Any]]) -> Schedule | None:
    milestones = state.get("_milestones", [])
    warmup, start = 0, 0.0
    if _is_ramp(parts[0]):
        warmup, start = int(parts[0]["total_iters"]), float(parts[0]["start_factor"])
        parts = parts[1:]
    rest = [part for part in parts if not _is_flat(part)]
    begin = int(milestones[-1]) if milestones and rest else warmup
    if not rest:
        return Schedule("constant", total_steps=max(warmup, 1), warmup_steps=warmup, min_factor=_factor(start))
    if len(rest) > 1:
        return None
    (last,) = rest
    if "T_max" in last and begin == warmup:
        base = float(last["base_lrs"][0])
        low = float(last["eta_min"]) / base
        schedule = Schedule("cosine", total_steps=warmup + int(last["T_max"]), warmup_steps=warmup, min_factor=low)
        return schedule if not warmup or math.isclose(_factor(start), _factor(low), abs_tol=_START) else None
    if "end_factor" in last and float(last["start_factor"]) == 1.0:
        decay, low = int(last["total_iters"]) + 1, float(last["end_factor"])
        if warmup and not math.isclose(start, low, rel_tol=LR_TOLERANCE):
            return None
        return Schedule("linear", total_steps=begin + decay, warmup_steps=warmup, decay_steps=decay, min_factor=low)
    return None


def _factor(start: float) -> float:
    return 0.0 if start <= SMALLEST_START_FACTOR else start


def _parts(state: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the state of each scheduler of a SequentialLR, or of the only one."""
    numbers = sorted({int(name.split(".")[1]) for name in state if name.startswith("_schedulers.")})
    if numbers:
        prefixes = [f"_schedulers.{number}." for number in numbers]
        parts = [{n.removeprefix(p): v for n, v in state.items() if n.startswith(p)} for p in prefixes]
    else:
        parts = [dict(state)]
    known = all("T_max" in part or "total_iters" in part for part in parts)
    return parts if known else None


def _is_ramp(part: Mapping[str, Any]) -> bool:
    return "end_factor" in part and float(part["start_factor"]) < 1.0 and float(part["end_factor"]) == 1.0


def _is_flat(part: Mapping[str, Any]) -> bool:
    """LinearLR from 1 to 1, or ConstantLR with factor 1."""
    if "factor" in part:
        return float(part["factor"]) == 1.0
    return "end_factor" in part and float(part["start_factor"]) == float(part["end_factor"]) == 1.0


def fitting_schedule(
    configured: Schedule, *, step: int, factor: float, points: Sequence[tuple[int, float]], horizon: int | None
) -> Schedule:
    """Returns the schedule of the config, in the convention of the trainer that wrote the state.

    factor: lr / initial_lr of the saved groups after `step` updates. points: (updates done, factor) from a log. horizon:
    the run's number of updates, if the state has it.

    Linear decays of transformers and torchtitan reach zero one update after ours, which is ours with one step more.

    Raises:
        CheckpointError: none of them gives the saved value; names it and what the config gives.
    """
    for candidate in _candidates(configured, horizon):
        if _fits(candidate, [(step, factor)]) and (_fits(candidate, points) or _fits(candidate, points, shift=1)):
            return candidate
    logged = ""
    if any(_fits(candidate, [(step, factor)]) for candidate in _candidates(configured, horizon)):
        logged = " The lr at that step fits, but not those that the log holds for earlier steps."
    raise CheckpointError(
        f"the state's lr is {factor:.8g} of its peak at step {step}, the config's schedule ({_text(configured)}) gives "
        f"{configured.factor(step):.8g}: set [scheduler] and max_steps to what that run used, or let the config's schedule "
        f"win with --schedule config.{logged}"
    )


def _candidates(configured: Schedule, horizon: int | None) -> Iterator[Schedule]:
    for total in dict.fromkeys([configured.total_steps, horizon or configured.total_steps]):
        schedule = replace(configured, total_steps=total)
        yield schedule
        if schedule.type == "linear":
            longest = max(0, total - schedule.warmup_steps)
            decay = longest if schedule.decay_steps is None else schedule.decay_steps
            yield replace(schedule, total_steps=total + 1, decay_steps=decay + 1)


def _fits(schedule: Schedule, points: Sequence[tuple[int, float]], shift: int = 0) -> bool:
    """Whether it gives every point; `shift` = 1: the log has the lr of the update itself, not that of the next one."""
    return all(
        math.isclose(schedule.factor(max(0, step - shift)), factor, rel_tol=LR_TOLERANCE, abs_tol=_START)
        for step, factor in points
    )


def _text(schedule: Schedule) -> str:
    parts = [schedule.type, f"max_steps {schedule.total_steps}", f"warmup_steps {schedule.warmup_steps}"]
    return ", ".join(parts + ([f"decay_steps {schedule.decay_steps}"] if schedule.decay_steps is not None else []))
