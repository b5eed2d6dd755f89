"""One logger for the whole package: short lines on standard error, everything in a file per rank.

    from trainer.core.log import logger, setup_logging

    setup_logging("info", run_dir / "logs", rank=0)
    logger.info("hello")

The console shows rank 0 at the chosen level and errors of every rank. ``logs/rank_<r>.log`` gets debug and above and is
appended to, so a resumed run goes on in the same file. Messages of ``logging`` and ``warnings`` (torch, transformers,
datasets, ...) take the same two ways.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from trainer.errors import LaunchError

__all__ = ["file_only", "logger", "setup_logging"]

file_only = logger.bind(file_only=True)
"""A logger whose messages are kept off the console."""

# Libraries that stop their records from reaching the root logger and print them through a handler of their own.
_LIBRARIES = ("transformers", "datasets", "huggingface_hub", "torch", "torch.distributed", "torch._dynamo")
_FILE_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <7} {name}:{line}  {message}"


def setup_logging(level: str = "info", log_dir: Path | str | None = None, rank: int = 0) -> None:
    """Route every message of this process; calling it again replaces the earlier routes.

    ``level`` is the least severe one shown by rank 0 (debug, info, warning, error). Without ``log_dir`` there is no
    file. Raises ``LaunchError`` if the file cannot be opened.
    """
    logger.remove()
    logger.add(
        _write_to_stderr,
        level=level.upper() if rank == 0 else "ERROR",
        format=_console_format(rank),
        filter=lambda record: not record["extra"].get("file_only"),
        colorize=sys.stderr is not None and sys.stderr.isatty(),
        backtrace=False,
        diagnose=False,  # never print the values of variables: they can be whole tensors
    )
    if log_dir is not None:
        path = Path(log_dir) / f"rank_{rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            logger.add(_LogFile(path), level="DEBUG", format=_FILE_FORMAT, diagnose=False)
        except OSError as error:
            raise LaunchError(f"cannot open the log file {path}: {error.strerror}; is output_dir writable?") from error
    _route_standard_logging()
    _route_warnings()


def _console_format(rank: int) -> str:
    who = "" if rank == 0 else f"[rank {rank}] "
    return "<dim>{time:HH:mm:ss}</dim> <level>{level: <7}</level> " + who + "{message}"


def _write_to_stderr(message: str) -> None:
    # sys.stderr is looked up for every message: a live progress bar replaces it by a stream that prints above the bar.
    if sys.stderr is not None:
        sys.stderr.write(message)
        sys.stderr.flush()


class _LogFile:
    """Appends to a file. Where it cannot, because the disk is full, it says so once: a run does not end for its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._failed = False

    def write(self, message: str) -> None:
        self._guarded(lambda: self._file.write(message))

    def stop(self) -> None:
        """Loguru calls this when the route is taken away."""
        self._guarded(self._file.close)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._failed:
                self._failed = True
                _write_to_stderr(f"WARNING lines are missing in {self._path}: {error.strerror}\n")


class _ToLoguru(logging.Handler):
    """Passes records of the standard ``logging`` on, at the same level, under the library's name."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "routed", False):  # some libraries pass their records on to the root logger as well
            return
        record.routed = True
        self._remove_siblings(record)
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        where = logger.patch(
            lambda target: target.update(name=record.name, line=record.lineno, function=record.funcName)
        )
        where.opt(exception=record.exc_info).log(level, record.getMessage())

    def _remove_siblings(self, record: logging.LogRecord) -> None:
        # A library adds its own stream handler when it is imported, after this one. It would print the message a second
        # time, through the progress bar; this handler runs first, so it takes the other away before that happens.
        for name in _LIBRARIES:
            if record.name == name or record.name.startswith(name + "."):
                owner = logging.getLogger(name)
                for handler in owner.handlers[:]:
                    if type(handler) is not _ToLoguru and not isinstance(handler, logging.FileHandler):
                        owner.removeHandler(handler)


def _route_standard_logging() -> None:
    root = logging.getLogger()
    for owner in (root, *(logging.getLogger(name) for name in _LIBRARIES)):
        for handler in owner.handlers[:]:
            if type(handler) is _ToLoguru:
                owner.removeHandler(handler)
    root.addHandler(_ToLoguru(level=logging.WARNING))
    for name in _LIBRARIES:
        owner = logging.getLogger(name)
        owner.handlers.insert(0, _ToLoguru(level=logging.WARNING))
        owner.propagate = False


def _route_warnings() -> None:
    """Warnings go to the log; those for developers (deprecations) to the file alone."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        for_developers = issubclass(category, DeprecationWarning | PendingDeprecationWarning | FutureWarning)
        out = file_only if for_developers else logger
        out.opt(depth=2).warning("{}: {} ({}:{})", category.__name__, message, filename, lineno)

    warnings.showwarning = show
