"""Tasks of the package `verifiers` (0.4 or newer), imported only where a config names them.

A taskset of verifiers makes tasks, and a task knows its prompt and scores a finished conversation. That half is used here.
The other half runs the model, an agent with tools in a sandbox, through a server of its own; a task that needs any of
that is refused with its reason. Scoring builds the conversation that the task would have seen, the prompt and one reply,
and has the task score it as `verifiers` scores saved conversations again, without a sandbox.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from trainer.config.arguments import did_you_mean
from trainer.errors import ConfigError, DataError
from trainer.rl.envs import Environment, Score, Split, is_held_out
from trainer.rl.types import Message

_PREPARES = ("setup", "finalize", "stage_verifier")  # what a task overrides to do something in its sandbox
_IN_SANDBOX = ("image", "workdir", "agent_user", "skills", "artifacts")  # fields of a task's data


class VerifiersTasks(Environment):
    """The tasks of one taskset, each answered by a single turn.

    The reward is the weighted sum of the task's own rewards; its parts are these and its metrics.

    Args:
        name: of the taskset, as the config has it.
        taskset: a `verifiers.v1.Taskset`. Its `load()` must yield the same tasks in every process.
    """

    def __init__(self, name: str, taskset: Any):
        self.name, self.taskset = name, taskset
        self._stream: Iterator[Any] | None = None
        self._found: dict[str, list[tuple[list[Message], dict[str, Any]]]] = {"train": [], "eval": []}
        self._task = lru_cache(maxsize=256)(self._rebuild)

    def prompt(self, index: int, split: Split) -> tuple[list[Message], dict[str, Any]]:
        """As `Environment.prompt`: the text of a task decides which split it belongs to. Where there are fewer tasks than
        `index`, they come round again."""
        own = self._found[split]
        if self._stream is None:
            self._stream = iter(self.taskset)
        while index >= len(own) and (task := next(self._stream, None)) is not None:
            messages, info = self._facts(task)
            self._found["eval" if is_held_out(messages) else "train"].append((messages, info))
        if not own:
            raise DataError(
                f"none of the {sum(map(len, self._found.values()))} tasks of {self.name} is in the {split} split"
            )
        return own[index % len(own)]

    def score(self, info: Mapping[str, Any], completion: str) -> Score:
        from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]

        task = self._task(_frozen(info["data"]))
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=_agent_config())
        trace = Trace(
            task=about, state=state_cls(type(task))(), agent=agent, nodes=_nodes(_conversation(task), completion)
        )
        trace.stop("agent_completed")
        trace.ok = True
        asyncio.run(task.score(trace))
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored or not trace.rewards:
            raise ValueError(f"the task gave no {', '.join(unscored) or 'reward'}")
        parts = {name: reward.score for name, reward in trace.rewards.items()}
        return Score(trace.reward, parts | {name: value for name, value in trace.metrics.items() if value is not None})

    def _facts(self, task: Any) -> tuple[list[Message], dict[str, Any]]:
        """Returns a task's prompt, and what it is made from again where it is scored."""
        where = f"task {task.data.idx} of {self.name}"
        declared = type(self.taskset).task_type()
        if type(task) is not declared:
            raise DataError(
                f"{where} is a {type(task).__name__}, and the taskset declares tasks of {declared.__name__}"
            )
        if needs := [name for name in _IN_SANDBOX if getattr(task.data, name, None)]:
            raise DataError(f"{where} needs a sandbox ({', '.join(needs)}), and here is none")
        messages = [_message(message, where) for message in _conversation(task)]
        if not messages or messages[-1]["role"] != "user":
            raise DataError(f"{where} does not end with a user's words, which the model could answer")
        data = task.data.model_dump(mode="json")
        if self._task(_frozen(data)).data != task.data:
            raise DataError(f"{where} has data that JSON does not keep, so it cannot be sent to where it is scored")
        return messages, {"data": data}

    def _rebuild(self, text: str) -> Any:
        cls = type(self.taskset).task_type()
        return cls(cls.data_type().model_validate_json(text), self.taskset.config.task)


def verifiers(name: str, arguments: dict[str, Any], key: str) -> Environment:
    """Returns the environment of `verifiers:NAME`; `arguments` are the fields of the taskset's own config.

    Raises:
        ConfigError: the package, the taskset or an argument does not exist, or its tasks need more than a prompt's answer.
    """
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        importlib.import_module("verifiers.v1.trace")
    except ImportError as error:
        raise ConfigError(
            f"{key}.name needs the package verifiers, 0.4 or newer, which cannot be imported ({error}): "
            'pip install "verifiers>=0.4"'
        ) from error
    if not {"", os.getcwd()} & set(sys.path):  # a console script does not look where it was started
        sys.path.append(os.getcwd())
    try:
        taskset_cls = loaders.taskset_class(name)
        config_cls = loaders.taskset_config_type(name)
        environment_cls = loaders.environment_class(name)
    except Exception as error:  # another package's module may raise anything
        raise ConfigError(f"{key}.name: verifiers:{name} cannot be used: {type(error).__name__}: {error}") from error
    known = [field for field in config_cls.model_fields if field != "id"]
    for argument in arguments:
        if argument not in known:
            raise ConfigError(
                f"{key}.args: verifiers:{name} has no argument {argument!r}; it has {', '.join(known)}"
                f"{did_you_mean(argument, known)}"
            )
    try:
        taskset = taskset_cls(config_cls.model_validate({"id": name, **arguments}))
        why = _why_not(taskset, environment_cls)
    except Exception as error:
        raise ConfigError(f"{key}.args: verifiers:{name} does not take {arguments}: {error}") from error
    if why is not None:
        raise ConfigError(
            f"{key}.name: verifiers:{name} cannot be trained on here: {why}. The trainer's engine runs the model, in one turn, "
            "and uses of a taskset its prompts and rewards; write a class of your own for the rest (docs/rl.md)"
        )
    return VerifiersTasks(f"verifiers:{name}", taskset)


def _why_not(taskset: Any, environment_cls: type) -> str | None:
    """Returns what its tasks need beside a prompt and its answer, or None."""
    from verifiers.v1.envs.single_agent import SingleAgentEnv  # pyright: ignore[reportMissingImports]
    from verifiers.v1.task import Task  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

    cls = type(taskset).task_type()
    if environment_cls is not SingleAgentEnv:
        return f"it brings an environment of its own, {environment_cls.__name__}, which decides who speaks when"
    if type(taskset).toolsets(taskset.config) or cls.toolsets(taskset.config.task):
        return "its tasks have tools, which verifiers serves to an agent"
    if cls.NEEDS_CONTAINER:
        return f"{cls.__name__} needs a container"
    if prepares := [name for name in _PREPARES if getattr(cls, name, None) is not getattr(Task, name, None)]:
        return f"{cls.__name__}.{prepares[0]}() prepares a sandbox"
    task = cls.__new__(cls)  # only to ask for its methods; the data is loaded when a prompt is wanted
    task.config = taskset.config.task
    if hooks := discover_decorated(task, "intercept"):
        return f"{cls.__name__}.{hooks[0].__name__}() changes what goes to the model"
    judged = [judge.score for judge in task.plugged_judges()]
    signals = [*task.hooks("metric"), *task.hooks("reward"), *judged]
    if not task.hooks("reward") and not judged:
        return f"{cls.__name__} has no reward"
    for signal in signals:
        parameter = inspect.signature(signal).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            return f"{cls.__name__}.{signal.__name__}() looks into a sandbox (its parameter `runtime`)"
    return None


def _conversation(task: Any) -> list[Any]:
    """Returns what stands before the model's reply, as messages of verifiers."""
    from verifiers.v1.types import SystemMessage, UserMessage  # pyright: ignore[reportMissingImports]

    system, prompt = task.data.system_prompt, task.data.prompt
    messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else [*(prompt or [])]
    return [*([] if system is None else [SystemMessage(content=system)]), *messages]


def _message(message: Any, where: str) -> Message:
    parts = message.content if isinstance(message.content, list) else []
    if any(part.type != "text" for part in parts) or getattr(message, "tool_calls", None) or message.role == "tool":
        raise DataError(f"{where} has more in its prompt than text")
    text = "\n".join(part.text for part in parts) if parts else message.content or ""
    return {"role": message.role, "content": text}


def _nodes(messages: list[Any], completion: str) -> list[Any]:
    """Returns a conversation as verifiers keeps it: each message points to the one before, and the reply is sampled."""
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import AssistantMessage  # pyright: ignore[reportMissingImports]

    said = [*messages, AssistantMessage(content=completion)]
    last = len(said) - 1
    return [
        MessageNode(parent=n - 1 if n else None, message=message, sampled=n == last) for n, message in enumerate(said)
    ]


@lru_cache(maxsize=1)
def _agent_config() -> Any:
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]

    return AgentConfig()


def _frozen(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)
