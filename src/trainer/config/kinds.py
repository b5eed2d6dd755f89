"""Which kind of run a config is for, where the command does not say it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config.run import RL_TABLES, RLConfig, RunConfig, SFTConfig

KINDS: dict[str, type[RunConfig]] = {"sft": SFTConfig, "rl": RLConfig}
"""The command that trains with it -> the root of its configs."""


def kind_of(argv: Sequence[str]) -> str:
    """Returns "rl" if a file or a flag of `argv` names a table that only reinforcement learning has, else "sft".

    What is wrong with the arguments is not told here: loading them as that kind does.
    """
    return kind_of_tables({*_of_files(argv), *_of_flags(argv)})


def kind_of_tables(tables: Iterable[str]) -> str:
    """The same from the names of a config's tables."""
    return "rl" if RL_TABLES & {*tables} else "sft"


def _of_files(argv: Sequence[str]) -> set[str]:
    import tomllib

    tables: set[str] = set()
    for place, token in enumerate(argv):
        if not token.startswith("@"):
            continue
        path = token[1:] or (argv[place + 1] if place + 1 < len(argv) else "")
        try:
            tables |= tomllib.loads(Path(path).read_text(encoding="utf-8")).keys()
        except (OSError, ValueError):
            continue
    return tables


def _of_flags(argv: Sequence[str]) -> set[str]:
    flags = (token[2:].partition("=")[0] for token in argv if token.startswith("--"))
    return {flag.removeprefix("no-").split(".")[0].replace("-", "_") for flag in flags}
