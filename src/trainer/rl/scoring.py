"""Scoring completions and stepping environments with code that may raise, hang, crash or return nonsense.

Whatever a reward function does costs its sample and no more. The trainer's own environments run in this process;
everybody else's in one other, which is killed and started again where an answer takes too long. Answers come in the order
of the requests. Nothing executes what the model wrote: it travels as JSON text.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from trainer.core.log import logger
from trainer.errors import TrainingError
from trainer.rl.envs import LoadedEnvironment
from trainer.rl.score_worker import answer
from trainer.rl.types import Message, Prompt

LOAD_SECONDS = 180.0
"""A scoring process must have imported an environment within this time."""
_END_SECONDS = 10.0  # a process whose connection is closed has ended, or is about to
_WARNINGS = 5  # failures told one by one, per environment
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trainer.rl.score_worker import serve; "


@dataclass(frozen=True)
class Judged:
    """What `score` made of one conversation; without a reward, `error` says why."""

    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Stepped:
    """What the environment says next; None ends the episode, because of `error` if there is one."""

    messages: list[Message] | None = None
    error: str | None = None


Conversation = tuple[Prompt, Sequence[Message]]
"""A prompt and everything said so far, its own messages included."""


class Scorer:
    """Scores and steps conversations of `environments`; `seed` is the run's. Safe to use from several threads.

    Attributes:
        failures: samples lost so far, by the environment's position.
    """

    def __init__(self, environments: Sequence[LoadedEnvironment], seed: int):
        self.environments = environments
        self.failures: Counter[int] = Counter()
        self._worker = _Worker(environments, seed)
        self._lock = threading.Lock()

    def score(self, conversations: Sequence[Conversation]) -> list[Judged]:
        """Returns a reward or an error for each conversation, in order."""
        return [Judged(**reply) for reply in self._ask("score", conversations)]

    def step(self, conversations: Sequence[Conversation]) -> list[Stepped]:
        """Returns what each environment says after the model's turn that the conversation ends with, in order."""
        return [Stepped(**reply) for reply in self._ask("step", conversations)]

    def close(self) -> None:
        """Ends the scoring process."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, task: str, conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
        with self._lock:
            return [self._ask_one(task, prompt, [*messages]) for prompt, messages in conversations]

    def _ask_one(self, task: str, prompt: Prompt, messages: list[Message]) -> dict[str, Any]:
        loaded = self.environments[prompt.env]
        if loaded.built_in:
            reply = answer(loaded.environment, task, prompt.info, messages)
        else:
            reply = self._worker.ask(loaded, task, prompt, messages)
        if "error" not in reply:
            return reply
        return {"error": self.lose(prompt, reply["error"])}

    def lose(self, prompt: Prompt, why: str) -> str:
        """Counts a lost sample of `prompt`, tells the first ones, and returns what to tell of it."""
        loaded = self.environments[prompt.env]
        self.failures[prompt.env] += 1
        error = f"environment {loaded.config.name!r} (envs.{loaded.position}), prompt {prompt.id}: {why}"
        if self.failures[prompt.env] <= _WARNINGS:
            more = "" if self.failures[prompt.env] < _WARNINGS else "; further ones are counted, not told"
            logger.warning("a sample is left out: {}{}", error, more)
        return error


class _Gone(Exception):
    """The scoring process does not answer, and why."""


class _GoneBefore(_Gone):
    """It ended before it took the request."""


class _Worker:
    """The scoring process: started when it is first needed, and again after it had to be killed."""

    def __init__(self, environments: Sequence[LoadedEnvironment], seed: int):
        self._environments, self._seed = environments, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._loaded: set[int] = set()  # environments that the present process has
        self._worked: set[int] = set()  # environments that some process had

    def ask(self, loaded: LoadedEnvironment, task: str, prompt: Prompt, messages: list[Message]) -> dict[str, Any]:
        """Returns the environment's answer, or {"error"}.

        Raises:
            TrainingError: the environment cannot be loaded there, although it could be here.
        """
        was_there = self._process is not None
        request = {"task": task, "env": prompt.env, "info": prompt.info, "messages": messages}
        try:
            self._load(loaded)
            return self._exchange(request, loaded.config.score_seconds)
        except _Gone as gone:
            has_loaded = loaded.position in self._loaded
            self.close()
            if was_there and isinstance(gone, _GoneBefore):
                # It ended while nobody asked it anything: this sample is not to blame.
                return self.ask(loaded, task, prompt, messages)
            if has_loaded:
                return {"error": f"{task}() {gone}"}
            if loaded.position in self._worked:
                return {"error": f"the scoring process could not load the environment again: {gone}"}
            raise TrainingError(
                f"the scoring process cannot load environment {loaded.config.name!r} (envs.{loaded.position}): {gone}"
            ) from None

    def close(self) -> None:
        """Kills the process and everything it has started."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended, and its children with it
            self._process.wait()
        self._process = self._connection = None
        self._loaded.clear()

    def _load(self, loaded: LoadedEnvironment) -> None:
        if loaded.position in self._loaded:
            return
        if self._process is None:
            self._start()
        config = loaded.config.model_dump_json()
        request = {"task": "load", "env": loaded.position, "config": config, "seed": self._seed}
        reply = self._exchange(request, LOAD_SECONDS)
        if "error" in reply:
            raise _Gone(reply["error"])
        self._loaded.add(loaded.position)
        self._worked.add(loaded.position)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", f"{_COMMAND}serve({descriptor}, {os.getpid()})", json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,  # signals to this process's group are not for it; its own group is killed as one
            env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of a set must not depend on the process
        )
        theirs.close()

    def _exchange(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        kind = _GoneBefore
        try:
            assert self._connection is not None
            self._connection.send_bytes(json.dumps(request).encode())
            self._receive(timeout_seconds)  # score_worker.TAKEN
            kind = _Gone
            return json.loads(self._receive(timeout_seconds))
        except (EOFError, OSError):
            raise kind(f"ended the scoring process ({self._end()})") from None

    def _receive(self, timeout_seconds: float) -> bytes:
        assert self._connection is not None
        if not self._connection.poll(timeout_seconds):
            raise _Gone(f"gave no answer within {timeout_seconds:g} s")
        return self._connection.recv_bytes()

    def _end(self) -> str:
        """How the process ended, whose connection is closed."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
