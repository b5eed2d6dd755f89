"""The standard streams as users leave them: closed, on a full disk, without a reader, in a code that lacks a letter."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READER_GONE = 141
"""Exit code where the reader of a pipe, such as `head`, has seen enough: 128 + SIGPIPE, as of any program."""


def prepare() -> None:
    """Gives closed streams to /dev/null, and lets no letter fail that the terminal's code does not have.

    The next file that is opened would take the number of a closed stream, and whatever is meant for the terminal would be
    written into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]


class OutputLost(Exception):
    """Standard output cannot be written. Told apart from every other OSError: a broken pipe may be a loader process's."""

    def __init__(self, error: OSError):
        super().__init__(str(error))
        self.error = error


class _Output:
    """Standard output, but for the kind of its errors."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputLost(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watched_output() -> Iterator[None]:
    """Inside, what cannot be printed is an OutputLost; at the end all is printed."""
    stream = sys.stdout
    sys.stdout = _Output(stream)
    try:
        yield
        sys.stdout.flush()  # at exit Python would only grumble about it
    finally:
        sys.stdout = stream


def give_up_output(lost: OutputLost) -> int:
    """Drops what is still to be printed, and says so unless the reader has gone by itself. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(lost.error, BrokenPipeError):
        return READER_GONE
    print(f"error: standard output cannot be written: {lost.error.strerror}; send it elsewhere", file=sys.stderr)
    return 1
