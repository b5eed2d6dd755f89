"""Reading rows: JSONL and Parquet files, folders of them, saved and hub data sets of Hugging Face.

Every row comes with its place ("file:line" or "file: row k"), also the ones that cannot be read, so that whoever
rejects a row later can say where it is.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.data import SourceConfig
from trainer.core.files import local_path, xxh3
from trainer.core.log import logger
from trainer.data.rows import COLUMNS
from trainer.errors import DataError, first_line

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import RecordBatch

FILE_TYPES = (".jsonl", ".parquet")
_DATA_TYPES = frozenset(
    (".arrow", ".bz2", ".csv", ".gz", ".json", ".ndjson", ".tsv", ".xz", ".zip", ".zst", *FILE_TYPES)
)
"""Endings of files that probably hold data; those that are not read are told of."""
_NOT_TEXT = {
    b"\x1f\x8b": "gzip-compressed: decompress it",
    b"\x28\xb5\x2f\xfd": "zstd-compressed: decompress it",
    b"BZh": "bzip2-compressed: decompress it",
    b"\xfd7zXZ": "xz-compressed: decompress it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "a Parquet file: let its name end in .parquet",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself: fetch it with git lfs pull",
}
"""First bytes of what a .jsonl file may turn out to be."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class SourceRow:
    """One row as found, before anything is known about its layout."""

    number: int
    """0-based row number in the source, over all its files; bad rows count, blank JSONL lines do not."""
    where: str
    """Place for messages: "path:line" (1-based) or "path: row k" (0-based)."""
    value: dict[str, Any] | None
    """The row's columns, or None if it could not be read."""
    error: str = ""
    """Why `value` is None."""


class Source(Protocol):
    """Rows in a fixed order, and a hash of their content."""

    name: str

    @property
    def places(self) -> Sequence[str]:
        """What `where` of its rows begins with, before a colon. A source of the same content has equally many, in the same
        order."""
        ...

    def content_hash(self) -> str:
        """Returns a hash that changes whenever the rows may have changed; it does not depend on where the files lie."""
        ...

    def __iter__(self) -> Iterator[SourceRow]: ...


def open_source(config: SourceConfig) -> Source:
    """Finds out what `config.path` is and returns its rows.

    A file must end in .jsonl or .parquet. A folder is a `datasets.save_to_disk` folder, or holds such files at any
    depth (taken in the order of their relative paths, hidden ones left out), or is handed to `datasets.load_dataset`.
    What does not exist locally and looks like "name" or "owner/name" is looked up on the Hugging Face hub.

    Raises:
        DataError: nothing readable is there, or the hub cannot be reached.
    """
    try:
        path = local_path(config.path)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"data source {config.path[:200]!r} cannot be opened: {error}; correct the path") from error
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise DataError(f"{path}: data files must end in {' or '.join(FILE_TYPES)}")
        return FileSource(config.path, [path])
    if path.is_dir():
        return _open_folder(config, path)
    if path.is_symlink():
        raise DataError(f"{path} is a link to {path.readlink()}, which does not exist; correct the link")
    if path.exists():
        raise DataError(f"{path} is neither a file nor a folder; data are read twice, so copy them into a file")
    looks_local = path.suffix in FILE_TYPES or config.path.startswith((".", "/", "~"))
    if looks_local or not _HUB_NAME.fullmatch(config.path):
        raise DataError(f"data source {config.path!r} does not exist (looked for {path.absolute()})")
    return DatasetSource(config, _load_dataset(config))


def _open_folder(config: SourceConfig, path: Path) -> Source:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return DatasetSource(config, _load_saved(config, path))
    found = sorted(path.rglob("*"), key=lambda file: file.relative_to(path).parts)
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    files = {file: None for file in shown if file.suffix in FILE_TYPES and not file.is_dir()}
    for file in files:
        if not file.is_file():
            what = f"a link to {file.readlink()}, which does not exist" if file.is_symlink() else "no regular file"
            raise DataError(f"{file} is {what}; remove it from the folder, or put the file in its place")
    if files:
        left_out = [
            file for file in shown if file.suffix.lower() in _DATA_TYPES and file not in files and file.is_file()
        ]
        if left_out:
            logger.warning(
                "{}: {} files are read; left out {} of other kinds, such as {}",
                config.path,
                len(files),
                len(left_out),
                left_out[0].relative_to(path),
            )
        return FileSource(config.path, [*files])
    if not any(path.iterdir()):
        raise DataError(f"{path}: the folder is empty; expected {' or '.join(FILE_TYPES)} files or a saved data set")
    return DatasetSource(config, _load_dataset(config))


class FileSource:
    """JSONL and Parquet files, one after the other."""

    def __init__(self, name: str, files: list[Path]):
        self.name = name
        self.files = files
        self.places = [str(file) for file in files]

    def content_hash(self) -> str:
        return "files:" + ",".join(f"{file.suffix}:{_hash_file(file)}" for file in self.files)

    def __iter__(self) -> Iterator[SourceRow]:
        number = 0
        for file in self.files:
            for row in _read_jsonl(file, number) if file.suffix == ".jsonl" else _read_parquet(file, number):
                yield row
                number = row.number + 1


def _hash_file(file: Path) -> str:
    try:
        return xxh3(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _read_jsonl(file: Path, number: int) -> Iterator[SourceRow]:
    try:
        with file.open("rb") as lines:
            for line_number, line in enumerate(lines, start=1):
                if line_number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # UTF-8 byte order mark, written by some editors
                    _check_first_bytes(line, file)
                if not line.strip():
                    continue
                yield _parse_line(line, number, f"{file}:{line_number}")
                number += 1
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _check_first_bytes(line: bytes, file: Path) -> None:
    for start, what in _NOT_TEXT.items():
        if line.startswith(start):
            raise DataError(f"{file} holds no JSON lines; it is {what}")


def _parse_line(line: bytes, number: int, where: str) -> SourceRow:
    hint = "; a JSON array is no JSON lines: write one object per line" if line.lstrip().startswith(b"[") else ""
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return SourceRow(number, where, None, f"not UTF-8 (byte {error.start})")
    except json.JSONDecodeError as error:
        return SourceRow(number, where, None, f"invalid JSON ({error.msg} at column {error.colno}){hint}")
    except ValueError as error:  # a key twice, or a number of thousands of digits
        return SourceRow(number, where, None, f"invalid JSON ({error})")
    except RecursionError:
        return SourceRow(number, where, None, "invalid JSON (nested too deeply)")
    if not isinstance(value, dict):
        return SourceRow(number, where, None, f"expected a JSON object, found {type(value).__name__}{hint}")
    return SourceRow(number, where, value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key that comes twice would lose one of its values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} comes twice in an object")
    return value


def _read_parquet(file: Path, number: int) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    in_file = 0
    try:
        with pq.ParquetFile(file) as table:
            known = [name for name in table.schema_arrow.names if name in COLUMNS]
            for batch in table.iter_batches(batch_size=1024, columns=known or None):
                for value, error in _rows_of(batch):
                    yield SourceRow(number, f"{file}: row {in_file}", value, error)
                    number += 1
                    in_file += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file ({error})") from error


def _rows_of(batch: "RecordBatch") -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Yields each row, or what is wrong with it, such as text that is not UTF-8."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # one of them: find out which
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0], ""
            except (ValueError, OverflowError) as error:
                yield None, f"cannot be read ({error})"
    else:
        yield from ((row, "") for row in rows)


class DatasetSource:
    """A data set of the `datasets` library, saved locally or from the hub."""

    def __init__(self, config: SourceConfig, dataset: "Dataset"):
        self.name = config.path
        self.dataset = dataset.with_format(None)  # a saved data set remembers a tensor format
        self.split = config.split
        self.place = f"{config.path}[{config.split}]"
        self.places = [self.place]

    def content_hash(self) -> str:
        # The Arrow files behind the table; a table without files (never seen for loaded ones) is hashed row by row.
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        if not files:
            import xxhash

            digest = xxhash.xxh3_64()
            for row in self.dataset:
                digest.update(json.dumps(row, default=str, sort_keys=True).encode())
            return "rows:" + digest.hexdigest()
        # The split as well: "train[:50%]" and "train[50%:]" are equally many rows of the same files.
        return f"dataset:{self.split}:{len(self.dataset)}:" + ",".join(_hash_file(file) for file in files)

    def __iter__(self) -> Iterator[SourceRow]:
        rows, number = iter(self.dataset), 0
        while True:
            try:
                value = next(rows)
            except StopIteration:
                return
            except Exception as error:  # Arrow's, the operating system's, or a decoder's of some column
                raise DataError(f"{self.place}: row {number} cannot be read: {first_line(error)}") from error
            yield SourceRow(number, f"{self.place}: row {number}", dict(value))
            number += 1


def _load_saved(config: SourceConfig, path: Path) -> "Dataset":
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # damaged tables surface as whatever trips over them
        raise DataError(
            f"{path}: not a readable data set folder ({first_line(error)}); save the data set again, or give a folder of "
            f"{' or '.join(FILE_TYPES)} files"
        ) from error
    if isinstance(loaded, Dataset):
        return loaded
    if config.split not in loaded:
        raise DataError(f"{path}: no split {config.split!r}; it has {', '.join(map(str, loaded))}")
    return loaded[config.split]


def _load_dataset(config: SourceConfig) -> "Dataset":
    from datasets import load_dataset

    name = f"{config.path} (subset {config.subset})" if config.subset else config.path
    try:
        return load_dataset(config.path, config.subset, split=config.split)
    except Exception as error:  # of the network, the hub, the files' formats: each means the same to the user
        cause = f" ({first_line(error.__cause__)})" if error.__cause__ is not None else ""
        hint = (
            "Give a folder of .jsonl or .parquet files, or a datasets.save_to_disk folder; these are read without guessing."
            if local_path(config.path).exists()
            else "If the hub cannot be reached from here, download the data set elsewhere and give the path of a folder of "
            ".jsonl or .parquet files, or of a datasets.save_to_disk folder."
        )
        raise DataError(
            f"cannot load data set {name}, split {config.split!r}: {first_line(error)}{cause}\n{hint}"
        ) from error
