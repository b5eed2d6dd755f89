"""Checkpoints of the Hugging Face Trainer (``checkpoint-60/``) and of ``Accelerator.save_state``.

Read are the weights (safetensors), AdamW's state (optimizer.pt or .bin), the scheduler's position and trainer_state.json.
Not read: training_args.bin and pickled random states, which are code; this trainer draws random numbers by address.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer.checkpoint.importers.foreign import ForeignGroup, ForeignState, agreed_step, check_adamw, update_count
from trainer.checkpoint.importers.hf_order import parameter_names
from trainer.checkpoint.importers.recognise import Kind, mid_cycle_reason, read_small_json
from trainer.checkpoint.importers.schedules import flatten_scheduler
from trainer.checkpoint.importers.torch_files import load_file
from trainer.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def read_hf(path: Path, kind: Kind, model: nn.Module, step: int | None) -> ForeignState:
    """Returns the state in a directory.

    model: transformers' model of the run, on meta: it says in which order the optimizer numbers the parameters. step: the
    updates done, if the user says so.

    Raises:
        CheckpointError: a file is missing or holds something else than it should, or the parts do not belong together.
    """
    suffix = "pt" if kind is Kind.HF_TRAINER else "bin"
    where = str(path / f"optimizer.{suffix}")
    if (path / f"optimizer_1.{suffix}").exists():
        raise CheckpointError(f"{path} holds the states of several optimizers; only one can be imported")
    saved = load_file(path / f"optimizer.{suffix}")
    state, groups = _check_optimizer(saved, where)
    shapes = {number: tuple(entries["exp_avg"].shape) for number, entries in state.items()}
    names = parameter_names(model, groups, shapes, where)
    name_of = {
        number: name
        for group, own in zip(groups, names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    by_name = {name_of[number]: entries for number, entries in state.items()}
    updates = {name: update_count(entries["step"], where) for name, entries in by_name.items()}
    log = _trainer_state(path) if kind is Kind.HF_TRAINER else {}
    counts = {"trainer_state.json: global_step": log["global_step"]} if "global_step" in log else {}
    scheduler = _scheduler(path / f"scheduler.{suffix}")
    position = _position(scheduler, kind, updates)
    counts |= {f"scheduler.{suffix}: last_epoch": position} if position is not None else {}
    return ForeignState(
        kind="Hugging Face Trainer" if kind is Kind.HF_TRAINER else "Accelerate",
        step=agreed_step(counts, updates, step, str(path), next_step=frozenset()),
        weights=path,
        groups=[
            ForeignGroup(tuple(own), check_adamw(group, where)) for group, own in zip(groups, names, strict=True) if own
        ],
        moment=lambda name, entry: by_name[name][entry] if name in by_name else None,
        updates=updates,
        # Stepped once for each process, its shape would be stretched: then only the learning rates are held on to.
        scheduler=scheduler if scheduler.get("last_epoch") == max(updates.values(), default=0) else {},
        lr_points=_logged(log),
        horizon=log.get("max_steps") or None,
        tokens=int(log.get("num_input_tokens_seen") or 0),
    )


def _check_optimizer(saved: Any, where: str) -> tuple[dict[int, Mapping[str, Any]], list[dict[str, Any]]]:
    """Returns ("state", "param_groups") of an AdamW's state_dict, checked."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise CheckpointError(f"{where} is no state of a torch optimizer")
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise CheckpointError(f"{where} has no param_groups")
    numbers = [number for group in groups for number in group.get("params", ())]
    if len(set(numbers)) != len(numbers) or not set(saved["state"]) <= set(numbers):
        raise CheckpointError(f"{where}: its groups and its state name different parameters")
    for number, entries in saved["state"].items():
        found = sorted(entries) if isinstance(entries, dict) else type(entries).__name__
        if found != ["exp_avg", "exp_avg_sq", "step"]:
            raise CheckpointError(
                f"{where}: parameter {number} has the state {found}; torch's AdamW has exp_avg, exp_avg_sq and step. "
                "Other optimizers (8-bit, Adafactor, amsgrad, ...) cannot be imported"
            )
        if not all(isinstance(entries[name], Tensor) for name in _MOMENTS):
            raise CheckpointError(f"{where}: the moments of parameter {number} are no tensors")
    return saved["state"], groups


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = read_small_json(path / "trainer_state.json")
    except ValueError as error:
        raise CheckpointError(f"{path / 'trainer_state.json'} {error}") from error
    middle = mid_cycle_reason(state)
    if middle:
        raise CheckpointError(f"{path} was {middle}; import an earlier checkpoint")
    for name in ("global_step", "max_steps"):
        if type(state.get(name, 0)) is not int or state.get(name, 0) < 0:
            raise CheckpointError(f"{path / 'trainer_state.json'}: {name} is {state[name]!r}, no count")
    return state


def _scheduler(path: Path) -> dict[str, Any]:
    """Returns the scheduler's state, flat; {} where there is none."""
    if not path.exists():
        return {}
    state = load_file(path)
    if not isinstance(state, dict) or type(state.get("last_epoch")) is not int:
        raise CheckpointError(f"{path} has no last_epoch: it is no state of a torch scheduler")
    return flatten_scheduler(state)


def _position(scheduler: Mapping[str, Any], kind: Kind, updates: Mapping[str, int]) -> int | None:
    """Returns the updates that the scheduler has seen; None where there is no scheduler.

    Accelerate steps it once for each process: then it stands at a multiple of AdamW's counter.
    """
    if not scheduler:
        return None
    last, steps = scheduler["last_epoch"], max(updates.values(), default=0)
    return steps if kind is Kind.ACCELERATE and steps and last % steps == 0 else last


def _logged(log: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Returns (step, lr) of the rows of the Trainer's log that have one."""
    rows = log.get("log_history")
    points = [
        (row.get("step"), row.get("learning_rate"))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict)
    ]
    return [(s, float(lr)) for s, lr in points if type(s) is int and isinstance(lr, int | float)]
