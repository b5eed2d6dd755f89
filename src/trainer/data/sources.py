"""Reading rows: JSONL and Parquet files, folders of them, saved and hub data sets of Hugging Face.

Every row comes with its place ("file:line" or "file: row k"), also the ones that cannot be read, so that whoever
rejects a row later can say where it is.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.data import SourceConfig
from trainer.core.files import local_path, xxh3
from trainer.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

FILE_TYPES = (".jsonl", ".parquet")
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
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return DatasetSource(config, _load_saved(config, path))
        files = [
            file
            for file in sorted(path.rglob("*"), key=lambda file: file.relative_to(path).parts)
            if file.suffix in FILE_TYPES
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if files:
            return FileSource(config.path, files)
        if not any(path.iterdir()):
            raise DataError(
                f"{path}: the folder is empty; expected {' or '.join(FILE_TYPES)} files or a saved data set"
            )
        return DatasetSource(config, _load_dataset(config))
    looks_local = path.suffix in FILE_TYPES or config.path.startswith((".", "/", "~"))
    if looks_local or not _HUB_NAME.fullmatch(config.path):
        raise DataError(f"data source {config.path!r} does not exist (looked for {path.absolute()})")
    return DatasetSource(config, _load_dataset(config))


class FileSource:
    """JSONL and Parquet files, one after the other."""

    def __init__(self, name: str, files: list[Path]):
        self.name = name
        self.files = files

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
                if not line.strip():
                    continue
                yield _parse_line(line, number, f"{file}:{line_number}")
                number += 1
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _parse_line(line: bytes, number: int, where: str) -> SourceRow:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return SourceRow(number, where, None, f"not UTF-8 (byte {error.start})")
    except json.JSONDecodeError as error:
        return SourceRow(number, where, None, f"invalid JSON ({error.msg} at column {error.colno})")
    except ValueError as error:  # a number of thousands of digits
        return SourceRow(number, where, None, f"invalid JSON ({error})")
    except RecursionError:
        return SourceRow(number, where, None, "invalid JSON (nested too deeply)")
    if not isinstance(value, dict):
        return SourceRow(number, where, None, f"expected a JSON object, found {type(value).__name__}")
    return SourceRow(number, where, value)


def _read_parquet(file: Path, number: int) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    in_file = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    yield SourceRow(number, f"{file}: row {in_file}", value)
                    number += 1
                    in_file += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file ({error})") from error


class DatasetSource:
    """A data set of the `datasets` library, saved locally or from the hub."""

    def __init__(self, config: SourceConfig, dataset: "Dataset"):
        self.name = config.path
        self.dataset = dataset.with_format(None)  # a saved data set remembers a tensor format
        self.place = f"{config.path}[{config.split}]"

    def content_hash(self) -> str:
        # The Arrow files behind the table; a table without files (never seen for loaded ones) is hashed row by row.
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        if not files:
            import xxhash

            digest = xxhash.xxh3_64()
            for row in self.dataset:
                digest.update(json.dumps(row, default=str, sort_keys=True).encode())
            return "rows:" + digest.hexdigest()
        return f"dataset:{len(self.dataset)}:" + ",".join(_hash_file(file) for file in files)

    def __iter__(self) -> Iterator[SourceRow]:
        for number, value in enumerate(self.dataset):
            yield SourceRow(number, f"{self.place}: row {number}", dict(value))


def _load_saved(config: SourceConfig, path: Path) -> "Dataset":
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable data set folder ({error})") from error
    if isinstance(loaded, Dataset):
        return loaded
    if config.split not in loaded:
        raise DataError(f"{path}: no split {config.split!r}; it has {', '.join(map(str, loaded))}")
    return loaded[config.split]


def _load_dataset(config: SourceConfig) -> "Dataset":
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name = f"{config.path} (subset {config.subset})" if config.subset else config.path
    try:
        return load_dataset(config.path, config.subset, split=config.split)
    except (OSError, ValueError, DatasetsError) as error:  # OSError covers connection errors and the offline mode
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"cannot load data set {name}, split {config.split!r}: {summary}\n"
            "If the hub cannot be reached from here, download the data set elsewhere and give the path of a folder of "
            ".jsonl or .parquet files, or of a datasets.save_to_disk folder."
        ) from error
