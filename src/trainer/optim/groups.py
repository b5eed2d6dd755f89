"""Param groups: who is in which, which entries a checkpoint restores, and how groups are matched.

Groups are matched by the names of their parameters, never by position: a model with one more layer, or a policy with one
more group, must not hand one group's learning rate to another.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer.errors import CheckpointMismatch, TrainingError

# The entries of a group, and whose value a resumed run has. All that is not named here is RESTORED from the checkpoint,
# whatever optimizer it belongs to.
RUN_LOCAL = frozenset(
    {"params", "fused", "foreach", "capturable", "differentiable", "distributed_mesh_name", "param_names"}
)
"""What describes this process and its layout: keeps the live run's value and is not written to checkpoints."""
IDENTITY = frozenset({"name"})
OVERRIDABLE = {
    "optim.lr": ("lr", "initial_lr"),
    "optim.weight_decay": ("weight_decay",),
    "optim.decay": ("weight_decay",),
    "optim.betas": ("betas",),
    "optim.eps": ("eps",),
    "optim.momentum": ("momentum",),
    "optim.adamw_lr": ("lr", "initial_lr"),
    "optim.nesterov": ("nesterov",),
    "optim.adjust_lr": ("adjust_lr",),
    "optim.ns_coefficients": ("ns_coefficients",),
    "optim.ns_steps": ("ns_steps",),
}
"""Config key -> the entries that it sets: restored, unless resume.override names the key."""

_SHOWN = 12  # names of parameters in a line

DECAYED: dict[str, frozenset[str]] = {
    "matrices": frozenset({"matrix", "experts", "router", "head"}),
    "weights": frozenset({"matrix", "experts", "router", "head", "embedding"}),
    "all": frozenset({"matrix", "experts", "router", "head", "embedding", "vector"}),
}
"""optim.decay -> the roles of the parameters that decay."""


def decay_groups(
    parameters: Iterable[tuple[str, Tensor]], roles: Mapping[str, str], *, weight_decay: float, decay: str = "matrices"
) -> list[dict[str, Any]]:
    """Returns the groups "decay" and "no_decay"; `decay` ("matrices", "weights", "all") says who is in which."""
    entries = {"decay": {"weight_decay": weight_decay}, "no_decay": {"weight_decay": 0.0}}
    policy = {role: "decay" if role in DECAYED[decay] else "no_decay" for role in DECAYED["all"]}
    return assign(parameters, roles, policy, entries)


def muon_groups(
    parameters: Iterable[tuple[str, Tensor]],
    roles: Mapping[str, str],
    *,
    lr: float,
    adamw_lr: float,
    weight_decay: float,
    decay: str = "matrices",
) -> list[dict[str, Any]]:
    """Returns the groups of Muon that have members: "muon" (hidden matrices), "experts" (stacks of them), "router",
    "adamw_decay" and "adamw" (the head, embeddings, norms, biases).

    A router picks among the experts by its rows, whose lengths matter, so it is AdamW's, in a group of its own.
    """
    muon = {"algorithm": "muon", "lr": lr, "initial_lr": lr, "weight_decay": weight_decay}
    adamw = {"algorithm": "adamw", "lr": adamw_lr, "initial_lr": adamw_lr}
    entries = {
        "muon": muon,
        "experts": muon,
        "router": adamw | {"weight_decay": weight_decay},
        "adamw_decay": adamw | {"weight_decay": weight_decay},
        "adamw": adamw | {"weight_decay": 0.0},
    }
    policy = {role: "adamw_decay" if role in DECAYED[decay] else "adamw" for role in DECAYED["all"]}
    return assign(parameters, roles, policy | {"matrix": "muon", "experts": "experts", "router": "router"}, entries)


def assign(
    parameters: Iterable[tuple[str, Tensor]],
    roles: Mapping[str, str],
    policy: Mapping[str, str],
    entries: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Returns the groups of a policy (role -> group name) that have members, in the order of `entries`.

    Raises:
        TrainingError: a parameter is claimed by no group or by two, or nothing is trainable.
    """
    groups = {name: {"name": name, "params": [], "param_names": [], **extra} for name, extra in entries.items()}
    claimed: set[int] = set()
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        role = roles.get(name)
        if role is None or role not in policy:
            raise TrainingError(f"parameter {name!r} is claimed by no param group: its role is {role!r}")
        if id(parameter) in claimed:
            raise TrainingError(f"parameter {name!r} is claimed by two param groups (a tied weight under two names?)")
        claimed.add(id(parameter))
        group = groups[policy[role]]
        group["params"].append(parameter)
        group["param_names"].append(name)
    if not claimed:
        raise TrainingError("the model has no trainable parameter")
    return [group for group in groups.values() if group["params"]]


def describe_group(group: Mapping[str, Any]) -> str:
    """Returns a line for people: name, size, lr, decay, and who is in it, layers drawn together."""
    names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in group["param_names"]))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    count = sum(parameter.numel() for parameter in group["params"])
    size = f"{len(group['params'])} tensors, {count / 1e6:.1f} M"
    algorithm = f" by {group['algorithm']}" if "algorithm" in group else ""
    decay = f", weight decay {group['weight_decay']:g}" if "weight_decay" in group else ""
    return f"group {group['name']}{algorithm} ({size}): peak lr {group['initial_lr']:g}{decay}: {shown}"


def restored_entries(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a live group that belong into a checkpoint, by name, as JSON has them: tuples as lists,
    0-dim tensors (a capturable optimizer's lr) as numbers."""
    kept = {key: value for key, value in group.items() if key not in RUN_LOCAL | IDENTITY}
    return {key: _as_json(value) for key, value in kept.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def match_groups(
    live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each live group with the saved group of the same parameters; empty ones by name, where both sides have it.

    Raises:
        CheckpointMismatch: memberships differ; names the parameters that were added, are gone or moved.
    """
    by_members = {frozenset(group["param_names"]): group for group in saved if group["param_names"]}
    pairs, unmatched = _empty_pairs(live, saved), []
    found = 0
    for group in (group for group in live if group["param_names"]):
        partner = by_members.get(frozenset(group["param_names"]))
        if partner is None:
            unmatched.append(group)
        else:
            pairs.append((group, partner))
            found += 1
    if unmatched or found != len(by_members):
        raise CheckpointMismatch(_membership_message(live, saved))
    return pairs


def _empty_pairs(
    live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    by_name = {group["name"]: group for group in saved if not group["param_names"]}
    empty = [group for group in live if not group["param_names"]]
    return [(group, by_name[group["name"]]) for group in empty if group["name"] in by_name]


def regroup(
    live: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], *, keep: frozenset[str] = frozenset()
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns each live group with a saved one made of its own parameters' entries, wherever these were (resume.regroup).

    Raises:
        CheckpointMismatch: a parameter was in no saved group, or one live group would need two values of an entry.
    """
    home = {name: group for group in saved for name in group["param_names"]}
    pairs = _empty_pairs(live, saved)
    for group in (group for group in live if group["param_names"]):
        new = [name for name in group["param_names"] if name not in home]
        if new:
            raise CheckpointMismatch(f"group {group['name']!r}: the checkpoint has no entries for {new[:10]}")
        sources = {id(home[name]): home[name] for name in group["param_names"]}
        entries = _merged(group, list(sources.values()), keep)
        pairs.append((group, {"name": group["name"], "param_names": group["param_names"], "entries": entries}))
    return pairs


def _merged(live: dict[str, Any], sources: Sequence[dict[str, Any]], keep: frozenset[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key in dict.fromkeys(key for source in sources for key in source["entries"]):
        values = [source["entries"][key] for source in sources if key in source["entries"]]
        if key not in keep and any(value != values[0] for value in values):
            told = ", ".join(f"{source['name']!r}: {source['entries'].get(key)!r}" for source in sources)
            raise CheckpointMismatch(
                f"group {live['name']!r} takes parameters from groups with different {key!r} ({told}) and can hold one; "
                f"choose the config's with --resume.override, or keep the groups apart"
            )
        if values:
            entries[key] = values[0]
    return entries


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
    way_out = "--resume.regroup gives each parameter the entries of the group it was in"
    return "\n".join(["the optimizer's param groups do not fit the checkpoint's:", *shown, way_out])


def write_entries(live: dict[str, Any], saved: dict[str, Any], *, keep: frozenset[str] = frozenset()) -> list[str]:
    """Writes saved entries into the live group dict, in place, so that whoever holds the dict sees them.

    Entries that the live group lacks are taken over too: some optimizers make theirs in the first step.

    Args:
        keep: entries whose live value wins (from resume.override).

    Returns:
        The live entries that the checkpoint lacks; they keep their live value.
    """
    wanted = restored_entries(live)
    for key, value in saved.items():
        held = live.get(key)
        if key in keep or key in RUN_LOCAL | IDENTITY:
            continue
        if isinstance(held, Tensor) and not isinstance(value, Tensor):
            held.fill_(value)
        else:
            live[key] = tuple(value) if isinstance(held, tuple) else value
    return [key for key in wanted if key not in saved]
