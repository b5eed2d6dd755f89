"""The non-tensor state of a run (counters, group entries, cursors, names) as one JSON document, exactly.

What goes in comes out with the same type and the same bits: integers of any size, floats (Python writes the shortest
text that reads back to the same float; infinities and NaN get a tag), strings, booleans, None, lists, tuples (tagged)
and dicts with string keys. Everything else is an error that names the key: a value that JSON would quietly change, such
as a numpy number or an enum, has no place in a checkpoint.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from trainer.errors import CheckpointError, CorruptCheckpoint

MAX_DEPTH = 100
"""Tables and lists inside each other; far more than any state has, far less than Python's recursion allows."""

_TUPLE, _FLOAT = "__tuple__", "__float__"


def dump_leaves(leaves: Mapping[str, Any]) -> bytes:
    """Returns the JSON document of `leaves`, in their order.

    Raises:
        CheckpointError: a value or key that JSON cannot carry exactly, by name.
    """
    return json.dumps(_encode(leaves, ""), separators=(",", ":"), allow_nan=False).encode()


def load_leaves(data: bytes, where: str) -> dict[str, Any]:
    """Returns what `dump_leaves` was given.

    Raises:
        CorruptCheckpoint: `data` is no such document.
    """
    try:
        document = json.loads(data)
        check_depth(document, where)
        leaves = _decode(document, where)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} is not JSON: {error}") from error
    if not isinstance(leaves, dict):
        raise CorruptCheckpoint(f"{where} holds {type(leaves).__name__}, expected a table")
    return leaves


def check_depth(document: Any, where: str) -> None:
    """Checks that parsed JSON is not nested so deeply that walking through it would exhaust the stack.

    Raises:
        CorruptCheckpoint: it is.
    """
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _items(value) if isinstance(item, dict | list)]
        if not level:
            return
    raise CorruptCheckpoint(f"{where} is nested more than {MAX_DEPTH} levels deep; no checkpoint of this trainer is")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _encode(value: Any, key: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind in (list, tuple):
        items = [_encode(item, f"{key}[{index}]") for index, item in enumerate(value)]
        return items if kind is list else {_TUPLE: items}
    if isinstance(value, Mapping):
        return {_checked_key(name, key): _encode(item, join(key, name)) for name, item in value.items()}
    raise CheckpointError(
        f"state {key!r} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold exactly; "
        "its owner's state_dict must return int, float, str, bool, None, lists and tuples of these, dicts with string "
        "keys, and tensors inside dicts (not inside lists)"
    )


def _checked_key(name: Any, key: str) -> str:
    if type(name) is not str:
        raise CheckpointError(f"state {key!r} has the key {name!r}; keys must be strings")
    if name in (_TUPLE, _FLOAT):
        raise CheckpointError(f"state {key!r} has the key {name!r}, which is reserved")
    return name


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE} and isinstance(value[_TUPLE], list):
        return tuple(_decode(item, where) for item in value[_TUPLE])
    if value.keys() == {_FLOAT} and value[_FLOAT] in ("inf", "-inf", "nan"):
        return float(value[_FLOAT])
    if value.keys() & {_TUPLE, _FLOAT}:
        raise CorruptCheckpoint(f"{where} has a malformed tag: {value!r}")
    return {name: _decode(item, where) for name, item in value.items()}


def join(key: str, name: str) -> str:
    """Returns the name of an entry inside another: "groups.lr"."""
    return f"{key}.{name}" if key else name


def flatten_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each scalar with its name, such as "optimizer.groups[0].lr"; an empty list or dict counts as a scalar."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flatten_leaves(item, join(key, name))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from flatten_leaves(item, f"{key}[{index}]")
    else:
        yield key, value


def same(a: Any, b: Any) -> bool:
    """Whether two scalars are the same value of the same type; floats by their bits, and NaN equals NaN."""
    if type(a) is float and type(b) is float:
        return repr(a) == repr(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def compare_leaves(saved: Any, live: Any, key: str = "", ignore: AbstractSet[str] = frozenset()) -> list[str]:
    """Returns one line for each saved entry that the live state does not have, or has with another value.

    Live entries that were not saved are fine: they keep the value that this run gave them. Dict entries whose name is
    in `ignore` are passed over at any depth.
    """
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        lines = []
        for name, value in saved.items():
            if name in ignore:
                continue
            if name not in live:
                lines.append(f"{join(key, name)}: checkpoint {_short(value)}, not present after loading")
            else:
                lines += compare_leaves(value, live[name], join(key, name), ignore)
        return lines
    if isinstance(saved, list | tuple) and isinstance(live, list | tuple) and len(saved) == len(live):
        pairs = enumerate(zip(saved, live, strict=True))
        return [line for i, (a, b) in pairs for line in compare_leaves(a, b, f"{key}[{i}]", ignore)]
    return [] if same(saved, live) else [f"{key}: checkpoint {_short(saved)}, after loading {_short(live)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
