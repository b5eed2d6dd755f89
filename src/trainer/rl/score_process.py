"""One process that scores and steps for environments which may raise, hang, crash or return nonsense."""

import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from trainer.errors import TrainingError
from trainer.rl.envs import LoadedEnvironment
from trainer.rl.score_worker import LOAD_SECONDS, TAKEN
from trainer.rl.types import Message, Prompt

_MOST_BYTES = 2**26  # of one answer
_HEADER = struct.Struct("!i")  # what multiprocessing.connection, which the worker uses, puts before up to 2 GiB
_END_SECONDS = 10.0  # a process whose connection is closed has ended, or is about to
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trainer.rl.score_worker import serve; "


class _Gone(Exception):
    """The process does not answer, and why."""


class _GoneBefore(_Gone):
    """It ended before it took the request."""


class ScoringProcess:
    """Started when it is first needed, and again after it had to be killed. Serves one thread at a time.

    Args:
        worked: positions of the environments that some process has had; shared by a pool's.
    """

    def __init__(self, seed: int, worked: set[int]):
        self._seed, self._worked = seed, worked
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._loaded: set[int] = set()  # environments that the present process has
        self._asked, self._closed = threading.Lock(), threading.Event()

    @property
    def pid(self) -> int | None:
        """Of the present process; None if there is none."""
        return None if self._process is None else self._process.pid

    def ask(
        self,
        loaded: LoadedEnvironment,
        task: str,
        prompt: Prompt,
        messages: Sequence[Message],
        deadline: float = math.inf,
    ) -> dict[str, Any]:
        """Returns the environment's answer, or {"error"}.

        Args:
            deadline: an environment that has worked before is loaded again until then only (`time.monotonic`).

        Raises:
            TrainingError: the environment cannot be loaded there, although it could be here, or this is closed.
        """
        request = {"task": task, "env": prompt.env, "info": prompt.info, "messages": [*messages]}
        with self._asked:
            if self._closed.is_set():
                raise _at_its_end()
            return self._ask(loaded, request, deadline)

    def close(self) -> None:
        """Kills the process and everything it has started, also while it is asked something; there will be no other."""
        self._closed.set()
        self._kill()  # whoever asks sees it end
        with self._asked:
            self._stop()

    def _ask(self, loaded: LoadedEnvironment, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        was_there = self._process is not None
        try:
            self._load(loaded, deadline)
            return self._exchange(request, loaded.config.score_seconds)
        except _Gone as gone:
            has_loaded = loaded.position in self._loaded
            self._stop()
            if self._closed.is_set():
                raise _at_its_end() from None
            if was_there and isinstance(gone, _GoneBefore):
                # It ended or hung while nobody asked it anything: this sample is not to blame.
                return self._ask(loaded, request, deadline)
            if has_loaded:
                return {"error": f"{request['task']}() {gone}"}
            if loaded.position in self._worked:
                return {"error": f"the scoring process could not load the environment again: {gone}"}
            raise TrainingError(
                f"the scoring process cannot load environment {loaded.config.name!r} (envs.{loaded.position}): {gone}"
            ) from None

    def _kill(self) -> None:
        process, connection = self._process, self._connection
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # what left the group may hold the other end
            except OSError:
                pass  # it is closed
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

    def _load(self, loaded: LoadedEnvironment, deadline: float) -> None:
        if loaded.position in self._loaded:
            return
        if self._process is None:
            self._start()
        config = loaded.config.model_dump_json()
        request = {"task": "load", "env": loaded.position, "config": config, "seed": self._seed}
        again = loaded.position in self._worked
        left = max(0.0, round(deadline - time.monotonic(), 1)) if again and deadline < math.inf else math.inf
        try:
            reply = self._exchange(request, min(LOAD_SECONDS, left))
        except _Gone as gone:
            if left > LOAD_SECONDS or time.monotonic() < deadline - 0.1:
                raise
            what = "what was left of half of runtime.timeout_seconds, which a batch's scoring may take; raise that"
            raise type(gone)(f"{gone}, {what}") from None
        if "error" in reply:
            raise _Gone(reply["error"])
        self._loaded.add(loaded.position)
        self._worked.add(loaded.position)

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", f"{_COMMAND}serve({descriptor}, {os.getpid()})", json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,  # signals to this process's group are not for it; its own group is killed as one
                env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of a set must not depend on the process
            )
        except OSError as error:
            raise _Gone(f"it cannot be started: {error}") from None
        finally:
            theirs.close()
        if self._closed.is_set():  # looked at after the process is there, so that close() or this sees it
            self._stop()
            raise _at_its_end()

    def _exchange(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        kind, deadline = _GoneBefore, time.monotonic() + timeout_seconds
        try:
            self._send(json.dumps(request).encode(), deadline)
            if self._receive(deadline) != TAKEN:
                raise _GoneBefore("answered what it was not asked")
            kind = _Gone
            reply = json.loads(self._receive(deadline))
            if not isinstance(reply, dict):
                raise ValueError(f"a {type(reply).__name__}")
            return reply
        except TimeoutError:
            raise kind(f"gave no answer within {timeout_seconds:g} s") from None
        except (EOFError, OSError):
            raise kind(f"ended the scoring process ({self._end()})") from None
        except (ValueError, RecursionError) as error:
            raise kind(f"sent no answer but something else: {error}") from None

    def _send(self, data: bytes, deadline: float) -> None:
        self._timed(deadline).sendall(_HEADER.pack(len(data)) + data)

    def _receive(self, deadline: float) -> bytes:
        (size,) = _HEADER.unpack(self._receive_bytes(_HEADER.size, deadline))
        if not 0 <= size <= _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return self._receive_bytes(size, deadline)

    def _receive_bytes(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._timed(deadline).recv(min(count - len(data), 2**20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _timed(self, deadline: float) -> socket.socket:
        """The connection, with which nothing lasts longer than until `deadline`, whatever the other end does."""
        assert self._connection is not None
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection

    def _end(self) -> str:
        """How the process ended, whose connection is closed."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:  # most real-time signals have no name
            return f"signal {-code}"


def _at_its_end() -> TrainingError:
    return TrainingError("nothing is scored any more: the run is at its end")
