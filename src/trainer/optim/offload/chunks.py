"""Stepping an optimizer part by part, with the same result as in one go.

A step over a chunk sees the *live* group dicts with fewer parameters in them. Entries that a step advances (Muon's
counter lies in its groups) advance once per step: every chunk starts from the values before the step, and the live dict
keeps the advanced ones. So does state that belongs to no parameter.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import TrainingError

_MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class Chunk:
    """Parameters that are stepped together.

    Attributes:
        members: index of a group -> positions in its "params", ascending.
    """

    members: Mapping[int, tuple[int, ...]]

    def parameters(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        return [groups[index]["params"][p] for index, positions in self.members.items() for p in positions]


def chunk_units(optimizer: Optimizer) -> list[list[Tensor]]:
    """Returns the smallest sets of parameters that may be stepped apart from the others.

    An optimizer that couples parameters (one batch, one exchange between ranks) names its sets in a method
    `chunk_units()`; for all others each parameter is one.
    """
    own = getattr(optimizer, "chunk_units", None)
    if own is not None:
        return [list(unit) for unit in own()]
    return [[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def plan_chunks(optimizer: Optimizer, size_bytes: Callable[[Tensor], int], chunk_bytes: int) -> list[Chunk]:
    """Returns chunks of whole units of at most `chunk_bytes`, or of one larger unit; the same on all ranks.

    Args:
        size_bytes: of a parameter; must not depend on the rank.
    """
    groups = optimizer.param_groups
    places = {id(p): (g, i) for g, group in enumerate(groups) for i, p in enumerate(group["params"])}
    units = chunk_units(optimizer)
    _check_units(units, places)
    batches: list[list[Tensor]] = [[]]
    filled = 0
    for unit in units:
        size = sum(size_bytes(parameter) for parameter in unit)
        if batches[-1] and filled + size > chunk_bytes:
            batches.append([])
            filled = 0
        batches[-1] += unit
        filled += size
    chunks = []
    for batch in batches:
        members: dict[int, list[int]] = {}
        for group, position in sorted(places[id(parameter)] for parameter in batch):
            members.setdefault(group, []).append(position)
        if not chunks:  # groups without parameters have entries too
            members |= {index: [] for index, group in enumerate(groups) if not group["params"]}
        chunks.append(Chunk({group: tuple(members[group]) for group in sorted(members)}))
    return chunks


def _check_units(units: Iterable[Iterable[Tensor]], places: Mapping[int, tuple[int, int]]) -> None:
    found = [id(parameter) for unit in units for parameter in unit]
    if len(found) != len(places) or set(found) != places.keys():
        raise TrainingError(
            f"the optimizer's chunk_units() names {len(found)} parameters ({len(set(found) & places.keys())} of its own "
            f"{len(places)}); each must be in exactly one unit"
        )


def plain_step(optimizer: Optimizer) -> Callable[[], object]:
    """Returns the optimizer's own step, without the hooks that torch wraps around it: they belong around a whole step."""
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return lambda: function(optimizer)


class ChunkedStep:
    """One step of `optimizer`, in chunks; each chunk of a plan is stepped once.

    While a chunk is stepped, `optimizer.param_groups` lists the chunk's groups, and these list its members. Before and
    after, all is as it was, but for the entries that the step advanced.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._step = plain_step(optimizer)
        self._before = [_entries(group) for group in optimizer.param_groups]
        self._advanced: dict[int, dict[str, Any]] = {}
        self._shared_before = _shared(optimizer)
        self._shared_advanced: dict[str, Any] | None = None

    def __call__(self, chunk: Chunk) -> None:
        """Steps the chunk.

        Raises:
            TrainingError: two chunks of a group advanced its entries differently. Such an optimizer derives them from
                the gradients of the whole group, which must then be one unit.
        """
        groups = self._optimizer.param_groups
        for index in chunk.members.keys() & self._advanced.keys():
            _write(groups[index], self._before[index])
        if self._shared_advanced is not None:
            _write(self._optimizer.state, self._shared_before)
        with _narrowed(self._optimizer, chunk):
            self._step()
        for index in chunk.members:
            after = _entries(groups[index])
            if not _same(after, self._advanced.setdefault(index, after)):
                self._refuse(f"the entries of group {groups[index].get('name', index)!r}")
        shared = _shared(self._optimizer)
        if self._shared_advanced is not None and not _same(shared, self._shared_advanced):
            self._refuse("state that belongs to no parameter")
        self._shared_advanced = shared

    def _refuse(self, what: str) -> None:
        raise TrainingError(
            f"{type(self._optimizer).__name__} changes {what} by what is in a chunk, so it cannot be stepped in chunks: "
            "give it a method chunk_units() that returns the whole group as one unit, or set model.offload to none"
        )


@contextmanager
def _narrowed(optimizer: Optimizer, chunk: Chunk) -> Iterator[None]:
    """Inside, the optimizer has the chunk's members only."""
    groups = optimizer.param_groups
    members = {index: {key: groups[index][key] for key in _MEMBERS if key in groups[index]} for index in chunk.members}
    try:
        for index, positions in chunk.members.items():
            for key, whole in members[index].items():
                groups[index][key] = [whole[position] for position in positions]
        optimizer.param_groups = [groups[index] for index in chunk.members]
        yield
    finally:
        optimizer.param_groups = groups
        for index, whole in members.items():
            groups[index].update(whole)


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    entries = {key: value for key, value in group.items() if key not in _MEMBERS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}


def _shared(optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})


def _write(live: dict[Any, Any], entries: Mapping[str, Any]) -> None:
    """Makes `entries` those of a group, or the shared ones of a state."""
    for key in [key for key in live if key not in entries and key not in _MEMBERS and not isinstance(key, Tensor)]:
        del live[key]
    for key, value in entries.items():
        held = live.get(key)
        if isinstance(value, Tensor) and isinstance(held, Tensor):
            held.copy_(value)  # in place: whoever holds the tensor sees it
        else:
            live[key] = copy.deepcopy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
