"""Objects that a config names by their import path."""

import importlib
from typing import Any

from trainer.errors import ConfigError


def import_object(path: str, key: str) -> Any:
    """Returns what `path` names: "package.module:name" or "package.module.name".

    Args:
        key: the config's key, for the message.

    Raises:
        ConfigError: there is no such module or name.
    """
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module may do anything while it is imported
        raise ConfigError(f"{key} = {path!r} cannot be imported: {type(error).__name__}: {error}") from error
