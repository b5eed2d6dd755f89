"""Reading the pydantic schema: the shape of a field, the field behind a dotted key, the key nearest to a wrong one.

A *key* is what one writes in a file or a flag: ``optim.lr``, ``data.sources.0.path``. Internally it is a tuple of
its segments.
"""

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Key = tuple[str, ...]
Kind = Literal["section", "sections", "list", "bool", "int", "float", "text", "choice", "any"]

_SCALARS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}

# What other trainers call it; used for "did you mean" alone.
_ALIASES = {
    "learning_rate": "optim.lr",
    "optimizer": "optim",
    "max_grad_norm": "optim.max_norm",
    "grad_clip": "optim.max_norm",
    "lr_scheduler_type": "scheduler.type",
    "warmup_ratio": "scheduler.warmup_steps",
    "model_name_or_path": "model.name",
    "gradient_checkpointing": "model.activation_checkpointing",
    "bf16": "model.dtype",
    "dataset": "data.sources",
    "datasets": "data.sources",
    "max_len": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "packing": "data.pack",
    "per_device_train_batch_size": "data.micro_batch_size",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "steps": "max_steps",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "checkpoint": "ckpt",
    "eval_steps": "val.interval",
    "eval": "val",
    "resume_from_checkpoint": "resume.dir",
    "report_to": "wandb.mode",
    "logging_steps": "log.interval",
}


@dataclass(frozen=True)
class Shape:
    """What values of one annotation look like."""

    kind: Kind
    optional: bool = False
    """None is a value ("none" in TOML and flags)."""
    section: type[BaseModel] | None = None
    """The table's class, of a "section" or of each of the "sections"."""
    items: tuple["Shape", ...] = ()
    """Shapes of a "list": one for each place, or a single one for a list of any length."""
    fixed: bool = False
    """The list has exactly ``len(items)`` places."""
    choices: tuple[Any, ...] = ()
    limits: tuple[str, ...] = ()
    """Bounds as text, such as "> 0"."""

    def item(self, index: int) -> "Shape":
        return self.items[min(index, len(self.items) - 1)]

    def expects(self, plural: bool = False) -> str:
        """In words: what is expected here, such as "a whole number > 0"."""
        one, many = {
            "section": ("a table", "tables"),
            "sections": ("a list of tables", "lists of tables"),
            "bool": ("true or false", "true or false"),
            "int": ("a whole number", "whole numbers"),
            "float": ("a number", "numbers"),
            "text": ("a string", "strings"),
            "any": ("a value", "values"),
            "list": ("", ""),
            "choice": ("", ""),
        }[self.kind]
        if self.kind == "choice":
            names = ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in self.choices)
            one, many = f"one of {names}", f"items out of {names}"
        elif self.kind == "list":
            count = f"{len(self.items)} " if self.fixed else ""
            one = many = f"a {'non-empty ' if self.limits else ''}list of {count}{self.items[0].expects(plural=True)}"
        limits = "" if self.kind == "list" else " and ".join(self.limits)
        text = f"{many if plural else one} {limits}".strip()
        return f'{text}, or "none"' if self.optional else text


def shape_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    """The shape of ``annotation``; ``metadata`` are the constraints that pydantic has taken out of it."""
    if typing.get_origin(annotation) is Annotated:
        inner, *more = typing.get_args(annotation)
        return shape_of(inner, (*metadata, *more))
    limits = tuple(_limits(metadata))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        optional = len(rest) < len(args)
        return replace(shape_of(rest[0], metadata) if len(rest) == 1 else Shape("any"), optional=optional)
    if origin is Literal:
        return Shape("choice", choices=args)
    if origin in (tuple, list):
        item = shape_of(args[0])
        if item.kind == "section":
            return Shape("sections", section=item.section, limits=limits)
        variadic = origin is list or args[-1] is Ellipsis
        return Shape(
            "list", items=(item,) if variadic else tuple(map(shape_of, args)), fixed=not variadic, limits=limits
        )
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape("section", section=annotation)
    return Shape(_SCALARS.get(annotation, "any"), limits=limits)


def _limits(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):  # Annotated[float, Field(ge=0)]
            yield from _limits(tuple(item.metadata))
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            bound = getattr(item, name, None)
            if bound is not None and not isinstance(item, FieldInfo):
                yield f"{sign} {bound}" if isinstance(bound, int) else f"{sign} {bound:g}"
        if getattr(item, "min_length", None) and not isinstance(item, FieldInfo):
            yield "that is not empty"


@cache
def shape_of_field(section: type[BaseModel], name: str) -> Shape:
    field = section.model_fields[name]
    return shape_of(field.annotation, tuple(field.metadata))


def lookup(root: type[BaseModel], key: Key) -> Shape | None:
    """The shape of the value at ``key``, or None where there is no such key. "0" steps into a list."""
    shape = Shape("section", section=root)
    for segment in key:
        if shape.kind == "section" and shape.section and segment in shape.section.model_fields:
            shape = shape_of_field(shape.section, segment)
        elif shape.kind == "sections" and _is_index(segment):
            shape = Shape("section", section=shape.section)
        elif shape.kind == "list" and _is_index(segment):
            shape = shape.item(int(segment))
        else:
            return None
    return shape


def _is_index(segment: str) -> bool:
    """Whether it is 0, 1, 2, …, each in one way of writing, so that a value has one key."""
    return segment.isascii() and segment.isdecimal() and len(segment) <= max(1, 9 * (segment[0] != "0"))


def all_keys(root: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key below ``root``, sections before their own keys, lists of tables by their first entry."""
    for name in root.model_fields:
        shape, key = shape_of_field(root, name), (*prefix, name)
        yield key
        if shape.section:
            yield from all_keys(shape.section, (*key, "0") if shape.kind == "sections" else key)


def nearest(root: type[BaseModel], key: Key) -> list[str]:
    """Valid keys that a wrong ``key`` was probably meant to be, best first; at most three, maybe none."""
    *parents, name = (segment.replace("-", "_").lower() for segment in key)
    parent: Key = ()
    for segment in parents:
        if lookup(root, (*parent, segment)) is None:
            close = difflib.get_close_matches(segment, _children(root, parent), n=1, cutoff=0.6)
            if not close:
                break
            segment = close[0]
        parent = (*parent, segment)
    if lookup(root, (*parent, name)) is not None and len(parent) == len(parents):
        values = lookup(root, parent)
        is_item = values is not None and values.kind == "list"  # which is only written as a whole
        return [dotted(parent if is_item else (*parent, name))]

    siblings = _children(root, parent)
    everywhere = list(all_keys(root))
    found = [dotted(other) for other in everywhere if other[-1] == name]
    if not found and name in _ALIASES and lookup(root, tuple(_ALIASES[name].split("."))):
        found = [_ALIASES[name]]
    if not found:
        starts = [sibling for sibling in siblings if sibling.startswith(f"{name}_") or sibling.endswith(f"_{name}")]
        close = starts or difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
        found = [dotted((*parent, sibling)) for sibling in close]
    if not found:
        names = difflib.get_close_matches(name, {other[-1] for other in everywhere}, n=1, cutoff=0.75)
        found = [dotted(other) for other in everywhere if other[-1] in names]
    return found[:3]


def _children(root: type[BaseModel], key: Key) -> list[str]:
    shape = lookup(root, key)
    return list(shape.section.model_fields) if shape and shape.kind == "section" and shape.section else []


def no_such_key(root: type[BaseModel], key: Key) -> str:
    """The end of an error message about an unknown key."""
    found = nearest(root, key)
    if found:
        return f"no such key; did you mean {' or '.join(found)}?"
    parent = key[:-1]
    while lookup(root, parent) is None:
        parent = parent[:-1]
    where = dotted(parent) or "the top level"
    return f"no such key; {where} has: {', '.join(_children(root, parent))}"


def dotted(key: Key) -> str:
    return ".".join(key)


def leaves(section: BaseModel, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every (key, value) of a loaded config that is not a table; a section that is unset is a None."""
    for name in type(section).model_fields:
        value, key = getattr(section, name), (*prefix, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, key)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, entry in enumerate(value):
                yield from leaves(entry, (*key, str(index)))
        else:
            yield key, value
