"""What an environment is, and finding the ones that a config names.

An environment makes prompts and scores answers. One of your own is a subclass of `Environment` with two methods:

    class Double(Environment):
        def __init__(self, largest: int = 99):
            self.largest = largest

        def sample(self, rng):
            number = int(rng.integers(self.largest + 1))
            return f"What is twice {number}?", {"answer": str(2 * number)}

        def score(self, info, completion):
            return float(completion.strip() == info["answer"])

Prompts are addressed: the same (seed, split, index) gives the same prompt in every process and after every resume.
Nothing here imports torch.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.arguments import did_you_mean, parse_arguments
from trainer.config.rl import EnvConfig
from trainer.core.rng import derive_seed, numpy_generator
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.rl.types import Message

if TYPE_CHECKING:
    import numpy as np

Split = Literal["train", "eval"]
HELD_OUT_SHARE = 1 / 8
"""Share of all different prompts that only evaluation may use."""
_ATTEMPTS = 1000  # draws for one prompt until it is of the wanted split
_FOREIGN = ("reasoning-gym:", "verifiers:")


@dataclass(frozen=True)
class Score:
    """A reward and the named parts that explain it."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """Base of all environments: `sample` (or `prompt`) and `score` are what a subclass writes.

    Attributes:
        seed: root of the prompts' randomness; set before the first one is asked for.
        tools: tool descriptions for the chat template, as in transformers.
    """

    seed: int = 0
    tools: list[dict[str, Any]] | None = None

    def sample(self, rng: "np.random.Generator") -> tuple[str | list[Message], dict[str, Any]]:
        """Returns a random prompt, drawn with `rng` alone, and the JSON-able facts that scoring needs.

        A string is the content of one user message.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither sample() nor prompt()")

    def prompt(self, index: int, split: Split) -> tuple[str | list[Message], dict[str, Any]]:
        """Returns prompt `index` of a split; a pure function of (`seed`, split, index).

        The two splits never share a prompt: its text decides which of them it belongs to, and `sample` is asked until one
        of the right split comes. An environment over a data set overrides this, and keeps its splits apart itself.

        Raises:
            DataError: the environment has too few different prompts for that.
        """
        for attempt in range(_ATTEMPTS):
            content, info = self.sample(numpy_generator(self.seed, "prompt", split, index, attempt))
            if is_held_out(content) == (split == "eval"):
                return content, info
        raise DataError(
            f"{type(self).__name__} makes too few different prompts: {_ATTEMPTS} draws gave none for the {split} split, "
            f"which holds {HELD_OUT_SHARE if split == 'eval' else 1 - HELD_OUT_SHARE:.1%} of all texts; let its arguments "
            "allow more, or override prompt()"
        )

    def score(self, info: Mapping[str, Any], completion: str) -> float | Score:
        """Returns the reward of the model's last turn, without its end-of-turn token."""
        raise NotImplementedError(f"{type(self).__name__} has neither score() nor score_conversation()")

    def score_conversation(self, info: Mapping[str, Any], messages: list[Message]) -> float | Score:
        """Returns the reward of a finished conversation: the prompt, the model's turns and the environment's."""
        return self.score(info, messages[-1]["content"])

    def step(self, info: Mapping[str, Any], messages: list[Message]) -> str | list[Message] | None:
        """Returns what follows the model's turn that `messages` ends with, before its next one; None ends the episode.

        A string is the content of one user message; tool results are messages of the role "tool".
        """
        return None


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment of the config.

    Attributes:
        position: which of the config's it is.
        built_in: it ships with the trainer, so its code needs no guard.
    """

    config: EnvConfig
    position: int
    environment: Environment
    built_in: bool

    @property
    def multi_turn(self) -> bool:
        return type(self.environment).step is not Environment.step

    def prompt(self, index: int, split: Split) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Returns the messages, with the config's system message, and the facts of a prompt, checked.

        Raises:
            DataError: the environment's code raised, or returned something else.
        """
        where = f"environment {self.config.name!r} (envs.{self.position}): prompt({index}, {split!r})"
        try:
            content, info = self.environment.prompt(index, split)
        except TrainerError as error:
            raise DataError(f"{where}: {error}") from error
        except Exception as error:
            raise DataError(f"{where} failed: {type(error).__name__}: {error}") from error
        try:
            messages = as_messages(content)
            if not isinstance(info, Mapping):
                raise ValueError(f"the facts are a {type(info).__name__}, expected a dict")
            # What the scoring process will see: JSON knows no tuples.
            info = json.loads(json.dumps(dict(info)))
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} must return (text or messages, JSON-able dict): {error}") from error
        system = () if self.config.system is None else ({"role": "system", "content": self.config.system},)
        return (*system, *messages), info


def as_messages(content: Any) -> list[Message]:
    """Returns one user message for a string, and a checked copy of a list of messages.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not isinstance(content, list | tuple) or not content:
        raise ValueError(f"expected text or a list of messages, found {content!r:.80}")
    for message in content:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"expected messages with a role and content, found {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"expected text as a message's content, found {message.get('content')!r:.80}")
    return [dict(message) for message in content]


def is_held_out(content: str | list[Message]) -> bool:
    """Whether a prompt is for evaluation only; decided by its text alone, so under every seed alike."""
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**64


# --- by name ------------------------------------------------------------------------------------------------------------


def load_environments(configs: Sequence[EnvConfig], seed: int) -> list[LoadedEnvironment]:
    """Returns the environments that `configs` name.

    Raises:
        ConfigError: there is none, a name leads nowhere, a package is missing, or arguments do not fit.
    """
    if not configs:
        raise ConfigError('envs: no environment; add [[envs]] with name = "reverse-text" or another')
    return [load_environment(config, position, seed) for position, config in enumerate(configs)]


def load_environment(config: EnvConfig, position: int, seed: int) -> LoadedEnvironment:
    """Returns one environment; `seed` is the run's. Raises as `load_environments` does."""
    from trainer.rl.builtin_envs import BUILT_IN

    key = f"envs.{position}"
    arguments = parse_arguments(config.args, f"{key}.args")
    built_in = config.name in BUILT_IN
    if built_in:
        environment = _construct(BUILT_IN[config.name], arguments, key)
    elif config.name.startswith(_FOREIGN):
        environment = _foreign(config.name, arguments, key)
    else:
        environment = _construct(_find_class(config.name, key, tuple(BUILT_IN)), arguments, key)
    environment.seed = derive_seed(seed, "environment", position)
    return LoadedEnvironment(config, position, environment, built_in)


def _foreign(name: str, arguments: dict[str, Any], key: str) -> Environment:
    from trainer.rl.foreign_envs import reasoning_gym
    from trainer.rl.verifiers_envs import verifiers

    package, _, task = name.partition(":")
    make = reasoning_gym if package == "reasoning-gym" else verifiers
    return make(task, arguments, key)


def _find_class(name: str, key: str, built_in: tuple[str, ...]) -> type[Environment]:
    module_name, separator, class_name = name.rpartition(":")
    if not separator:
        hint = did_you_mean(name, (*built_in, *_FOREIGN)) or "."
        raise ConfigError(
            f"{key}.name = {name!r}: no such environment{hint} Built in are {', '.join(built_in)}; others are "
            "reasoning-gym:TASK, verifiers:TASKSET, package.module:Class and path/to/file.py:Class"
        )
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    except Exception as error:  # a user's module may raise anything
        hint = did_you_mean(f"{module_name}:", _FOREIGN)
        raise ConfigError(f"{key}.name = {name!r} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        found = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Environment)]
        own = [n for n in found if n != "Environment"]
        what = "is no subclass of trainer.rl.envs.Environment" if cls is not None else "does not exist"
        there = f"; {module_name} has {', '.join(own)}" if own else ""
        raise ConfigError(f"{key}.name = {name!r}: {class_name} {what}{there}{did_you_mean(class_name, own)}")
    return cls


def _import(name: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):  # a console script does not look where it was started
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    name = f"trainer_env_{path.stem}_{hashlib.blake2b(str(path.absolute()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _construct(cls: type[Environment], arguments: dict[str, Any], key: str) -> Environment:
    parameters = inspect.signature(cls).parameters
    named = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in named and not takes_any:
            has = f"it has {', '.join(named)}" if named else "it has none"
            raise ConfigError(f"{key}.args: {cls.__name__} has no argument {name!r}; {has}{did_you_mean(name, named)}")
    try:
        return cls(**arguments)
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"{key}.args: {cls.__name__} does not take {arguments}: {error}") from error
