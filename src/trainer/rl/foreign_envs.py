"""Environments of other packages, which are optional and imported only where a config names them."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.arguments import did_you_mean
from trainer.errors import ConfigError
from trainer.rl.envs import Environment, Score
from trainer.rl.gym_items import Items, RemoteItems, open_items

if TYPE_CHECKING:
    import numpy as np

_OWN_ARGUMENTS = ("answer_tag", "partial")


class ReasoningGym(Environment):
    """One task of `reasoning-gym`, whose items are made from their number alone.

    The reward is 1 where the task's own scorer gives full marks and else 0: its partial credit often starts near 1 and
    so teaches little. The part "partial" is what the scorer gave.

    Args:
        items: of the task.
        answer_tag: the answer is what stands in the last <tag>...</tag> of a completion, or nothing; None = all of it.
        partial: reward the scorer's partial credit.
    """

    def __init__(self, items: Items | RemoteItems, answer_tag: str | None = None, partial: bool = False):
        self.items, self.answer_tag, self.partial = items, answer_tag, partial

    def sample(self, rng: "np.random.Generator") -> tuple[str, dict[str, Any]]:
        item = int(rng.integers(self.items.size))
        question, answer = self.items.text(item)
        return question, {"item": item, "answer": answer}

    def score(self, info: Mapping[str, Any], completion: str) -> Score:
        answer = completion.strip()
        if self.answer_tag is not None:
            _, opened, rest = answer.rpartition(f"<{self.answer_tag}>")
            inside, closed, _ = rest.partition(f"</{self.answer_tag}>")
            answer = inside.strip() if opened and closed else ""
        marks = self.items.marks(info["item"], answer)
        return Score(marks if self.partial else float(marks >= 1.0), {"partial": marks})


def reasoning_gym(task: str, arguments: dict[str, Any], key: str) -> Environment:
    """Returns the environment of `reasoning-gym:TASK`; `arguments` are the task's config and those of `ReasoningGym`.

    Raises:
        ConfigError: the package, the task or an argument does not exist.
    """
    try:
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("reasoning-gym", key, error) from error
    if task not in DATASETS:
        near = did_you_mean(task, [*DATASETS])
        raise ConfigError(
            f"{key}.name: reasoning-gym has no task {task!r}{near or f'; it has {len(DATASETS)}: ' + ', '.join(sorted(DATASETS))}"
        )
    own = {name: arguments[name] for name in _OWN_ARGUMENTS if name in arguments}
    rest = {name: value for name, value in arguments.items() if name not in own}
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    for name in rest:
        if name not in known:
            choices = [*known, *_OWN_ARGUMENTS]
            raise ConfigError(
                f"{key}.args: reasoning-gym:{task} has no argument {name!r}; it has {', '.join(choices)}"
                f"{did_you_mean(name, choices)}"
            )
    try:
        return ReasoningGym(open_items(task, rest), **own)
    except Exception as error:  # another package's constructor may raise anything
        raise ConfigError(f"{key}.args: reasoning-gym:{task} does not take {rest}: {error}") from error


def _missing(package: str, key: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f'{key}.name needs the package {package}, which cannot be imported ({error}): pip install "exact-trainer[envs]" '
        f"(or pip install {package})"
    )
