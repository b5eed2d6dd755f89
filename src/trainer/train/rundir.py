"""The run directory: config.toml, run.json, metrics.jsonl, logs/, checkpoints/, weights/, plots/."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.paths import MANIFEST, step_of
from trainer.config.dump import dump_toml
from trainer.config.rules import is_fork
from trainer.config.run import RunConfig
from trainer.core.distributed import on_main
from trainer.core.files import write_atomic
from trainer.core.lock import DirectoryLock
from trainer.errors import LaunchError

IDENTITY = "run.json"
"""File that holds the run's id; whoever finds it knows that the directory is a run's."""


def is_used(run_dir: Path) -> bool:
    """Whether a run has left rows or checkpoints here; one that ended before its first step can simply be started again."""
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


@contextmanager
def opened(config: RunConfig) -> Iterator[Path]:
    """Yields the directory of a run, made and held by rank 0 while the block runs; collective.

    Raises:
        LaunchError: on every rank; a fresh run or a fork would write into another run's directory or replace files that
            no run wrote, another process trains in it, or it cannot be made.
    """
    lock = DirectoryLock()
    try:
        yield on_main(_prepare, config, lock)
    finally:
        lock.release()


def _prepare(config: RunConfig, lock: DirectoryLock) -> Path:
    run_dir = Path(config.output_dir)
    try:
        _refuse_a_checkpoint(run_dir)
        _refuse_another_run(config, run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        _hold(lock, run_dir)
        _refuse_another_run(config, run_dir)  # it may have come while this process waited
        _refuse_what_is_no_run(run_dir)
        if _is_another_run(config, run_dir):
            _move_aside(run_dir, lock)
        for folder in (run_dir / "checkpoints", run_dir / "logs"):
            folder.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        file = getattr(error, "filename", None)
        where = f" ({file})" if file is not None and Path(file) != run_dir else ""
        raise LaunchError(
            f"cannot make the run directory {str(run_dir)[:300]}: {reason}{where[:300]}; choose another --output-dir"
        ) from error
    return run_dir


def _is_another_run(config: RunConfig, run_dir: Path) -> bool:
    return is_used(run_dir) and (config.resume is None or is_fork(config))


def _refuse_another_run(config: RunConfig, run_dir: Path) -> None:
    if not config.overwrite and _is_another_run(config, run_dir):
        raise LaunchError(
            f"{run_dir} already holds a run. Continue it with --resume, move it aside with --overwrite, "
            f"or choose another --output-dir"
        )


def _refuse_a_checkpoint(run_dir: Path) -> None:
    """A run within a checkpoint would be removed with it."""
    inside = run_dir.resolve()
    for place in (inside, *inside.parents):
        step = step_of(place.name)
        if step is not None and (place / MANIFEST).exists():
            raise LaunchError(
                f"{run_dir} lies in a checkpoint, {place}, and would go with it when that is not kept any more; to go on from it "
                f"give its run's directory as --output-dir, with --resume.step {step}, or --resume.dir {place} and another "
                "--output-dir"
            )


def _refuse_what_is_no_run(run_dir: Path) -> None:
    """A run replaces its config.toml and its weights/; in a directory that no run has used they are somebody's own."""
    if is_used(run_dir) or (run_dir / IDENTITY).exists():
        return
    for name in ("config.toml", "weights"):
        if (run_dir / name).exists():
            raise LaunchError(
                f"{run_dir} holds {name}, which no run has written and this one would replace; choose another --output-dir, "
                "or move it away"
            )


def _hold(lock: DirectoryLock, run_dir: Path) -> None:
    holder = lock.acquire(run_dir)
    if holder is not None:
        raise LaunchError(
            f"{run_dir} is in use by {holder}: two processes must not write to one run. End that one, or choose another "
            "--output-dir"
        )


def _move_aside(run_dir: Path, lock: DirectoryLock) -> None:
    """Gives the directory another name, and makes and holds a new one in its place."""
    aside = _free_name(run_dir)
    run_dir.rename(aside)
    lock.moved(aside)
    run_dir.mkdir(exist_ok=True)
    _hold(lock, run_dir)


def _free_name(run_dir: Path) -> Path:
    number = 1
    while (candidate := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    return candidate


def write_identity(config: RunConfig, origins: Mapping[str, str], run_dir: Path) -> str:
    """Writes config.toml and returns the id of the run in this directory, made once and kept over all resumes.

    Call on one rank.

    Raises:
        LaunchError: a file cannot be written, or run.json is damaged.
    """
    path = run_dir / IDENTITY
    try:
        if not path.exists():  # before everything else that a run replaces
            write_atomic(path, (json.dumps({"run_id": secrets.token_hex(4)}) + "\n").encode())
        write_atomic(run_dir / "config.toml", dump_toml(config, origins).encode())
        run_id = json.loads(path.read_text())["run_id"]
    except OSError as error:
        raise LaunchError(
            f"cannot write to the run directory {run_dir}: {error.strerror} ({error.filename})"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{path} is damaged ({error!r}): it holds the run's id. Remove it, and the run gets a new one (a new run in W&B)"
        ) from error
    if not isinstance(run_id, str):
        raise LaunchError(f"{path} is damaged: run_id is {run_id!r}, no text; remove it, and the run gets a new one")
    return run_id
