"""``trainer config``: what a run would be started with. Also ``trainer sft|rl --help`` and ``--dry-run``."""

import json
from typing import Any

from trainer.cli.help import asks_for_help, config_help, topic_of
from trainer.errors import ConfigError


def main(argv: list[str], command: str = "config") -> int:
    """``trainer config [sft|rl] (@ FILE | --KEY VALUE)... | --schema | --help [KEY]``; returns the exit code.

    ``command`` is the one that help is given for: ``trainer sft --help`` comes here too.
    """
    named = bool(argv) and argv[0].isidentifier()
    from trainer.config.kinds import KINDS, kind_of
    from trainer.config.load import load_config

    kind, rest = (argv[0], argv[1:]) if named else (kind_of(argv), argv)
    if kind not in KINDS:
        raise ConfigError(
            f'trainer config knows no kind of run {kind!r}; it knows "sft" and "rl" (a file is given as "@ {kind}")'
        )
    root = KINDS[kind]

    if asks_for_help(rest):
        print(config_help(root, topic_of(rest), command), end="")
    elif "--schema" in rest:
        print(json.dumps(_toml_schema(root.model_json_schema()), indent=2))
    else:
        print(load_config(root, rest).dump_toml(), end="")
    return 0


def _toml_schema(node: Any) -> Any:
    """TOML has no null: where the schema says null, a file says "none"."""
    if node is None:
        return "none"
    if node == {"type": "null"}:
        return {"const": "none"}
    if isinstance(node, list):
        return [_toml_schema(item) for item in node]
    if isinstance(node, dict):
        return {key: _toml_schema(value) for key, value in node.items()}
    return node
