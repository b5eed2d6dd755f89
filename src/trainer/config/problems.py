"""What can be wrong with a config, and how it is told: all problems at once, each with its key, value and origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainer.config.schema import dotted, lookup, nearest, no_such_key
from trainer.errors import ConfigError

RULE = "rule"
"""Error type of a broken cross-field rule; its context holds ``broken``: one (text, {key: value}) per rule."""


@dataclass(frozen=True)
class Problem:
    subject: str
    """The dotted key, flag or file that is wrong; empty for a rule that joins several keys."""
    text: str
    origin: str = ""
    values: tuple[tuple[str, Any, str], ...] = ()
    """(key, value, origin) of every field that a rule joins."""

    def __str__(self) -> str:
        subject = f"{self.subject} ({self.origin})" if self.origin else self.subject
        lines = [f"{subject}: {self.text}" if subject else self.text]
        lines += [f"    {key} = {shown(value)}  ({origin})" for key, value, origin in self.values]
        return "\n  ".join(lines)


def config_error(problems: Sequence[Problem]) -> ConfigError:
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{count} in the configuration", *map(str, problems)]))


def shown(value: Any) -> str:
    """A value as one would write it in TOML, cut to one line."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = '"' + value.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, (dict, BaseModel)):
        text = "{…}"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """Where the value at ``key`` comes from: its own origin, or that of something inside it, or of the list it is in."""
    inside = next((origin for name, origin in origins.items() if name.startswith(f"{key}.")), None)
    if key in origins or inside:
        return origins.get(key) or inside or ""
    parent, _, index = key.rpartition(".")
    return origin_of(origins, parent) if index.isdecimal() else "default"


def explain(root: type[BaseModel], error: ValidationError, origins: Mapping[str, str]) -> list[Problem]:
    """pydantic's findings in our words."""
    details = error.errors(include_url=False)
    places = [detail["loc"] for detail in details]
    return [
        problem
        for detail in details
        # pydantic drops the wrong entries of a list and then finds it too short
        if not (detail["type"] == "too_short" and any(detail["loc"] == place[:-1] for place in places if place))
        for problem in _explain(root, detail, origins)
    ]


def _explain(root: type[BaseModel], detail: ErrorDetails, origins: Mapping[str, str]) -> list[Problem]:
    key = tuple(map(str, detail["loc"]))
    name, found = dotted(key), detail["input"]
    if detail["type"] == RULE:
        return [
            Problem("", text, values=tuple((key, value, origin_of(origins, key)) for key, value in values.items()))
            for text, values in detail.get("ctx", {})["broken"]
        ]
    if detail["type"] == "extra_forbidden":
        keys = [key]
        if isinstance(found, dict) and found and not any(_is_table(root, other) for other in nearest(root, key)):
            keys = [(*key, str(inner)) for inner in found]  # another trainer's table: say where each of its keys is
        return [Problem(dotted(k), no_such_key(root, k), origin_of(origins, dotted(k))) for k in keys]
    shape = lookup(root, key)
    if detail["type"] == "missing":
        table = lookup(root, key[:-1])
        if table and table.kind == "section":
            return [Problem(name, "required, but not set", origin_of(origins, dotted(key[:-1])) if key[:-1] else "")]
        shape, name = table, dotted(key[:-1])  # a list of fixed length that is too short
    expected = shape.expects() if shape else detail["msg"]
    if shape and shape.kind == "sections" and isinstance(found, dict):
        expected += f"; begin each with [[{name}]]"
    return [Problem(f"{name} = {shown(found)}", f"expected {expected}", origin_of(origins, name))]


def _is_table(root: type[BaseModel], key: str) -> bool:
    shape = lookup(root, tuple(key.split(".")))
    return shape is not None and shape.section is not None
