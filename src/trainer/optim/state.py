"""The optimizer as an owner of checkpointed state: tensors by parameter name, groups by their members.

An optimizer may hold more in its `state` than tensors by parameter: entries under names of their own (MADGRAD's counter
"k"), and tables and lists of tensors inside entries (SOAP's). They are saved and made anew as well; what an optimizer
keeps anywhere else, on the object itself, cannot be seen.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.core.log import logger
from trainer.errors import CheckpointError, CheckpointMismatch
from trainer.optim.groups import IDENTITY, RUN_LOCAL, match_groups, regroup, restored_entries, write_entries


class OptimizerState:
    """Saves and restores `optimizer`, whose groups carry "name" and "param_names"."""

    def __init__(self, optimizer: Optimizer, *, keep: frozenset[str] = frozenset(), regroup: bool = False):
        """
        keep: group entries whose live value wins over a checkpoint's (from resume.override).
        regroup: groups may have other members than in the checkpoint (resume.regroup).
        """
        self.optimizer = optimizer
        self.keep = keep
        self.regroup = regroup

    def _pairs(self, saved: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        if self.regroup:
            return regroup(self.optimizer.param_groups, saved, keep=self.keep)
        return match_groups(self.optimizer.param_groups, saved)

    def _parameters(self) -> dict[str, Tensor]:
        groups = self.optimizer.param_groups
        return {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Returns {"state": {parameter: {entry: live tensor or scalar}}, "groups": [...]}; changes nothing.

        With "shared": {name: live tensor or scalar} where the optimizer has state that belongs to no parameter.

        Raises:
            CheckpointError: an entry's name is no text, or has a dot in it.
        """
        held = self.optimizer.state
        state = {name: _nameable(dict(held[p])) for name, p in self._parameters().items()}
        shared = _nameable({key: value for key, value in held.items() if not isinstance(key, Tensor)})
        groups = [
            {"name": group["name"], "param_names": list(group["param_names"]), "entries": restored_entries(group)}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "groups": groups} | ({"shared": shared} if shared else {})

    def make_room(self, saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Makes the state entries that a checkpoint has and this optimizer makes only in its first step.

        Args:
            saved: "state.<parameter>.<entry>" -> dtype and shape. An entry shaped like its parameter is sharded like it.
        """
        parameters = self._parameters()
        group_of = {name: group for group in self.optimizer.param_groups for name in group["param_names"]}
        for flat, (dtype, shape) in saved.items():
            kind, *path = flat.split(".")
            held = self.optimizer.state  # asked for each time: with offload, what was made last goes to the host now
            if kind == "shared":
                _make_entry(held, path, torch.zeros(shape, dtype=dtype))  # a counter: on the host
            if kind != "state":
                continue
            for length in range(len(path) - 1, 0, -1):  # names of parameters have dots
                name, (entry, *inner) = ".".join(path[:length]), path[length:]
                if name in parameters:
                    parameter = parameters[name]
                    if inner or entry not in held[parameter]:
                        made = _made(parameter, group_of[name], entry, dtype, shape)
                        _make_entry(held[parameter], [entry, *inner], made)
                    break

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state of the same parameters: tensors are copied in place, group entries written by name."""
        self._load_tensors(state["state"])
        _take(self.optimizer.state, state.get("shared", {}))
        for live, saved in self._pairs(state["groups"]):
            lacking = write_entries(live, saved["entries"], keep=self.keep)
            if lacking:
                logger.info(f"group {live['name']!r}: the checkpoint lacks {lacking}; the config's values stay")

    def _load_tensors(self, saved: dict[str, dict[str, Any]]) -> None:
        parameters = self._parameters()
        if set(saved) != set(parameters):
            odd = sorted(set(saved) ^ set(parameters))
            raise CheckpointMismatch(f"optimizer state is there for other parameters than the model's: {odd[:10]}")
        with torch.no_grad():
            for name, entries in saved.items():
                _take(self.optimizer.state[parameters[name]], entries)

    def verify(self, saved: dict[str, Any]) -> list[str]:
        """Returns the group entries that, read back, differ from what was loaded."""
        shared = self.state_dict().get("shared", {})
        there = {key: value for key, value in saved.get("shared", {}).items() if not isinstance(value, Mapping)}
        differing = [
            f"shared.{key}: loaded {value!r}, reads back {shared.get(key)!r}"
            for key, value in there.items()
            if key not in shared or shared[key] != value
        ]
        for live, partner in self._pairs(saved["groups"]):
            entries = restored_entries(live)
            for key in {**partner["entries"], **entries}.keys() - self.keep - RUN_LOCAL - IDENTITY:
                value = entries.get(key)
                expected = partner["entries"].get(key, value)
                if value != expected:
                    differing.append(f"groups.{live['name']}.{key}: loaded {expected!r}, reads back {value!r}")
        return differing


def _made(
    parameter: Tensor, group: Mapping[str, Any], entry: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Returns zeros where torch's optimizers make such an entry by themselves: counters stay on the host."""
    is_counter = not shape and (entry == "step" or parameter.ndim > 0)
    if shape == tuple(parameter.shape) and not is_counter:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_host = is_counter and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)


# --- tables and lists of tensors ------------------------------------------------------------------------------------

_INDEX = re.compile(r"[\[(](\d+)[\])]")
"""The name of an item of a list, "[0]", or of a tuple, "(0)": tensors have names and no places."""


def _nameable(value: Any) -> Any:
    """Returns the value with lists and tuples that hold tensors as tables, their items named by `_INDEX`."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or "." in key:
                raise CheckpointError(
                    f"the optimizer has a state entry {key!r}: a checkpoint needs names that are text without a dot"
                )
        return {key: _nameable(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and _has_tensors(value):
        left, right = "[]" if isinstance(value, list) else "()"
        return {f"{left}{index}{right}": _nameable(item) for index, item in enumerate(value)}
    return value


def _original(value: Any) -> Any:
    """The reverse of `_nameable`."""
    if not isinstance(value, Mapping):
        return value
    table = {key: _original(item) for key, item in value.items()}
    if not table or not all(map(_INDEX.fullmatch, table)):
        return table
    items = [table[key] for key in sorted(table, key=lambda key: int(key[1:-1]))]
    return items if next(iter(table)).startswith("[") else tuple(items)


def _has_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(_has_tensors, items))


def _make_entry(table: Any, path: list[str], tensor: Tensor) -> None:
    """Puts the tensor where `path` leads, and tables on the way there; a list that is there already is gone through."""
    *inner, last = path
    for key in inner:
        if isinstance(table, list | tuple):
            table = dict(enumerate(table)).get(int(key[1:-1]))
        elif isinstance(table, dict):
            table = table.setdefault(key, {})
    if isinstance(table, dict):
        table.setdefault(last, tensor)


def _take(live: dict[Any, Any], saved: Mapping[str, Any]) -> None:
    """Writes saved entries into `live`; tensors are copied in place."""
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            live[key] = _original(value)
        elif live[key] is not value:
            live[key].copy_(value)
