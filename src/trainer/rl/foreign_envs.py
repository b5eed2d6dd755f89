"""Environments of other packages, which are optional and imported only where a config names them."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trainer.config.arguments import did_you_mean
from trainer.errors import ConfigError
from trainer.rl.envs import Environment, Score

if TYPE_CHECKING:
    import numpy as np

_ITEMS = 2**30  # numbers of items to draw from; a data set seeds a generator with its seed + the number
_OWN_ARGUMENTS = ("answer_tag", "partial")


class ReasoningGym(Environment):
    """One task of `reasoning-gym`, whose items are made from their number alone.

    The reward is 1 where the task's own scorer gives full marks and else 0: its partial credit often starts near 1 and
    so teaches little. The part "partial" is what the scorer gave.

    Args:
        dataset: a `reasoning_gym.dataset.ProceduralDataset`.
        answer_tag: the answer is what stands in the last <tag>...</tag> of a completion, or nothing; None = all of it.
        partial: reward the scorer's partial credit.
    """

    def __init__(self, dataset: Any, answer_tag: str | None = None, partial: bool = False):
        self.dataset, self.answer_tag, self.partial = dataset, answer_tag, partial
        self._entry = lru_cache(maxsize=256)(
            dataset.__getitem__
        )  # facts may not be JSON-able: scoring makes them again

    def sample(self, rng: "np.random.Generator") -> tuple[str, dict[str, Any]]:
        item = int(rng.integers(_ITEMS))
        entry = self._entry(item)
        return entry["question"], {"item": item, "answer": str(entry["answer"])}

    def score(self, info: Mapping[str, Any], completion: str) -> Score:
        answer = completion.strip()
        if self.answer_tag is not None:
            _, opened, rest = answer.rpartition(f"<{self.answer_tag}>")
            inside, closed, _ = rest.partition(f"</{self.answer_tag}>")
            answer = inside.strip() if opened and closed else ""
        marks = float(self.dataset.score_answer(answer=answer, entry=self._entry(info["item"])))
        return Score(marks if self.partial else float(marks >= 1.0), {"partial": marks})


def reasoning_gym(task: str, arguments: dict[str, Any], key: str) -> Environment:
    """Returns the environment of `reasoning-gym:TASK`; `arguments` are the task's config and those of `ReasoningGym`.

    Raises:
        ConfigError: the package, the task or an argument does not exist.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
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
        dataset = reasoning_gym.create_dataset(task, size=_ITEMS, seed=0, **rest)
        return ReasoningGym(dataset, **own)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}.args: reasoning-gym:{task} does not take {rest}: {error}") from error


def _missing(package: str, key: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f'{key}.name needs the package {package}, which cannot be imported ({error}): pip install "exact-trainer[envs]" '
        f"(or pip install {package})"
    )
