"""The standard streams as users leave them: closed, on a full disk, without a reader, in a code that lacks a letter."""

import os
import sys

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


def is_of_stdout(error: OSError) -> bool:
    """Whether it is standard output that cannot be written: then a second attempt fails in the same way."""
    try:
        sys.stdout.flush()
    except OSError as again:
        return again.errno == error.errno
    return False


def give_up_stdout(error: OSError) -> int:
    """Drops what is still to be printed, and says so unless the reader has gone by itself. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    print(f"error: standard output cannot be written: {error.strerror}; send it elsewhere", file=sys.stderr)
    return 1
