"""JSON-lines files that stay one series of increasing steps through kills and resumes.

``StepFile`` is the writer behind ``metrics.jsonl`` and ``samples.jsonl``; ``RunEvents`` (``events.jsonl``) notes every
start and end of a process, which is what tells resumes apart. Nothing here imports torch.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from trainer.core.files import write_atomic
from trainer.core.log import logger
from trainer.errors import DataError, TrainingError

Row = dict[str, Any]
T = TypeVar("T")

# JSON has no NaN or infinities. The strings keep what was seen, and Python's float() reads each of them back.
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)

_NO_ROW = (ValueError, TypeError, RecursionError)  # what `decode_row` raises


def encode_row(row: Row) -> str:
    """One line of strict JSON, floats in their shortest exact form; NaN and infinities become strings."""
    return _ENCODER.encode({key: _to_json(value) for key, value in row.items()})


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def decode_row(line: str | bytes) -> Row:
    """The row that ``encode_row`` was given. Raises ``ValueError`` for a line that is not JSON, ``TypeError`` for
    JSON that is not an object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("not a JSON object")
    return {key: _NONFINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()}


def read_rows(path: Path) -> list[Row]:
    """All rows of the file in order. A last line torn by a kill is left out.

    Raises ``DataError`` naming file and line for any other line that is not a row, or if the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(decode_row(line))
        except _NO_ROW as error:
            if number == len(lines):  # no newline after it: the process died while writing
                break
            raise DataError(f"{path}:{number} is not a JSON row ({error}); remove the line to go on") from error
    return rows


class RunEvents:
    """``events.jsonl``: one line for every process that trained in this run directory.

    ``{"event": "start", "generation": 1, "step": 200, "fresh": false, ...}`` and, unless the process was killed,
    ``{"event": "end", "generation": 1, "step": 220, "status": "finished", ...}``. The generation counts the starts, from 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        starts = [row for row in _readable_rows(path) if row.get("event") == "start" and type(row.get("step")) is int]
        # A fresh start writes step 0 as well (validation before the first step), so it begins after step -1.
        self._begins = [-1 if row.get("fresh") else row["step"] for row in starts]
        self.generation = len(self._begins)

    def generation_of(self, step: int) -> int:
        """The start that wrote the row of ``step``: the latest one that began before it (later ones superseded it)."""
        for generation in range(self.generation - 1, -1, -1):
            if self._begins[generation] < step:
                return generation
        return 0

    def start(self, step: int, *, fresh: bool) -> None:
        self._append({"event": "start", "generation": self.generation, "step": step, "fresh": fresh})

    def end(self, step: int, *, failed: bool) -> None:
        status = "failed" if failed else "finished"
        self._append({"event": "end", "generation": self.generation, "step": step, "status": status})

    def _append(self, row: Row) -> None:
        stamp = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "pid": os.getpid()}
        with _opened(self.path) as file:
            _write_line(file, encode_row(row | stamp | {"host": socket.gethostname()}), self.path)


class StepFile:
    """Appends one JSON line per step to ``path``; every line is handed to the system before ``write`` returns.

    Opening it keeps the rows up to ``keep_through`` (-1: none) and moves the later ones, written by a process whose
    steps are about to be repeated, to ``<name>.superseded.jsonl`` with the generation that wrote them.
    """

    def __init__(self, path: Path, *, keep_through: int, generation_of: Callable[[int], int]) -> None:
        self.path = path
        self.superseded_path = path.with_suffix(f".superseded{path.suffix}")
        self.last_step: int | None = None
        _guarded(path, lambda: self._supersede(keep_through, generation_of))
        self._file = _opened(path)

    def write(self, row: Row) -> None:
        """Append the row. Raises ``ValueError`` if its step does not follow the last one, ``TrainingError`` if the
        file cannot be written."""
        step = row["step"]
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} was logged after step {self.last_step}")
        _write_line(self._file, encode_row(row), self.path)
        self.last_step = step

    def sync(self) -> None:
        """Make all rows durable, so that a checkpoint committed after this never has fewer rows than steps."""
        _guarded(self.path, lambda: os.fsync(self._file.fileno()))

    def close(self) -> None:
        _guarded(self.path, self._file.close)

    def _supersede(self, keep_through: int, generation_of: Callable[[int], int]) -> None:
        if not self.path.exists():
            self.path.touch()
            return
        data = self.path.read_bytes()
        kept: list[bytes] = []
        moved: list[Row] = []
        for line in data.splitlines(keepends=True):
            row = self._parse(line)
            if row is None:
                continue
            step = row["step"]
            if step <= keep_through and (self.last_step is None or step > self.last_step):
                kept.append(line.rstrip(b"\r\n") + b"\n")
                self.last_step = step
            else:
                moved.append(row | {"generation": generation_of(step)})
        self._append_superseded(moved)  # first: a kill between the two leaves the rows in both files, never in none
        if (kept_data := b"".join(kept)) != data:
            write_atomic(self.path, kept_data)
        if moved:
            first, last = moved[0]["step"], moved[-1]["step"]
            logger.info("{}: steps {} to {} moved to {}", self.path.name, first, last, self.superseded_path.name)

    def _parse(self, line: bytes) -> Row | None:
        try:
            row = decode_row(line)
            row["step"] = int(row["step"])
        except (*_NO_ROW, KeyError, OverflowError):
            if line.strip(b"\x00\r\n "):
                logger.warning("{}: dropped a line cut short by a kill: {!r}", self.path, line[:80])
            return None
        return row

    def _append_superseded(self, moved: list[Row]) -> None:
        if not moved:
            return
        already = {(row.get("generation"), row.get("step")) for row in _readable_rows(self.superseded_path)}
        with _opened(self.superseded_path) as file:
            for row in moved:
                if (row["generation"], row["step"]) not in already:
                    file.write(encode_row(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _readable_rows(path: Path) -> Iterator[Row]:
    """Rows of a file that other processes may have been killed over: lines that are not rows are passed by."""
    if not path.exists():
        return
    for line in _guarded(path, path.read_bytes).split(b"\n"):
        try:
            yield decode_row(line)
        except _NO_ROW:
            continue


def _opened(path: Path) -> TextIO:
    """The file, open for appending at the start of a line."""
    return _guarded(path, lambda: _open_for_append(path))


def _open_for_append(path: Path) -> TextIO:
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # ends a line torn by a kill
    return path.open("a", encoding="utf-8", newline="\n")


def _write_line(file: TextIO, line: str, path: Path) -> None:
    def write() -> None:
        file.write(line + "\n")
        file.flush()

    _guarded(path, write)


def _guarded(path: Path, action: Callable[[], T]) -> T:
    """The result of ``action``, its ``OSError`` turned into a ``TrainingError`` that names the file."""
    try:
        return action()
    except OSError as error:
        raise TrainingError(
            f"cannot write {path}: {error.strerror or error}. The metrics are part of the run, so it stops here; "
            "make room (or make the directory writable) and resume with --resume"
        ) from error
