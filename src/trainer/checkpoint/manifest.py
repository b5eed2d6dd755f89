"""`manifest.json`: what makes a directory a checkpoint, and what one must know before reading it.

It is written last and removed first. It carries the size and checksum of every other file, and its own checksum, taken
over its bytes with the checksum's digits as zeros.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.checkpoint.leaves import MAX_DEPTH, check_depth
from trainer.checkpoint.paths import MANIFEST, MissingFile, check_plain_name, open_inside, os_errors, read_inside
from trainer.core.files import FileRecord, xxh3, xxh3_bytes
from trainer.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

MANIFEST_FORMAT = 1
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True)
class Manifest:
    step: int
    """Optimizer updates done."""
    files: Mapping[str, FileRecord]
    """Every other file of the directory: plain name -> size and xxh3-64."""
    micro_step: int = 0
    """Micro-steps done of the accumulation cycle; 0 = at a boundary."""
    pending: Mapping[str, Any] | None = None
    """What is beside the state of the boundary: a cycle's gradients, or a row of metrics. None = nothing (JSON)."""
    resumable: bool = True
    reason: str = ""
    """Why not, where it is not resumable."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured at this step, such as val_loss."""
    world_size: int = 1
    """Ranks that wrote it; any number may read it."""
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of each dtype."""
    parent: Mapping[str, Any] | None = None
    """The checkpoint of another run that this run was forked from: path, step, checksum."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What the run says about itself: config, fingerprints, mesh, ... (JSON)."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC, ISO 8601."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the trainer and of torch."""
    format: int = MANIFEST_FORMAT
    checksum: str = _NO_CHECKSUM
    """xxh3-64 of the manifest itself."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size_bytes for record in self.files.values())


def dump_manifest(manifest: Manifest) -> bytes:
    """Returns the file's bytes, with the checksum filled in.

    Raises:
        CheckpointError: the run's own entries are not JSON.
    """
    # The checksum goes first, so that its digits are found at the first match whatever the run's entries hold.
    body = {"checksum": _NO_CHECKSUM, **{k: v for k, v in asdict(manifest).items() if k != "checksum"}}
    try:
        text = json.dumps(body, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the run's description cannot be written to {MANIFEST}: {error}") from error
    return text.replace(_NO_CHECKSUM, xxh3_bytes(text.encode()), 1).encode()


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Returns the manifest in `data`.

    Raises:
        CorruptCheckpoint: it is malformed or its checksum differs.
        CheckpointError: it was written by a newer version of this trainer.
    """
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise TypeError("not a table")
        if isinstance(body.get("format"), int) and body["format"] > MANIFEST_FORMAT:
            raise CheckpointError(
                f"{where} has format {body['format']}, this version reads up to {MANIFEST_FORMAT}; use a newer trainer"
            )
        checksum = str(body["checksum"])
        found = xxh3_bytes(data.replace(checksum.encode(), _NO_CHECKSUM.encode(), 1))
        if checksum != found:
            raise ValueError(f"it says checksum {checksum}, its bytes have {found}")
        files = {
            check_plain_name(name, where): FileRecord(int(record["size_bytes"]), str(record["xxh3"]))
            for name, record in body["files"].items()
        }
        if data.count(b"{") + data.count(b"[") > MAX_DEPTH:  # else it cannot be that deep: most need no walk
            check_depth(body, where)
        return _checked(Manifest(**{**body, "files": files}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from error


def _checked(manifest: Manifest) -> Manifest:
    """Returns it if its entries have the types that everybody relies on; raises TypeError naming the first."""
    counts = {"step": manifest.step, "micro_step": manifest.micro_step, "world_size": manifest.world_size}
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise TypeError(f"{name} is {value!r}, no count")
    tables = {"run": manifest.run, "versions": manifest.versions, "dtypes": manifest.dtypes}
    for name, value in {**tables, "parent": manifest.parent or {}, "pending": manifest.pending or {}}.items():
        if not isinstance(value, dict):
            raise TypeError(f"{name} is {value!r}, no table")
    numbers: Any = manifest.metrics.values() if isinstance(manifest.metrics, dict) else [manifest.metrics]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
        raise TypeError(f"metrics is {manifest.metrics!r}, no table of numbers")
    texts = {"reason": manifest.reason, "created": manifest.created}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, no text")
    if type(manifest.resumable) is not bool:
        raise TypeError(f"resumable is {manifest.resumable!r}, neither true nor false")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Reads `manifest.json` of a checkpoint directory.

    Raises:
        IncompleteCheckpoint: there is none: this is no committed checkpoint.
        CorruptCheckpoint, CheckpointError: as `parse_manifest`.
    """
    try:
        data = read_inside(directory, MANIFEST)
    except MissingFile as error:
        raise IncompleteCheckpoint(f"{directory} has no {MANIFEST}: it is no committed checkpoint") from error
    return parse_manifest(data, os.path.join(directory, MANIFEST))


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Checks that every file is there, is a regular file, and has its size; reads no data.

    Raises:
        CorruptCheckpoint: the first file that is not so.
    """
    for name, record in manifest.files.items():
        path = os.path.join(directory, name)
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else error.strerror
            raise CorruptCheckpoint(f"{path} {reason}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{path} is not a regular file")
        if status.st_size != record.size_bytes:
            raise CorruptCheckpoint(f"{path} has {status.st_size} bytes, expected {record.size_bytes}")


def check_bytes(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads the files `names` whole and compares their checksums.

    Raises:
        CorruptCheckpoint: the first file that differs.
    """
    for name in names:
        fd = open_inside(directory, name)
        try:
            with os_errors(f"cannot read {directory / name}"):
                found = xxh3(fd)
        finally:
            os.close(fd)
        if found != manifest.files[name].xxh3:
            expected = manifest.files[name].xxh3
            raise CorruptCheckpoint(f"{directory / name} has checksum {found}, expected {expected}: its bytes changed")
