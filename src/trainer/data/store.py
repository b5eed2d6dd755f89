"""Tokenized documents of one source on disk: flat arrays that are memory-mapped, never loaded.

A store is a directory named after everything its tokens depend on::

    <cache_dir>/tokens/<key>/
      ids.bin         int32 [tokens]      token ids of all documents, one after the other
      mask.bin        uint8 [tokens]      1 = supervised
      lengths.bin     int64 [documents]   tokens of each document
      rows.bin        int64 [documents]   row number in the source
      supervised.bin  int64 [documents]   supervised tokens of each document that can be targets (not its first token)
      meta.json       counts and checksums

It is written under a temporary name, synced and renamed, so it is there as a whole or not at all.
"""

import json
import os
import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from trainer.core.files import DurableFile, fsync_dir, make_dirs, rename, write_new, xxh3_bytes
from trainer.core.lock import try_flock

STORE_VERSION = 2  # part of every key: raise it whenever rows are tokenized or stored differently
_ARRAYS = {"ids": np.int32, "mask": np.uint8, "lengths": np.int64, "rows": np.int64, "supervised": np.int64}


@dataclass(frozen=True)
class StoreMeta:
    """What is known about a store without reading its arrays."""

    source: str
    """Name of the source when it was tokenized, for messages."""
    documents: int
    tokens: int
    supervised_tokens: int
    bad_rows: int
    bad_examples: tuple[tuple[int, str], ...]
    """The first bad rows: which of the source's places they are in, and what follows its name: ":4: invalid JSON"."""
    fingerprint: str
    """Hash of all arrays: what the documents are, wherever they came from."""


class Documents(Protocol):
    """Tokenized documents in flat arrays; a store on disk, or synthetic ones in memory."""

    meta: StoreMeta

    @property
    def ids(self) -> NDArray[np.int32]: ...

    @property
    def mask(self) -> NDArray[np.uint8]: ...

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins in `ids` and `mask`."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    @property
    def rows(self) -> NDArray[np.int64]: ...

    @property
    def supervised(self) -> NDArray[np.int64]: ...


class TokenStore:
    """A store on disk. Pickling one (for a loader worker) sends its path, not its tokens."""

    def __init__(self, directory: Path, meta: StoreMeta):
        self.directory = directory
        self.meta = meta
        self._arrays: dict[str, NDArray] = {}

    @classmethod
    def open(cls, directory: Path) -> "TokenStore | None":
        """Returns the store in `directory`, or None if there is none or it is damaged."""
        try:
            fields = json.loads((directory / "meta.json").read_bytes())
            examples = tuple((int(place), str(rest)) for place, rest in fields["bad_examples"])
            meta = StoreMeta(**{**fields, "bad_examples": examples})
            sizes = {name: (directory / f"{name}.bin").stat().st_size for name in _ARRAYS}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        counts = {name: meta.tokens if name in ("ids", "mask") else meta.documents for name in _ARRAYS}
        expected = {name: counts[name] * np.dtype(kind).itemsize for name, kind in _ARRAYS.items()}
        return cls(directory, meta) if sizes == expected else None

    def __reduce__(self) -> tuple[type, tuple[Path, StoreMeta]]:
        return TokenStore, (self.directory, self.meta)

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._array("ids")

    @property
    def mask(self) -> NDArray[np.uint8]:
        return self._array("mask")

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._array("lengths")

    @property
    def rows(self) -> NDArray[np.int64]:
        return self._array("rows")

    @property
    def supervised(self) -> NDArray[np.int64]:
        return self._array("supervised")

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    def _array(self, name: str) -> NDArray:
        if name not in self._arrays:
            path, kind = self.directory / f"{name}.bin", _ARRAYS[name]
            # an empty file cannot be mapped
            mapped = np.memmap(path, kind, mode="r") if path.stat().st_size else np.empty(0, kind)
            self._arrays[name] = np.asarray(mapped)
        return self._arrays[name]


class StoreWriter:
    """Writes one store, document by document; a context manager that leaves nothing behind unless `commit` is called.

    Beside its temporary directory lies a file that is locked while it writes. What a killed process has left, all tokens
    of a source perhaps, is told by its lock being free, and goes when the store is written the next time.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._temporary = directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:12]}.tmp")
        self._lock_path = self._temporary.with_suffix(".lock")
        self._lock_fd = -1
        self.tokens = 0
        self._lengths: list[int] = []
        self._rows: list[int] = []
        self._supervised: list[int] = []

    def __enter__(self) -> Self:
        make_dirs(self.directory.parent)
        self._remove_leftovers()
        self._lock_fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try_flock(self._lock_fd)  # without locks nobody will find it free either
        self._temporary.mkdir()  # after the lock: a directory whose lock is free belongs to nobody
        self._ids = DurableFile(self._temporary / "ids.bin")
        self._mask = DurableFile(self._temporary / "mask.bin")
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.close()
        self._mask.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _remove_leftovers(self) -> None:
        for temporary in self.directory.parent.glob(f"{self.directory.name}.*.tmp"):
            lock_path = temporary.with_suffix(".lock")
            with suppress(FileNotFoundError):  # another process has just ended writing it
                fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_flock(fd):  # else another process writes the same store
                        shutil.rmtree(temporary, ignore_errors=True)
                        lock_path.unlink(missing_ok=True)
                finally:
                    os.close(fd)

    def add(self, documents: list[tuple[NDArray[np.int32], NDArray[np.uint8]]], rows: list[int]) -> None:
        """Appends documents (ids int32, mask uint8) with their row numbers."""
        if not documents:
            return
        self._ids.write(np.concatenate([ids for ids, _ in documents]).astype(np.int32, copy=False).tobytes())
        self._mask.write(np.concatenate([mask for _, mask in documents]).astype(np.uint8, copy=False).tobytes())
        self.tokens += sum(ids.size for ids, _ in documents)
        self._lengths += [ids.size for ids, _ in documents]
        self._supervised += [int(mask[1:].sum()) for _, mask in documents]
        self._rows += rows

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def commit(self, source: str, bad_rows: int, bad_examples: tuple[tuple[int, str], ...]) -> TokenStore:
        """Makes the store durable under its final name and returns it; keeps an equal one that came first."""
        columns = {"lengths": self._lengths, "rows": self._rows, "supervised": self._supervised}
        records = [self._ids.finish(), self._mask.finish()]
        for name, values in columns.items():
            records.append(write_new(self._temporary / f"{name}.bin", np.asarray(values, np.int64).tobytes()))
        meta = StoreMeta(
            source=source,
            documents=self.documents,
            tokens=self.tokens,
            supervised_tokens=sum(self._supervised),
            bad_rows=bad_rows,
            bad_examples=bad_examples,
            fingerprint=xxh3_bytes(json.dumps([asdict(record) for record in records]).encode()),
        )
        write_new(self._temporary / "meta.json", json.dumps(asdict(meta), indent=1).encode())
        fsync_dir(self._temporary)
        if TokenStore.open(self.directory) is None:
            shutil.rmtree(self.directory, ignore_errors=True)  # a damaged one
        try:
            rename(self._temporary, self.directory)
        except OSError:
            other = TokenStore.open(self.directory)  # another process of another run was faster
            if other is None:
                raise
            return other
        return TokenStore(self.directory, meta)
