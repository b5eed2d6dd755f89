"""What an offline W&B run has on disk: which steps it holds, and cutting off those that a resume repeats.

W&B writes each process of an offline run to a transaction log of its own, ``offline-run-<time>-<id>/run-<id>.wandb``,
and flushes it every 15 seconds only: a killed process leaves a log without its last steps, but perhaps with steps past
the last checkpoint. ``wandb sync`` uploads the logs of one id in the order of their start, and the server refuses a step
that does not grow. So before a resume each log is cut where a kill right after the resumed step would have ended it, and
the caller logs again what never reached the disk.

The format is LevelDB's log: 7 bytes of file header, then 32 KiB blocks of chunks (crc32, length, type), each record (a
protocol buffer of W&B's own) in one chunk or in a first, middle and last one.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = struct.Struct("<4sHB")
_CHUNK_HEADER = struct.Struct("<IHB")
_BLOCK_BYTES = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def cut_offline_history(wandb_dir: Path, run_id: str, keep_through: int) -> int:
    """Cut the steps past ``keep_through`` off the run's logs; logs that were uploaded already stay as they are.

    Returns the last step that the logs hold after that, -1 if none. Raises ``ValueError`` for a file of another format.
    """
    last_step = -1
    for path in offline_logs(wandb_dir, run_id):
        uploaded = path.with_name(path.name + ".synced").exists()
        for offset, step in history_steps(path):
            if step > keep_through and not uploaded:
                os.truncate(path, offset)
                break
            last_step = max(last_step, step)
    return last_step


def offline_logs(wandb_dir: Path, run_id: str) -> list[Path]:
    """The run's transaction logs, in the order of their start."""
    return sorted(wandb_dir.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def history_steps(path: Path) -> Iterator[tuple[int, int]]:
    """(byte offset, step) of every row of history in the log; ends at the first record that a kill cut short."""
    for offset, record in records(path):
        if record.WhichOneof("record_type") == "history":
            yield offset, record.history.step.num


def records(path: Path) -> Iterator[tuple[int, Any]]:
    """(byte offset, ``wandb_internal_pb2.Record``) of every whole record. Raises ``ValueError`` for another format."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if len(data) < _FILE_HEADER.size:
        return
    if _FILE_HEADER.unpack_from(data) != (b":W&B", 0xBEE1, 0):
        raise ValueError(f"{path} is not a W&B transaction log of version 0")
    start, payload = 0, b""
    for offset, kind, chunk in _chunks(data):
        if kind in (_FULL, _FIRST):
            start, payload = offset, b""
        payload += chunk
        if kind in (_FULL, _LAST):
            yield start, wandb_internal_pb2.Record.FromString(payload)  # pyright: ignore[reportAttributeAccessIssue]


def _chunks(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(offset, type, payload) of every whole chunk with a right checksum, up to the first that is not."""
    offset = _FILE_HEADER.size
    while offset + _CHUNK_HEADER.size <= len(data):
        if (left := _BLOCK_BYTES - offset % _BLOCK_BYTES) < _CHUNK_HEADER.size:
            offset += left  # a header never spans two blocks
            continue
        crc, length, kind = _CHUNK_HEADER.unpack_from(data, offset)
        begin = offset + _CHUNK_HEADER.size
        chunk = data[begin : begin + length]
        if not _FULL <= kind <= _LAST or len(chunk) < length or zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != crc:
            return
        yield offset, kind, chunk
        offset = begin + length
