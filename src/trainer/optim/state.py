"""The optimizer as an owner of checkpointed state: tensors by parameter name, groups by their members."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.core.log import logger
from trainer.errors import CheckpointMismatch
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
        """Returns {"state": {parameter: {entry: live tensor or scalar}}, "groups": [...]}; changes nothing."""
        state = {name: dict(self.optimizer.state[p]) for name, p in self._parameters().items()}
        groups = [
            {"name": group["name"], "param_names": list(group["param_names"]), "entries": restored_entries(group)}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "groups": groups}

    def make_room(self, saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Makes the state entries that a checkpoint has and this optimizer makes only in its first step.

        Args:
            saved: "state.<parameter>.<entry>" -> dtype and shape. An entry shaped like its parameter is sharded like it.
        """
        parameters = self._parameters()
        group_of = {name: group for group in self.optimizer.param_groups for name in group["param_names"]}
        for flat, (dtype, shape) in saved.items():
            name, _, entry = flat.removeprefix("state.").rpartition(".")
            if (
                not flat.startswith("state.")
                or name not in parameters
                or entry in self.optimizer.state[parameters[name]]
            ):
                continue
            self.optimizer.state[parameters[name]][entry] = _made(parameters[name], group_of[name], entry, dtype, shape)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state of the same parameters: tensors are copied in place, group entries written by name."""
        self._load_tensors(state["state"])
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
                live = self.optimizer.state[parameters[name]]
                for key, value in entries.items():
                    if not isinstance(value, Tensor):
                        live[key] = value
                    elif live[key] is not value:
                        live[key].copy_(value)

    def verify(self, saved: dict[str, Any]) -> list[str]:
        """Returns the group entries that, read back, differ from what was loaded."""
        differing = []
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
