"""Running an environment's `score` and `step`, and the process that does it for code which is not the trainer's.

The process speaks JSON over one inherited descriptor. Its standard output goes to standard error, so what a reward
function prints cannot be taken for an answer. It ends with its parent, and takes along what it has started.
"""

import faulthandler
import hashlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, NoReturn

from trainer.config.rl import EnvConfig
from trainer.core.signals import ignore_in_worker
from trainer.rl.envs import Environment, LoadedEnvironment, Score, as_messages, load_environment

TAKEN = b"taken"
"""Sent before a request is worked on; its answer follows."""
LOAD_SECONDS = 180.0
"""A scoring process must have imported an environment within this time."""
_SPARE_SECONDS = 10.0  # what takes longer than it may by this much has no parent any more that would kill it
_PARENT_SECONDS = 0.5  # how often to look whether the parent still lives


def answer(environment: Environment, task: str, info: Mapping[str, Any], messages: list[Any]) -> dict[str, Any]:
    """Returns {"reward", "parts"} (task "score"), {"messages"} (task "step") or {"error"}; JSON-able, whatever the
    environment does short of hanging or ending the process."""
    process = os.getpid()
    try:
        if task == "score":
            return _score(environment.score_conversation(info, messages))
        reply = environment.step(info, messages)
        # Through JSON: what is not plain data fails here, inside the try.
        return {"messages": None if reply is None else json.loads(json.dumps(as_messages(reply)))}
    except (Exception, SystemExit) as error:
        if os.getpid() != process:
            raise  # in a child that the environment forked: it ends
        return {"error": _described(task, error)}


def _score(score: Any) -> dict[str, Any]:
    if not isinstance(score, Score):
        score = Score(score)
    parts = {str(name): _number(value, f"part {name!r}") for name, value in score.parts.items()}
    return {"reward": _number(score.reward, "the reward"), "parts": parts}


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Real) and hasattr(value, "item"):  # a tensor or numpy array of one element
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{what} is {value!r:.60}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number


def _described(task: str, error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the error is the user's, and so is its text
        lines = []
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if frame.filename == __file__ else f" ({frame.filename}:{frame.lineno})"
    return f"{task}() raised {type(error).__name__}{': ' + lines[0][:300] if lines else ''}{where}"


def serve(descriptor: int, parent: int) -> None:
    """Answers requests until the other end is closed; `parent` is the process to end with."""
    ignore_in_worker()
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    environments: dict[int, LoadedEnvironment] = {}
    process = os.getpid()
    while True:
        try:
            request = connection.recv_bytes()
            connection.send_bytes(TAKEN)  # from here on, an end of this process is this request's doing
        except (EOFError, OSError):
            return
        try:
            reply = _handle(environments, request)
        except BaseException as error:
            if os.getpid() != process:
                _end_child(error)
            raise
        if os.getpid() != process:
            _end_child(None)  # the answer is its parent's
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        connection.send_bytes(json.dumps(reply).encode())


def _end_child(error: BaseException | None) -> NoReturn:
    """Ends a child that the environment forked, as Python would, whose own way waits for faulthandler's thread."""
    code: object = 0
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _handle(environments: dict[int, LoadedEnvironment], data: bytes) -> dict[str, Any]:
    request = json.loads(data)
    position = request["env"]
    _seed(data)
    if request["task"] == "load":
        _end_after(LOAD_SECONDS)
        try:
            config = EnvConfig.model_validate_json(request["config"])
            environments[position] = load_environment(config, position, request["seed"])
        except (Exception, SystemExit) as error:
            return {"error": f"loading raised {type(error).__name__}: {error}"}
        return {}
    loaded = environments[position]
    _end_after(loaded.config.score_seconds)
    return answer(loaded.environment, request["task"], request["info"], request["messages"])


def _seed(data: bytes) -> None:
    """A reward function that draws random numbers draws the same ones for the same request."""
    random.seed(data)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little"))


def _end_after(seconds: float) -> None:
    """Ends this process if it still works then: `_end_with` cannot while something like `re` holds the interpreter."""
    faulthandler.dump_traceback_later(seconds + _SPARE_SECONDS, exit=True, file=2)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process leads its own group
