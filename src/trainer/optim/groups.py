"""Param groups: who is in which, which entries a checkpoint restores, and how groups are matched.

Groups are matched by the names of their parameters, never by position: a model with one more layer, or a policy with one
more group, must not hand one group's learning rate to another.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trainer.errors import CheckpointMismatch, TrainingError

# What describes this process and its layout. It keeps the live run's value and is not written to checkpoints.
RUN_LOCAL = frozenset(
    {"params", "fused", "foreach", "capturable", "differentiable", "distributed_mesh_name", "param_names"}
)
IDENTITY = frozenset({"name"})


DECAYED: dict[str, frozenset[str]] = {
    "matrices": frozenset({"matrix", "head"}),
    "weights": frozenset({"matrix", "head", "embedding"}),
    "all": frozenset({"matrix", "head", "embedding", "vector"}),
}
"""optim.decay -> the roles of the parameters that decay."""


def decay_groups(
    parameters: Iterable[tuple[str, Tensor]], roles: dict[str, str], *, weight_decay: float, decay: str = "matrices"
) -> list[dict[str, Any]]:
    """Returns the groups "decay" and "no_decay"; `decay` ("matrices", "weights", "all") says who is in which.

    Raises:
        TrainingError: a parameter is given twice, has no role, or nothing is trainable.
    """
    groups = {
        name: {"name": name, "params": [], "param_names": [], "weight_decay": value}
        for name, value in (("decay", weight_decay), ("no_decay", 0.0))
    }
    claimed: set[int] = set()
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if name not in roles:
            raise TrainingError(f"parameter {name!r} is claimed by no param group: it has no role")
        if id(parameter) in claimed:
            raise TrainingError(f"parameter {name!r} is claimed by two param groups (a tied weight under two names?)")
        claimed.add(id(parameter))
        group = groups["decay" if roles[name] in DECAYED[decay] else "no_decay"]
        group["params"].append(parameter)
        group["param_names"].append(name)
    if not claimed:
        raise TrainingError("the model has no trainable parameter")
    return [group for group in groups.values() if group["params"]]


def restored_entries(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a live group that belong into a checkpoint, by name; tuples as lists, as JSON has them."""
    kept = {key: value for key, value in group.items() if key not in RUN_LOCAL | IDENTITY}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def match_groups(
    live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each live group with the saved group of the same parameters.

    Raises:
        CheckpointMismatch: memberships differ; names the parameters that were added, are gone or moved.
    """
    by_members = {frozenset(group["param_names"]): group for group in saved}
    pairs, unmatched = [], []
    for group in live:
        partner = by_members.get(frozenset(group["param_names"]))
        if partner is None:
            unmatched.append(group)
        else:
            pairs.append((group, partner))
    if unmatched or len(pairs) != len(saved):
        raise CheckpointMismatch(_membership_message(live, saved))
    return pairs


def _membership_message(live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> str:
    now = {name: group["name"] for group in live for name in group["param_names"]}
    then = {name: group["name"] for group in saved for name in group["param_names"]}
    lines = [f"  {name}: only in this run (group {now[name]!r})" for name in now if name not in then]
    lines += [f"  {name}: only in the checkpoint (group {then[name]!r})" for name in then if name not in now]
    moved = [name for name in now if name in then and now[name] != then[name]]
    lines += [f"  {name}: moved from group {then[name]!r} to {now[name]!r}" for name in moved]
    if not lines:
        lines = ["  the same parameters are split into groups differently"]
    shown = lines[:20] + ([f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return "\n".join(["the optimizer's param groups do not fit the checkpoint's:", *shown])


def write_entries(live: dict[str, Any], saved: dict[str, Any], *, keep: frozenset[str] = frozenset()) -> list[str]:
    """Writes saved entries into the live group dict, in place, so that whoever holds the dict sees them.

    Args:
        keep: entries whose live value wins (from resume.override).

    Returns:
        The live entries that the checkpoint lacks; they keep their live value.
    """
    wanted = restored_entries(live)
    for key in wanted:
        if key in saved and key not in keep:
            live[key] = tuple(saved[key]) if isinstance(live[key], tuple) else saved[key]
    return [key for key in wanted if key not in saved]
