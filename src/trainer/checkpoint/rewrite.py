"""A copy of a checkpoint with other entries: the tensors keep their bytes, the JSON document is another one.

Needs neither torch nor numpy: files are copied a few megabytes at a time, whatever their size.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.layout import Chunk, Layout, TensorLayout, dump_layout, entry_name, safetensors_header
from trainer.checkpoint.leaves import dump_leaves
from trainer.checkpoint.manifest import Manifest, dump_manifest
from trainer.checkpoint.paths import MANIFEST, METADATA, open_inside, os_errors, read_exactly, step_name
from trainer.checkpoint.tables import JSON_TENSOR
from trainer.core import files
from trainer.core.files import DurableFile, FileRecord
from trainer.core.log import logger
from trainer.errors import CheckpointError

COPY_BYTES = 8 << 20


def write_copy(
    source: Path, layout: Layout, leaves: Mapping[str, Any], manifest: Manifest, checkpoints: Path
) -> tuple[Path, Manifest]:
    """Writes ``<checkpoints>/step_NNNNNNNN`` with the tensors of `source` and other `leaves`; returns it once durable.

    manifest: that of the copy, but for its files; its step is the copy's.

    Raises:
        CheckpointError: the step is there already, or something cannot be written; what was begun is removed.
    """
    final = checkpoints / step_name(manifest.step)
    if os.path.lexists(final):
        raise CheckpointError(f"{final} exists; give a directory that has no such step")
    temporary = checkpoints / f"{final.name}.tmp-{secrets.token_hex(4)}"
    with os_errors(f"cannot write {final}"):
        files.make_dirs(checkpoints)
        files.make_dir(temporary)
        try:
            records = _copy_files(source, layout, dump_leaves(leaves), temporary)
            manifest = replace(manifest, files=records)
            files.fsync_dir(temporary)
            files.write_new(temporary / MANIFEST, dump_manifest(manifest))
            files.fsync_dir(temporary)
            files.rename(temporary, final)
        except BaseException:
            _discard(temporary if temporary.exists() else final)  # the rename may have been done, and its sync not
            raise
    return final, manifest


def _discard(path: Path) -> None:
    """Removes what was begun; the failure that led here is the one to be raised."""
    try:
        files.remove_tree(path, MANIFEST)
    except OSError as error:
        logger.warning(f"{path} could not be removed ({error.strerror}); remove it by hand")


def _copy_files(source: Path, layout: Layout, document: bytes, target: Path) -> dict[str, FileRecord]:
    """Copies every shard; the one that holds the document is laid out anew. Returns the records of all files."""
    (json_chunk,) = layout[JSON_TENSOR].chunks
    by_file: dict[str, list[tuple[str, Chunk]]] = {}
    for name, tensor in layout.items():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, []).append((name, chunk))
    records, moved = {}, dict(layout)
    for file, entries in sorted(by_file.items()):
        if file != json_chunk.file:
            records[file] = _copy_whole(source, file, target)
            continue
        records[file], starts = _copy_with_document(source, layout, file, entries, document, target)
        for (name, old), new in starts.items():
            chunks = tuple(new if chunk == old else chunk for chunk in moved[name].chunks)
            shape = new.sizes if name == JSON_TENSOR else moved[name].shape
            moved[name] = TensorLayout(moved[name].dtype, shape, chunks)
    records[METADATA] = files.write_new(target / METADATA, dump_layout(moved))
    return records


def _copy_whole(source: Path, name: str, target: Path) -> FileRecord:
    fd = open_inside(source, name)
    with open(fd, "rb", buffering=0), DurableFile(target / name) as file:
        _copy_range(fd, 0, os.fstat(fd).st_size, source / name, file.write)
        return file.finish()


def _copy_with_document(
    source: Path, layout: Layout, name: str, entries: list[tuple[str, Chunk]], document: bytes, target: Path
) -> tuple[FileRecord, dict[tuple[str, Chunk], Chunk]]:
    """Returns the file's record and where each of its chunks went."""
    entries = sorted(entries, key=lambda entry: (entry[0] == JSON_TENSOR, entry[1].start))  # bytes last: stays aligned
    header, starts = safetensors_header(
        [
            (JSON_TENSOR, "U8", (len(document),))
            if tensor == JSON_TENSOR
            else (
                entry_name(tensor, chunk.offsets, whole=chunk.sizes == layout[tensor].shape),
                layout[tensor].dtype,
                chunk.sizes,
            )
            for tensor, chunk in entries
        ]
    )
    moved = {}
    fd = open_inside(source, name)
    with open(fd, "rb", buffering=0), DurableFile(target / name) as file:
        file.write(header)
        for (tensor, chunk), start in zip(entries, starts, strict=True):
            if tensor == JSON_TENSOR:
                file.write(document)
                moved[tensor, chunk] = Chunk((0,), (len(document),), name, start, len(document))
            else:
                _copy_range(fd, chunk.start, chunk.size_bytes, source / name, file.write)
                moved[tensor, chunk] = replace(chunk, start=start)
        return file.finish(), moved


def _copy_range(fd: int, start: int, size_bytes: int, path: Path, write: Callable[[memoryview], None]) -> None:
    buffer = memoryview(bytearray(min(COPY_BYTES, size_bytes)))
    done = 0
    while done < size_bytes:
        piece = buffer[: min(len(buffer), size_bytes - done)]
        read_exactly(fd, piece, start + done, path)
        write(piece)
        done += len(piece)
