"""Items of a `reasoning-gym` task, the same in every process.

Some tasks walk over sets of texts while they make an item, so it depends on the process's string hashes: another rank, a
resumed run or the scoring process would make another one of the same number. Here items are made and answers are scored
where these hashes are fixed: in this process if they are (as in the scoring process), else in one of its own.
"""

import json
import os
import subprocess
import sys
import threading
import weakref
from functools import lru_cache
from typing import Any

from trainer.core.signals import ignore_in_worker
from trainer.rl.answers import read_as_data

HASHES = {"PYTHONHASHSEED": "0"}
"""What fixes the string hashes of a process, from its start on."""
SIZES = {"acre": 2**12, "gsm_symbolic": 2**14, "list_functions": 2**14, "word_ladder": 2**14}
"""Numbers of items to draw from, where a task makes something of all of them beforehand or allows no more."""
_SIZE = 2**30  # of any other: a data set seeds a generator with its seed + the item's number
_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trainer.rl.gym_items import serve; serve()"


def _size(task: str, config: dict[str, Any]) -> int:
    """Returns how many items to draw from; a composite asks each of its tasks for the item of the same number."""
    tasks = [task, *(part["name"] for part in config.get("datasets", []))] if task == "composite" else [task]
    return min(SIZES.get(name, _SIZE) for name in tasks)


def _own_types(task: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings as the package wants them: the tasks of a composite, tables in JSON, are objects to it."""
    if task != "composite":
        return config
    from reasoning_gym.composite import DatasetSpec  # pyright: ignore[reportMissingImports]

    parts = [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in config.get("datasets", [])]
    return config | {"datasets": parts}


class Items:
    """The items of `task`, in this process; `config` are the task's own settings. Raises what the package raises."""

    def __init__(self, task: str, config: dict[str, Any]):
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

        read_as_data(dataset_class for dataset_class, _ in DATASETS.values())  # of all: "composite" is made of others
        self.size = _size(task, config)
        self._dataset = reasoning_gym.create_dataset(task, size=self.size, seed=0, **_own_types(task, config))
        self._entry = lru_cache(maxsize=256)(self._dataset.__getitem__)  # may not be JSON-able: made again to score

    def text(self, item: int) -> tuple[str, str]:
        """Returns the question of an item and an answer."""
        entry = self._entry(item)
        return str(entry["question"]), str(entry["answer"])

    def marks(self, item: int, answer: str) -> float:
        """Returns what the task's scorer gives for an answer."""
        return float(self._dataset.score_answer(answer=answer, entry=self._entry(item)))


class RemoteItems:
    """`Items` in a process of their own, started when it is first asked. It ends with this one, whose end closes its input."""

    def __init__(self, task: str, config: dict[str, Any]):
        self.size = _size(task, config)
        self._about = [task, config]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def text(self, item: int) -> tuple[str, str]:
        question, answer = self._ask("text", item)
        return question, answer

    def marks(self, item: int, answer: str) -> float:
        return self._ask("marks", item, answer)

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._process = self._start()
                self._exchange(self._about)
            return self._exchange(request)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | HASHES,
            start_new_session=True,  # signals to this process's group are not for it
        )
        weakref.finalize(self, _end, process)
        return process

    def _exchange(self, request: Any) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process = None  # another try starts another one
            raise RuntimeError(f"the process that makes the items of reasoning-gym:{self._about[0]} has ended")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # closes the pipes, and waits


def open_items(task: str, config: dict[str, Any]) -> Items | RemoteItems:
    """Returns the items of a task. Raises what the package raises for settings that it does not take."""
    here = Items(task, config)
    return RemoteItems(task, config) if sys.flags.hash_randomization else here


def serve() -> None:
    """Answers on standard output, line by line, until standard input ends: first for the task, then for its items."""
    ignore_in_worker()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    items: Items | None = None
    for line in sys.stdin:
        what, *rest = json.loads(line)
        try:
            if items is None:
                items, result = Items(what, *rest), None
            else:
                result = items.text(*rest) if what == "text" else items.marks(*rest)
            reply = {"result": result}
        except Exception as error:  # the package's own, told where it was asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
