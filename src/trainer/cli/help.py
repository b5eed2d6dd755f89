"""Help for configs, made from the schema: sections with their docstrings, fields with type, default and docstring."""

import inspect
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from trainer.config.problems import shown
from trainer.config.schema import Key, dotted, lookup, no_such_key, shape_of_field
from trainer.errors import ConfigError

INTRO = """\
trainer {command} (@ FILE | --KEY VALUE)... {options}

{summary}

  @ a.toml @ b.toml           config files: tables merge, later values win
  --optim.lr 1e-4             one value; flags win over files (also --optim.lr=1e-4; - and _ are the same)
  --data.pack, --no-data.pack true, false (also --data.pack false, --data.no-pack)
  --optim.max-norm none       unset what may be unset; in TOML: max_norm = "none"
  --data.train-on user,tool   a list; also as JSON, or by repeating the flag
  --data.sources.0.path x     a value in a list of tables
  --resume, --no-resume       an optional table with its defaults, or none at all
  --help KEY                  the keys of a section with type, default and meaning; "--help all" for every key
"""


def asks_for_help(argv: list[str]) -> bool:
    return "--help" in argv or "-h" in argv


def topic_of(argv: list[str]) -> str:
    """The KEY of ``--help KEY``; empty where there is none."""
    place = next(index for index, token in enumerate(argv) if token in ("--help", "-h"))
    topic = argv[place + 1] if place + 1 < len(argv) else ""
    return "" if topic.startswith(("@", "-")) else topic


def config_help(root: type[BaseModel], topic: str, command: str = "sft") -> str:
    """The text of ``trainer sft --help [KEY]``.

    Raises:
        ConfigError: there is no such key.
    """
    if not topic:
        return _overview(root, command)
    if topic == "all":
        return "\n".join(_section(root, ()))
    key = tuple(topic.removeprefix("--").replace("-", "_").split("."))
    shape = lookup(root, key)
    if shape is None:
        raise ConfigError(f"--help {topic}: {no_such_key(root, key)}")
    if shape.section:
        return "\n".join(_section(shape.section, (*key, "0") if shape.kind == "sections" else key))
    parent = lookup(root, key[:-1])
    return "\n".join(_field(parent.section, key)) if parent and parent.section else ""


def _overview(root: type[BaseModel], command: str) -> str:
    options = "[--dry-run]" if command in ("sft", "rl") else "[--schema]"
    text = INTRO.format(command=command, options=options, summary=inspect.cleandoc(root.__doc__ or ""))
    if command in ("sft", "rl"):
        text += "  --dry-run                   print the resolved config and its origins instead of training\n"
    else:
        text += "  --schema                    print the JSON schema (for editors) and end\n"
    plain, tables = [], []
    for name in root.model_fields:
        shape = shape_of_field(root, name)
        if shape.section:
            about = inspect.cleandoc(shape.section.__doc__ or "").partition("\n")[0]
            tables.append(f"  {name:<12}{about}")
        else:
            about = (root.model_fields[name].description or "").partition("\n")[0]
            plain.append(f"  {name:<12}{about}")
    return "\n".join([text, "Keys:", *plain, "", "Sections:", *tables, ""])


def _section(section: type[BaseModel], key: Key) -> Iterator[str]:
    """A section's own keys first, then its sub-sections, as in a TOML file."""
    if key:
        yield f"[{dotted(key)}]"
        yield from textwrap.wrap(inspect.cleandoc(section.__doc__ or ""), 110)
        yield ""
    later: list[tuple[type[BaseModel], Key]] = []
    for name in section.model_fields:
        shape = shape_of_field(section, name)
        yield from _field(section, (*key, name))
        if shape.section:
            later.append((shape.section, (*key, name, "0") if shape.kind == "sections" else (*key, name)))
    for inner, inner_key in later:
        yield from _section(inner, inner_key)


def _field(section: type[BaseModel], key: Key) -> Iterator[str]:
    field, shape = section.model_fields[key[-1]], shape_of_field(section, key[-1])
    if shape.kind == "section" and not shape.optional:
        return
    default = "required" if field.is_required() else f"default {shown(field.default)}"
    yield f"--{dotted(key).replace('_', '-')}    {shape.expects()}; {default}"
    yield from textwrap.wrap(field.description or "", 110, initial_indent="    ", subsequent_indent="    ")
    yield ""
