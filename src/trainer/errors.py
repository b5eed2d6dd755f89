"""Every error that this package raises on purpose.

    TrainerError
    ├── ConfigError            a config file, flag or combination is wrong (exit code 2)
    ├── LaunchError            the environment is wrong: ranks, devices, run directory, disk space
    ├── DataError              a source, row, template or batch is wrong
    ├── ModelError             model files, names, shapes or an unsupported architecture
    ├── CheckpointError        a checkpoint cannot be written, chosen or read
    │   ├── IncompleteCheckpoint   no manifest: it was never committed
    │   ├── CorruptCheckpoint      a file is missing, truncated or has another checksum
    │   └── CheckpointMismatch     a sound checkpoint that does not fit this run
    └── TrainingError          training cannot go on (non-finite loss, a save that failed, ...)

A message says what failed, where (file, key, rank), what was expected and found, and what to do. The command line
prints the message alone (of an ``OSError`` nobody expected, the file and the reason); a traceback is shown for everything
else. The log of a run has both.
"""


class TrainerError(Exception):
    """Base of all errors below. ``exit_code`` is what the command line exits with."""

    exit_code = 1


class ConfigError(TrainerError):
    exit_code = 2


class LaunchError(TrainerError):
    pass


class DataError(TrainerError):
    pass


class ModelError(TrainerError):
    pass


class CheckpointError(TrainerError):
    pass


class IncompleteCheckpoint(CheckpointError):
    pass


class CorruptCheckpoint(CheckpointError):
    pass


class CheckpointMismatch(CheckpointError):
    pass


class TrainingError(TrainerError):
    pass


def first_line(error: BaseException) -> str:
    """Returns how an error of a library is told: its first line, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
