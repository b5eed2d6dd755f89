"""``trainer config``: what a run would be started with. Also ``trainer sft --help`` and ``--dry-run``."""

import json
from typing import Any

from trainer.cli.help import asks_for_help, config_help, topic_of
from trainer.errors import ConfigError


def main(argv: list[str], command: str = "config") -> int:
    """``trainer config [sft] (@ FILE | --KEY VALUE)... | --schema | --help [KEY]``; returns the exit code.

    ``command`` is the one that help is given for: ``trainer sft --help`` comes here too.
    """
    named = bool(argv) and argv[0].isidentifier()
    kind, rest = (argv[0], argv[1:]) if named else ("sft", argv)
    if kind != "sft":
        raise ConfigError(
            f'trainer config knows no kind of run {kind!r}; it knows "sft" (a file is given as "@ {kind}")'
        )

    from trainer.config.load import load_config
    from trainer.config.run import SFTConfig

    if asks_for_help(rest):
        print(config_help(SFTConfig, topic_of(rest), command), end="")
    elif "--schema" in rest:
        print(json.dumps(_toml_schema(SFTConfig.model_json_schema()), indent=2))
    else:
        print(load_config(SFTConfig, rest).dump_toml(), end="")
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
