"""The run directory: config.toml, run.json, metrics.jsonl, logs/, checkpoints/, weights/, plots/."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from trainer.config.dump import dump_toml
from trainer.config.rules import is_fork
from trainer.config.run import RunConfig
from trainer.core.files import write_atomic
from trainer.errors import LaunchError


def is_used(run_dir: Path) -> bool:
    """Whether a run has written here before."""
    checkpoints = run_dir / "checkpoints"
    return (run_dir / "metrics.jsonl").exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def prepare(config: RunConfig) -> Path:
    """Makes the directory of a run and returns it. Call on one rank.

    Raises:
        LaunchError: a fresh run or a fork would write into another run's directory, or it cannot be made.
    """
    run_dir = Path(config.output_dir)
    try:
        if is_used(run_dir) and (config.resume is None or is_fork(config)):
            if not config.overwrite:
                raise LaunchError(
                    f"{run_dir} already holds a run. Continue it with --resume, move it aside with --overwrite, "
                    f"or choose another --output-dir"
                )
            run_dir.rename(_free_name(run_dir))
        for folder in (run_dir, run_dir / "checkpoints", run_dir / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot make the run directory {run_dir}: {reason}; choose another --output-dir") from error
    return run_dir


def _free_name(run_dir: Path) -> Path:
    number = 1
    while (candidate := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    return candidate


def write_identity(config: RunConfig, origins: Mapping[str, str], run_dir: Path) -> str:
    """Writes config.toml and returns the id of the run in this directory, made once and kept over all resumes.

    Call on one rank.
    """
    write_atomic(run_dir / "config.toml", dump_toml(config, origins).encode())
    path = run_dir / "run.json"
    if path.exists():
        return json.loads(path.read_text())["run_id"]
    identity = {"run_id": secrets.token_hex(4)}
    write_atomic(path, (json.dumps(identity) + "\n").encode())
    return identity["run_id"]
