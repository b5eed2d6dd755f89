"""Scoring completions and stepping environments, whatever their code does.

Whatever a reward function does costs its sample and no more. The trainer's own environments run in this process;
everybody else's in others, which are killed and started again where an answer takes too long. Answers come in the order
of the requests. Nothing executes what the model wrote: it travels as JSON text.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import LifoQueue
from typing import Any, Self

from trainer.core.log import logger
from trainer.rl.envs import LoadedEnvironment
from trainer.rl.score_process import ScoringProcess
from trainer.rl.score_worker import answer
from trainer.rl.types import Message, Prompt

_JOIN_SECONDS = (
    1.0  # for each of these that a call lasts another process joins in, so quick scoring starts no second one
)
_SHORTEST_CALL = 0.05  # seconds; waiting may end a little early, and what then is left is no time for an answer
_WARNINGS = 5  # failures told one by one, per environment


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


@dataclass
class Patience:
    """What is left of the time that the scoring of one batch may take."""

    seconds: float = math.inf
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.seconds


Conversation = tuple[Prompt, Sequence[Message]]
"""A prompt and everything said so far, its own messages included."""
_Reply = dict[str, Any]


class Scorer:
    """Scores and steps conversations of `environments`. Safe to use from several threads.

    Args:
        seed: the run's.
        processes: at most this many score at once.
        patience_seconds: of `patience()`; a batch's conversations that are not scored within it are lost.

    Attributes:
        failures: samples lost so far, by the environment's position.
    """

    def __init__(
        self,
        environments: Sequence[LoadedEnvironment],
        seed: int,
        *,
        processes: int = 1,
        patience_seconds: float = math.inf,
    ):
        self.environments = environments
        self.failures: Counter[int] = Counter()
        self._patience_seconds = patience_seconds
        worked: set[int] = set()
        self._processes = [ScoringProcess(seed, worked) for _ in range(processes)]
        self._idle: LifoQueue[ScoringProcess] = LifoQueue()  # so the one that runs already is taken first
        for process in reversed(self._processes):
            self._idle.put(process)
        self._lock = threading.Lock()

    def patience(self) -> Patience:
        """Returns what one batch may take, to be handed to each of its calls."""
        return Patience(self._patience_seconds)

    def score(self, conversations: Sequence[Conversation], patience: Patience | None = None) -> list[Judged]:
        """Returns a reward or an error for each conversation, in order."""
        return [Judged(**reply) for reply in self._ask("score", conversations, patience or self.patience())]

    def step(self, conversations: Sequence[Conversation], patience: Patience | None = None) -> list[Stepped]:
        """Returns what each environment says after the model's turn that the conversation ends with, in order."""
        return [Stepped(**reply) for reply in self._ask("step", conversations, patience or self.patience())]

    def close(self) -> None:
        """Ends the scoring processes, and with them what is being scored."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lose(self, prompt: Prompt, why: str) -> str:
        """Counts a lost sample of `prompt`, tells the first ones, and returns what to tell of it."""
        loaded = self.environments[prompt.env]
        with self._lock:
            self.failures[prompt.env] += 1
            count = self.failures[prompt.env]
        error = f"environment {loaded.config.name!r} (envs.{loaded.position}), prompt {prompt.id}: {why}"
        if count <= _WARNINGS:
            more = "" if count < _WARNINGS else "; further ones are counted, not told"
            logger.warning("a sample is left out: {}{}", error, more)
        return error

    def _ask(self, task: str, conversations: Sequence[Conversation], patience: Patience) -> list[_Reply]:
        round_ = _Round(task, conversations, time.monotonic() + patience.left, patience.seconds)
        started = time.monotonic()
        for number, (prompt, messages) in enumerate(conversations):
            loaded = self.environments[prompt.env]
            if loaded.built_in:
                self._settle(round_, number, answer(loaded.environment, task, prompt.info, [*messages]))
            else:
                round_.waiting.append(number)
        try:
            self._elsewhere(round_)
        finally:
            patience.left -= time.monotonic() - started
        return round_.replies

    def _elsewhere(self, round_: "_Round") -> None:
        """Has the scoring processes answer what waits."""
        if not round_.waiting:
            return
        self._ask_next(round_)  # alone: a process that has to load its environment is not yet a slow one
        count = min(len(self._processes), len(round_.waiting))
        if not count:
            return
        with ThreadPoolExecutor(count, thread_name_prefix="scoring") as threads:
            joined = [threads.submit(self._join, round_, number * _JOIN_SECONDS) for number in range(count)]
        for future in joined:
            future.result()

    def _join(self, round_: "_Round", after_seconds: float) -> None:
        if round_.nothing_waits.wait(after_seconds):
            return
        try:
            while self._ask_next(round_):
                pass
        finally:
            round_.nothing_waits.set()

    def _ask_next(self, round_: "_Round") -> bool:
        """Answers the next one that waits, if there is one and nothing has failed."""
        try:
            number = round_.waiting.popleft()
        except IndexError:
            return False
        try:
            self._settle(round_, number, self._reply(round_, *round_.conversations[number]))
        except BaseException:
            round_.waiting.clear()
            raise
        return True

    def _reply(self, round_: "_Round", prompt: Prompt, messages: Sequence[Message]) -> _Reply:
        process = self._idle.get()
        try:
            if time.monotonic() >= round_.deadline - _SHORTEST_CALL:
                return {"error": f"{round_.task}() was not called: {round_.used_up}"}
            return process.ask(self.environments[prompt.env], round_.task, prompt, messages, round_.deadline)
        finally:
            self._idle.put(process)

    def _settle(self, round_: "_Round", number: int, reply: _Reply) -> None:
        if "error" in reply:
            reply = {"error": self.lose(round_.conversations[number][0], reply["error"])}
        round_.replies[number] = reply


class _Round:
    """One call's conversations and their answers, in order."""

    def __init__(self, task: str, conversations: Sequence[Conversation], deadline: float, seconds: float):
        self.task, self.conversations = task, conversations
        self.deadline = deadline
        self.used_up = (
            f"scoring its batch has taken {seconds:g} s, half of runtime.timeout_seconds, and other ranks wait; "
            "raise rl.score_processes or that"
        )
        self.replies: list[_Reply] = [{}] * len(conversations)
        self.waiting: deque[int] = deque()
        self.nothing_waits = threading.Event()
