"""The command line's half of a config: ``@ file`` and dotted flags, typed by the schema.

======================================  ======================================================================
``--optim.lr 1e-4``, ``--optim.lr=..``  a value; kebab or snake case (``--output-dir``, ``--output_dir``)
``--data.pack``, ``--data.pack true``   true
``--no-data.pack``, ``--data.no-pack``  false, as is ``--data.pack false``
``--optim.max-norm none``               unset what may be unset
``--data.train-on user,assistant``      a list; also as JSON, or by repeating the flag
``--data.sources.0.path x``             one value of one table in a list of tables; the list itself is JSON
``--resume``, ``--no-resume``           an optional table with its defaults, or none; ``--resume.step 4`` makes it too
======================================  ======================================================================
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from trainer.config.problems import Problem
from trainer.config.schema import Key, Shape, dotted, lookup, no_such_key


@dataclass(frozen=True)
class Assignment:
    """One flag. ``action`` "extend" adds to the list, "merge" fills a table in, "set" replaces."""

    key: Key
    value: Any
    origin: str
    action: Literal["set", "extend", "merge"] = "set"


@dataclass
class Flags:
    files: list[str] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _Wrong(Exception):
    """A flag that cannot be understood."""

    def __init__(self, subject: str, text: str, origin: str = ""):
        self.problem = Problem(subject, text, origin)


def parse_flags(root: type[BaseModel], argv: list[str]) -> Flags:
    """Read ``argv`` completely; what is wrong is collected, not raised."""
    flags = Flags()
    rest = list(argv)
    flags.problems = [Problem(token, _NO_TEXT) for token in argv if not _is_text(token)]
    if flags.problems:
        return flags
    while rest:
        token = rest.pop(0)
        try:
            if token.startswith("@"):
                flags.files.append(_file(token, rest))
            elif token.startswith("--") and len(token) > 2:
                assignment = _flag(root, token, rest)
                if assignment.action == "extend" and all(a.key != assignment.key for a in flags.assignments):
                    assignment = Assignment(assignment.key, assignment.value, assignment.origin)
                flags.assignments.append(assignment)
            else:
                hint = f'; a config file is given as "@ {token}"' if token.endswith(".toml") else ""
                raise _Wrong(token, f"unexpected argument{hint}")
        except _Wrong as wrong:
            flags.problems.append(wrong.problem)
    return flags


_NO_TEXT = "is not UTF-8 text: no config.toml could hold it; give files and directories other names"


def _is_text(token: str) -> bool:
    try:
        token.encode()
    except UnicodeEncodeError:  # bytes outside of the terminal's code come as halves of surrogate pairs
        return False
    return True


def _file(token: str, rest: list[str]) -> str:
    if token != "@":
        return token[1:]
    if not rest or rest[0].startswith(("--", "@")):
        raise _Wrong("@", "expected the path of a TOML file after it")
    return rest.pop(0)


def _flag(root: type[BaseModel], token: str, rest: list[str]) -> Assignment:
    flag, given, text = token.partition("=")
    value = text if given else None
    if not given and rest and not rest[0].startswith(("--", "@")):
        value = rest.pop(0)
    key = tuple(flag[2:].replace("-", "_").split("."))
    origin = f"flag {flag}"
    shape = _writable(root, key)
    if shape is not None:
        return _positive(key, shape, flag, value)
    for negated in _without_no(key):
        shape = _writable(root, negated)
        if shape is None:
            continue
        if value is not None:
            raise _Wrong(flag, f"takes no value, found {value!r}")
        if shape.kind == "bool":
            return Assignment(negated, False, origin)
        if shape.kind == "section" and shape.optional:
            return Assignment(negated, None, origin)
        unset = f'; to unset it: "--{dotted(negated)} none"' if shape.optional else ""
        raise _Wrong(flag, f"only booleans and optional tables have a --no- form{unset}")
    raise _Wrong(dotted(key), no_such_key(root, key), origin)


def _writable(root: type[BaseModel], key: Key) -> Shape | None:
    """As ``lookup``, but a list of plain values is only written as a whole."""
    parent = lookup(root, key[:-1])
    return None if parent is None or parent.kind == "list" else lookup(root, key)


def _without_no(key: Key) -> Iterator[Key]:
    """--no-data.pack and --data.no-pack both mean data.pack."""
    for place in sorted({0, len(key) - 1}):
        if key[place].startswith("no_"):
            yield (*key[:place], key[place].removeprefix("no_"), *key[place + 1 :])


def _positive(key: Key, shape: Shape, flag: str, text: str | None) -> Assignment:
    origin = f"flag {flag}"
    if shape.kind == "bool" and text is None:
        return Assignment(key, True, origin)
    if shape.kind == "section":
        return _table(key, shape, flag, text)
    if text is None:
        raise _Wrong(flag, f"a value is missing; expected {shape.expects()}")
    if shape.optional and text in ("none", "None") and text not in shape.choices:
        return Assignment(key, None, origin)
    if shape.kind == "sections":
        tables = _json(flag, text, shape)
        return Assignment(key, tables if isinstance(tables, list) else [tables], origin, "extend")
    if shape.kind == "list":
        return Assignment(key, _list(flag, text, shape), origin, "extend")
    return Assignment(key, scalar(shape, text), origin)


def _table(key: Key, shape: Shape, flag: str, text: str | None) -> Assignment:
    if text is None and shape.optional:
        return Assignment(key, {}, f"flag {flag}", "merge")
    if shape.optional and text in ("none", "None"):
        return Assignment(key, None, f"flag {flag}")
    if text is None or not text.startswith("{"):
        keys = (
            ", ".join(f"{flag}.{name.replace('_', '-')}" for name in shape.section.model_fields)
            if shape.section
            else ""
        )
        raise _Wrong(flag, f"is a table and takes no value; its own flags are {keys}")
    return Assignment(key, _json(flag, text, shape), f"flag {flag}", "merge")


def _list(flag: str, text: str, shape: Shape) -> list[Any]:
    if text.lstrip().startswith("["):
        return _json(flag, text, shape)
    parts = text.split(",") if text else []
    return [scalar(shape.item(index), part.strip()) for index, part in enumerate(parts)]


def _json(flag: str, text: str, shape: Shape) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets without end
        raise _Wrong(flag, f"{text[:80]!r} is not JSON ({error}); expected {shape.expects()}") from error


def scalar(shape: Shape, text: str) -> Any:
    """``text`` as the type that ``shape`` wants. What does not fit stays text, for the validation to complain about."""
    try:
        match shape.kind:
            case "bool":
                return {"true": True, "false": False}.get(text, text)
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "choice":
                return next((choice for choice in shape.choices if str(choice) == text), text)
            case "any":
                return json.loads(text)
    except (ValueError, RecursionError):
        pass
    return text
