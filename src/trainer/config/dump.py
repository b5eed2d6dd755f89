"""A config as TOML text that loads to the same config."""

from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from trainer.config.schema import Key, dotted, shape_of_field


def dump_toml(config: BaseModel, origins: Mapping[str, str] | None = None) -> str:
    """Every value of ``config``, unset ones as "none", with its origin (where ``origins`` is given) as a comment."""
    return "\n".join(_table(config, (), origins)).lstrip("\n") + "\n"


def _table(section: BaseModel, key: Key, origins: Mapping[str, str] | None) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for name in type(section).model_fields:
        value, inner = getattr(section, name), (*key, name)
        if isinstance(value, BaseModel):
            # An optional table was asked for by someone; the others are always there.
            asked = _comment(inner, origins) if shape_of_field(type(section), name).optional else ""
            tables += ["", f"[{dotted(inner)}]{asked}", *_table(value, inner, origins)]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, entry in enumerate(value):
                tables += ["", f"[[{dotted(inner)}]]", *_table(entry, (*inner, str(index)), origins)]
        else:
            lines.append(f"{name} = {_value(value)}{_comment(inner, origins)}")
    return lines + tables  # TOML wants a table's own values before its sub-tables


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _comment(key: Key, origins: Mapping[str, str] | None) -> str:
    if origins is None:
        return ""
    origin = origins.get(dotted(key), "default")
    return "  # " + "".join(character if character.isprintable() else "?" for character in origin)
