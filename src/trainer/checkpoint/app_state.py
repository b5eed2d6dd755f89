"""Everything a resume restores, as one flat table of tensors, and back.

An *owner* is an object with

* ``state_dict() -> dict``: a pure read. Tensor and DTensor leaves are live references (loading writes into them);
  other leaves are what `leaves` can carry. Tensors lie in dicts, never in lists.
* ``load_state_dict(state)``: the same shape. Its tensors are the live ones, already filled.
* optionally ``make_room(saved)``: called before a load with {"key.key": (dtype, shape)} of what the checkpoint holds for
  it, to make tensors that it otherwise makes later;
* optionally ``verify_ignore``: a set of entry names that belong to this run and not to the checkpoint (such as
  "fused"), which the comparison after a load passes over at any depth;
* optionally ``verify(saved) -> list[str]``: replaces that comparison; `saved` is what the checkpoint holds for the
  owner except tensors, the answer one line for each entry that is wrong.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.dcp import DTYPE_NAMES, DTYPES, as_bytes
from trainer.checkpoint.layout import Layout, owner_of
from trainer.checkpoint.leaves import compare_leaves, dump_leaves, load_leaves
from trainer.checkpoint.storage import load_tensors
from trainer.checkpoint.tables import JSON_TENSOR, read_tables
from trainer.core.distributed import gather_objects, on_main, raise_together
from trainer.core.files import FileRecord, xxh3_bytes
from trainer.errors import CheckpointError, CheckpointMismatch

_SHOWN = 10  # names listed in an error before "and N more"


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class OwnerState:
    """One owner's state, taken apart."""

    tensors: dict[tuple[str, ...], Tensor]
    """Path of keys -> live tensor."""
    leaves: dict[str, Any]
    """The rest, nested as the owner gave it; tables that held only tensors are left out."""


class AppState:
    """The owners of a run's state by name: ``AppState(model=..., optimizer=..., progress=..., data=...)``."""

    def __init__(self, **owners: Stateful):
        self.owners: dict[str, Stateful] = dict(owners)

    @contextmanager
    def joined_by(self, owners: Mapping[str, Stateful]) -> Iterator[None]:
        """Inside, `owners` belong to the state too; one whose name is taken stands in for that owner."""
        own, self.owners = self.owners, {**self.owners, **owners}
        try:
            yield
        finally:
            self.owners = own

    def state_dict(self) -> dict[str, Tensor]:
        """Returns flat names ("owner.key.key") -> live tensors of any dtype, device and placement, and "json".

        "json": uint8 [bytes] on CPU, the UTF-8 text of every leaf that is not a tensor, by owner. Nothing is copied or
        changed: whoever keeps the result past the next step must copy it.

        Raises:
            CheckpointError: a leaf that a checkpoint cannot hold exactly, or two leaves with one name.
        """
        parts = self._parts()
        flat = _flatten(parts)
        document = dump_leaves({owner: part.leaves for owner, part in parts.items()})
        flat[JSON_TENSOR] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        return flat

    def leaves(self) -> dict[str, dict[str, Any]]:
        """Returns every leaf that is not a tensor, nested, by owner; a pure read."""
        return {owner: part.leaves for owner, part in self._parts().items()}

    def check_agreement(self, state: Mapping[str, Tensor]) -> None:
        """Checks that all ranks hold the same names, shapes, dtypes and JSON leaves; collective.

        DCP keeps one rank's copy of what is replicated; where ranks differ, the others' values would be lost.

        Raises:
            CheckpointError: on every rank, naming the first leaf or tensor that differs.
        """
        document = state[JSON_TENSOR].numpy().tobytes()
        table = {name: (tuple(t.shape), DTYPE_NAMES.get(t.dtype)) for name, t in state.items() if name != JSON_TENSOR}
        digests = gather_objects((xxh3_bytes(document), xxh3_bytes(repr(sorted(table.items())).encode())))
        if len(set(digests)) == 1:
            return
        everything = gather_objects((document, table))
        first_leaves, first_table = (load_leaves(everything[0][0], "rank 0's state"), everything[0][1])
        for rank, (document, table) in enumerate(everything):
            lines = compare_leaves(first_leaves, load_leaves(document, f"rank {rank}'s state"))
            names = sorted(n for n in first_table.keys() | table.keys() if first_table.get(n) != table.get(n))
            lines += [f"{name}: {first_table.get(name)}, there {table.get(name)}" for name in names]
            if lines:
                what = lines[0].replace("checkpoint", "rank 0", 1).replace("after loading", f"rank {rank}", 1)
                raise CheckpointError(f"rank {rank} does not hold the same state as rank 0, first at {what}")
        raise CheckpointError(
            "the ranks list their state in different orders; owners must give every rank the same order"
        )

    def load(
        self,
        directory: Path,
        *,
        skip: AbstractSet[str] = frozenset(),
        check: Mapping[str, FileRecord] | None = None,
    ) -> None:
        """Loads a checkpoint into the owners and proves that it took; collective.

        Everything is checked against the checkpoint's tables before the first byte is written into a live tensor.
        Owners named in `skip` keep their state; what the checkpoint holds for them is passed over. `check` names the
        files whose checksums this rank compares while it reads; the owners get nothing before all of them are right.

        Raises:
            CheckpointMismatch: the checkpoint does not fit, or an owner holds other values after loading; names keys.
            CorruptCheckpoint: it cannot be read, or a checksum differs. Live tensors are overwritten by then.
        """
        unknown = sorted(skip - self.owners.keys())
        if unknown:
            raise CheckpointError(f"asked to skip {', '.join(unknown)}, but the state has {', '.join(self.owners)}")
        layout, saved = on_main(read_tables, directory)
        attempt("making room for the checkpoint's state", lambda: self._make_room(layout, skip))
        parts = attempt("reading the live state", lambda: self._parts(skip))
        flat = _flatten(parts)
        attempt(
            "comparing the checkpoint with this run", lambda: _check_fit(directory, layout, saved, flat, parts, skip)
        )
        load_tensors(directory, layout, flat, check=check)

        def hand_over() -> None:
            for owner, part in parts.items():
                self.owners[owner].load_state_dict(_nest(saved[owner], part.tensors))

        attempt("loading", hand_over)
        attempt("verifying the loaded state", lambda: self.verify(saved, parts))

    def _make_room(self, layout: Layout, skip: AbstractSet[str]) -> None:
        for name, owner in self.owners.items():
            make_room = getattr(owner, "make_room", None)
            if make_room is not None and name not in skip:
                prefix = f"{name}."
                entries = {flat: entry for flat, entry in layout.items() if flat.startswith(prefix)}
                make_room({flat.removeprefix(prefix): (DTYPES[e.dtype], e.shape) for flat, e in entries.items()})

    def verify(self, saved: Mapping[str, Mapping[str, Any]], loaded: Mapping[str, OwnerState]) -> None:
        """Reads every loaded owner back and compares it with the checkpoint.

        saved: leaves by owner. loaded: the owners' state whose tensors were filled from the checkpoint.

        Raises:
            CheckpointMismatch: naming the entries that an owner did not take over.
        """
        lines = []
        for name, filled in loaded.items():
            owner = self.owners[name]
            live = _take_apart(name, owner.state_dict())
            own = getattr(owner, "verify", None)
            if own is not None:
                lines += [f"{name}.{line}" for line in own(copy.deepcopy(dict(saved[name])))]
            else:
                lines += compare_leaves(saved[name], live.leaves, name, getattr(owner, "verify_ignore", frozenset()))
            for path, tensor in filled.tensors.items():
                if path not in live.tensors or not _same_tensor(tensor, live.tensors[path]):
                    lines.append(f"{_flat_name(name, path)}: its live tensor does not hold the checkpoint's values")
        if lines:
            raise CheckpointMismatch(
                f"{len(lines)} entries are not the checkpoint's after loading:\n  {_listed(lines)}\n"
                "The owner's load_state_dict left them out or changed them."
            )

    def _parts(self, skip: AbstractSet[str] = frozenset()) -> dict[str, OwnerState]:
        return {name: _take_apart(name, owner.state_dict()) for name, owner in self.owners.items() if name not in skip}


def attempt(what: str, function: Callable[[], Any]) -> Any:
    """Runs `function` on every rank; if it fails on one, every rank raises: no rank goes on into a collective alone."""
    result, failure = None, None
    try:
        result = function()
    except Exception as error:
        failure = error
    raise_together(failure, what)
    return result


def _take_apart(owner: str, state: Mapping[str, Any]) -> OwnerState:
    tensors: dict[tuple[str, ...], Tensor] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return None
        if isinstance(value, list | tuple):
            if any(isinstance(item, Tensor) for item in value):
                raise CheckpointError(
                    f"state {_flat_name(owner, path)!r} is a list with tensors; give them names in a dict"
                )
            return value
        if not isinstance(value, Mapping):
            return value
        table, had_items = {}, bool(value)
        for key, item in value.items():
            if type(key) is not str:
                raise CheckpointError(f"state {_flat_name(owner, path)!r} has the key {key!r}; keys must be strings")
            kept = walk(item, (*path, key))
            if (*path, key) not in tensors and kept is not _ONLY_TENSORS:
                table[key] = kept
        return table if table or not had_items else _ONLY_TENSORS

    leaves = walk(state, ())
    return OwnerState(tensors, {} if leaves is _ONLY_TENSORS else leaves)


_ONLY_TENSORS = object()  # a table with nothing to say in JSON


def _flat_name(owner: str, path: tuple[str, ...]) -> str:
    return ".".join((owner, *path))


def _flatten(parts: Mapping[str, OwnerState]) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for owner, part in parts.items():
        for path, tensor in part.tensors.items():
            name = _flat_name(owner, path)
            if name in flat:
                raise CheckpointError(f"two tensors of {owner!r} have the flat name {name!r}")
            if tensor.device.type == "meta":
                raise CheckpointError(f"tensor {name!r} is on the meta device: it has no values to save or load")
            if tensor.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, which a checkpoint cannot hold")
            flat[name] = tensor
    return flat


def _nest(leaves: Mapping[str, Any], tensors: Mapping[tuple[str, ...], Tensor]) -> dict[str, Any]:
    """Returns the owner's nested state: a copy of the saved leaves with the live tensors put in their places."""
    state = copy.deepcopy(dict(leaves))
    for path, tensor in tensors.items():
        table = state
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise CheckpointMismatch(f"{'.'.join(path)} is a tensor here; the checkpoint has a value at {key!r}")
        table[path[-1]] = tensor
    return state


def _check_fit(
    directory: Path,
    layout: Layout,
    saved: Mapping[str, Any],
    flat: Mapping[str, Tensor],
    parts: Mapping[str, OwnerState],
    skip: AbstractSet[str],
) -> None:
    """Raises CheckpointMismatch unless every tensor and owner of one side has its counterpart on the other."""
    wanted = {name: entry for name, entry in layout.items() if name != JSON_TENSOR and owner_of(name) not in skip}
    problems = [f"{name}: this run has it, the checkpoint does not" for name in flat if name not in wanted]
    problems += [f"{name}: the checkpoint has it, nothing in this run takes it" for name in wanted if name not in flat]
    for name in flat.keys() & wanted.keys():
        here, there = (
            (DTYPE_NAMES[flat[name].dtype], tuple(flat[name].shape)),
            (wanted[name].dtype, wanted[name].shape),
        )
        if here != there:
            problems.append(f"{name}: checkpoint {there[0]} {list(there[1])}, this run {here[0]} {list(here[1])}")
    problems += [f"{owner}: this run has this owner, the checkpoint does not" for owner in parts.keys() - saved.keys()]
    surplus = saved.keys() - parts.keys() - skip
    problems += [f"{owner}: the checkpoint has this owner, this run does not" for owner in surplus]
    if problems:
        raise CheckpointMismatch(
            f"{directory} does not fit this run; nothing was loaded. {len(problems)} differences:\n"
            f"  {_listed(sorted(problems))}\n"
            "Resume with the model and optimizer that wrote it, or start from its weights with --model.name."
        )


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits on this rank; the same memory is the same without a look."""
    if isinstance(a, DTensor) != isinstance(b, DTensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    with torch.no_grad():
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            a, b = a.to_local(), b.to_local()
        if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride():
            return True
        if a.shape != b.shape:
            return False
        a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
        return bool(torch.equal(as_bytes(a), as_bytes(b)))


def _listed(lines: list[str]) -> str:
    more = f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "\n  ".join(lines[:_SHOWN]) + more
