"""Files and flags in, one frozen config out, knowing where each of its values comes from."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from trainer.config.base import Section
from trainer.config.dump import dump_toml
from trainer.config.flags import Assignment, parse_flags
from trainer.config.problems import RULE, Problem, config_error, explain, origin_of
from trainer.config.run import RL_TABLES
from trainer.config.schema import Key, dotted, leaves

ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A valid config and the history of its values."""

    config: ConfigT
    origins: Mapping[str, str]
    """Dotted key of every value (and of tables that were named) -> "default", a file's path, or "flag --optim.lr"."""

    def dump_toml(self, comments: bool = True) -> str:
        """The whole config as a TOML document, which loads to an equal config; origins are trailing comments."""
        return dump_toml(self.config, self.origins if comments else None)


def load_config(root: type[ConfigT], argv: list[str]) -> Loaded[ConfigT]:
    """The config that ``@ a.toml @ b.toml --optim.lr 1e-4`` describes.

    Files are applied in order (tables merge, everything else replaces), then flags in order, wherever they stand.

    Raises:
        ConfigError: listing everything that is wrong with files, flags, types or, if nothing else is, combinations.
    """
    flags = parse_flags(root, argv)
    problems = flags.problems
    tree = _Tree()
    for path in flags.files:
        table = _read_toml(path)
        if isinstance(table, Problem):
            problems.append(table)
        else:
            tree.put((), table, path)
    for assignment in flags.assignments:
        problem = tree.assign(assignment)
        if problem:
            problems.append(problem)
    try:
        config = root.model_validate(tree.values)
    except ValidationError as error:
        # A misspelt key leaves the right one unset: only an otherwise sound config is held against the rules.
        if not problems or any(detail["type"] != RULE for detail in error.errors(include_url=False)):
            problems += explain(root, error, tree.origins)
        raise config_error(_of_another_kind(root, tree) + problems) from None
    if problems:
        raise config_error(problems)
    origins = {dotted(key): tree.origins.get(dotted(key), "default") for key, _ in leaves(config)}
    return Loaded(config, origins | {key: origin for key, origin in tree.origins.items() if key not in origins})


def _of_another_kind(root: type[Section], tree: "_Tree") -> list[Problem]:
    """The first problem of a config that another command trains with: the others follow from it."""
    tables = sorted(RL_TABLES & tree.values.keys() - root.model_fields.keys())
    if not tables:
        return []
    where = origin_of(tree.origins, tables[0])
    return [Problem(", ".join(tables), "for reinforcement learning, which is `trainer rl`", where)]


def _read_toml(path: str) -> dict[str, Any] | Problem:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Problem(path, f"no such file (looked in {Path.cwd()})")
    except OSError as error:
        return Problem(path, f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return Problem(path, f"is not UTF-8 text: {error.reason} at byte {error.start}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return Problem(path, f"is not TOML: {error}")
    except ValueError as error:  # a number of thousands of digits
        return Problem(path, f"cannot be read: {error}")


class _Tree:
    """Nested dicts and lists as TOML has them, with the origin of every leaf and of every table that was named."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def put(self, key: Key, value: Any, origin: str) -> None:
        """Set ``key``; a table is merged into the table that is there."""
        if not isinstance(value, dict):
            self._replace(key, value, origin)
            return
        if key and not isinstance(self._get(key), dict):
            self._replace(key, {}, origin)
        for name, inner in value.items():
            self.put((*key, name), inner, origin)

    def assign(self, flag: Assignment) -> Problem | None:
        problem = self._make_entry(flag.key, flag.origin)
        if problem:
            return problem
        present = self._get(flag.key)
        if flag.action == "extend" and isinstance(present, list):
            kept = {key: origin for key, origin in self.origins.items() if key.startswith(f"{dotted(flag.key)}.")}
            self._replace(flag.key, present + flag.value, flag.origin)
            self.origins.update(kept)
        else:
            self.put(flag.key, flag.value, flag.origin)
        return None

    def _make_entry(self, key: Key, origin: str) -> Problem | None:
        """For data.sources.0.path: the list and its next entry appear when they are written to."""
        for place, segment in enumerate(key):
            if not segment.isdecimal():
                continue
            entries = self._get(key[:place])
            if not isinstance(entries, list):
                entries = []
                self._replace(key[:place], entries, origin)
            if int(segment) > len(entries):
                there = f"{dotted(key[:place])} has {len(entries)} entries"
                return Problem(
                    dotted(key), f"{there}, the next one is {dotted((*key[:place], str(len(entries))))}", origin
                )
            if int(segment) == len(entries):
                entries.append({})
        return None

    def _get(self, key: Key) -> Any:
        node: Any = self.values
        for segment in key:
            if isinstance(node, list):
                node = node[int(segment)]
            else:
                node = node.get(segment) if isinstance(node, dict) else None
        return node

    def _replace(self, key: Key, value: Any, origin: str) -> None:
        if not isinstance(self._get(key[:-1]), (dict, list)):
            self._replace(key[:-1], {}, origin)  # the table that it belongs into
        name = dotted(key)
        inside = f"{name}."
        self.origins = {k: o for k, o in self.origins.items() if k != name and not k.startswith(inside)}
        self.origins[name] = origin
        node = self._get(key[:-1])
        if isinstance(node, list):
            node[int(key[-1])] = value
        else:
            node[key[-1]] = value
        if isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, dict):
                    self._note((*key, str(index)), entry, origin)

    def _note(self, key: Key, table: dict[str, Any], origin: str) -> None:
        for name, inner in table.items():
            if isinstance(inner, dict):
                self._note((*key, name), inner, origin)
            else:
                self.origins[dotted((*key, name))] = origin
