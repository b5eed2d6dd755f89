"""One process that scores and steps for environments which may raise, hang, crash or return nonsense."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from trainer.errors import TrainingError
from trainer.rl.envs import LoadedEnvironment
from trainer.rl.types import Message, Prompt

LOAD_SECONDS = 180.0
"""A scoring process must have imported an environment within this time."""
_END_SECONDS = 10.0  # a process whose connection is closed has ended, or is about to
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trainer.rl.score_worker import serve; "


class _Gone(Exception):
    """The process does not answer, and why."""


class _GoneBefore(_Gone):
    """It ended before it took the request."""


class ScoringProcess:
    """Started when it is first needed, and again after it had to be killed. Serves one thread at a time."""

    def __init__(self, environments: Sequence[LoadedEnvironment], seed: int):
        self._environments, self._seed = environments, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._loaded: set[int] = set()  # environments that the present process has
        self._worked: set[int] = set()  # environments that some process had
        self._asked, self._closed = threading.Lock(), threading.Event()

    @property
    def pid(self) -> int | None:
        """Of the present process; None if there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, loaded: LoadedEnvironment, task: str, prompt: Prompt, messages: Sequence[Message]) -> dict[str, Any]:
        """Returns the environment's answer, or {"error"}.

        Raises:
            TrainingError: the environment cannot be loaded there, although it could be here, or this is closed.
        """
        request = {"task": task, "env": prompt.env, "info": prompt.info, "messages": [*messages]}
        with self._asked:
            return self._ask(loaded, request)

    def close(self) -> None:
        """Kills the process and everything it has started, also while it is asked something; there will be no other."""
        self._closed.set()
        self._kill()  # whoever asks sees it end
        with self._asked:
            self._stop()

    def _ask(self, loaded: LoadedEnvironment, request: dict[str, Any]) -> dict[str, Any]:
        was_there = self._process is not None
        try:
            self._load(loaded)
            return self._exchange(request, loaded.config.score_seconds)
        except _Gone as gone:
            has_loaded = loaded.position in self._loaded
            self._stop()
            if was_there and isinstance(gone, _GoneBefore):
                # It ended while nobody asked it anything: this sample is not to blame.
                return self._ask(loaded, request)
            if has_loaded:
                return {"error": f"{request['task']}() {gone}"}
            if loaded.position in self._worked:
                return {"error": f"the scoring process could not load the environment again: {gone}"}
            raise TrainingError(
                f"the scoring process cannot load environment {loaded.config.name!r} (envs.{loaded.position}): {gone}"
            ) from None

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended, and its children with it

    def _stop(self) -> None:
        self._kill()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
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
        if self._closed.is_set():  # looked at after the process is there, so that close() or this sees it
            self._stop()
            raise TrainingError("nothing is scored any more: the run is at its end")

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
