"""Arguments of what a config names by import path: "name=value" with a JSON value."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

from trainer.errors import ConfigError


def parse_arguments(texts: Sequence[str], key: str) -> dict[str, Any]:
    """Returns the arguments by name.

    Args:
        key: the config key that they are from, such as "optim.args"; for messages.

    Raises:
        ConfigError: a text is not name=value, its value is not JSON, or a name comes twice.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets without end
            problem = f"{value[:80]!r} is not JSON ({error})" if separator else "there is no '='"
            raise ConfigError(f"{key}: {text[:80]!r} is not name=value: {problem}") from error
        if name.strip() in arguments:
            raise ConfigError(f"{key}: {name.strip()!r} is given twice")
        arguments[name.strip()] = parsed
    return arguments


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Returns '; did you mean "x"?' for the nearest of `known`, or "" if none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
