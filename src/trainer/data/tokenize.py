"""Tokenizing a whole source once, ahead of training, into a store that later runs find again."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.config.data import DataConfig, SourceConfig
from trainer.core.files import local_path
from trainer.core.log import logger
from trainer.data.chat import Encoder
from trainer.data.rows import Conversation, RowError, Text, detect_format, parse_row
from trainer.data.sources import Source, SourceRow, open_source
from trainer.data.store import STORE_VERSION, StoreMeta, StoreWriter, TokenStore
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

BATCH_ROWS = 512  # rows tokenized in one call: enough to keep all cores busy, little enough to hold in memory
SHOWN_BAD_ROWS = 5
PROGRESS_SECONDS = 20.0


def cache_dir(config: DataConfig) -> Path:
    """Returns data.cache_dir, or the user's cache folder.

    Raises:
        DataError: there can be no such folder.
    """
    if config.cache_dir:
        try:
            return local_path(config.cache_dir).absolute()
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"data.cache_dir = {config.cache_dir[:200]!r} cannot be opened: {error}") from error
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root).absolute() if root else Path.home() / ".cache") / "exact-trainer"
    except RuntimeError as error:  # no HOME, and a user that the system does not know: common in containers
        raise DataError("this user has no home directory for tokenized data: set data.cache_dir, or HOME") from error


def tokenized(source: SourceConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> TokenStore:
    """Returns the tokenized documents of `source`, from the cache or made now. Local: no other rank takes part.

    Raises:
        DataError: the source cannot be read; a row is bad and data.on_bad_row is "fail"; every row is bad; the cache
            folder cannot be written.
    """
    rows = open_source(source)
    directory = cache_dir(config) / "tokens" / _key(rows, source, config, tokenizer)
    store = TokenStore.open(directory)
    if store is not None and store.meta.bad_rows and config.on_bad_row == "fail":
        store = None  # made under "skip": read again, up to the row that is bad
    if store is None:
        try:
            store = _tokenize(rows, source, config, tokenizer, directory)
        except OSError as error:
            raise DataError(
                f"cannot write tokenized data to {directory.parent} ({error.strerror or error}); "
                "set data.cache_dir to a folder with free space"
            ) from error
    _report_bad_rows(rows, store.meta)
    return store


def _key(rows: Source, source: SourceConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Names what the tokens depend on: content, tokenizer, template, format, roles, library versions; not seq_len."""
    import tokenizers
    import transformers

    parts = {
        "version": (STORE_VERSION, transformers.__version__, tokenizers.__version__),
        "source": rows.content_hash(),
        "format": source.format,
        "tokenizer": tokenizer_hash(tokenizer),
        "train_on": sorted(config.train_on),
        "train_on_prompt": config.train_on_prompt,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Returns a hash of the vocabulary, merges, special tokens and chat template, wherever they were loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {
        "class": type(tokenizer).__name__,
        "backend": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class _BadRows:
    """Counts bad rows, or raises at the first one."""

    def __init__(self, rows: Source, fatal: bool):
        self.fatal = fatal
        self.count = 0
        self.examples: list[tuple[int, str]] = []
        self._places = rows.places

    def add(self, row: SourceRow, reason: str) -> None:
        message = f"{row.where}: {reason}"
        if self.fatal:
            raise DataError(
                f'{message}\nFix the row, or set data.on_bad_row = "skip" to leave such rows out and have them counted.'
            )
        self.count += 1
        if len(self.examples) < SHOWN_BAD_ROWS:
            place = max((place for place in self._places if message.startswith(f"{place}:")), key=len)
            self.examples.append((self._places.index(place), message.removeprefix(place)))


def _tokenize(
    rows: Source, source: SourceConfig, config: DataConfig, tokenizer: "PreTrainedTokenizerFast", directory: Path
) -> TokenStore:
    encoder = Encoder(tokenizer, config.train_on)
    bad = _BadRows(rows, fatal=config.on_bad_row == "fail")
    started = shown = time.monotonic()
    with StoreWriter(directory) as writer:
        for batch in _in_batches(_parsed(rows, source, config, bad), BATCH_ROWS):
            documents, numbers = [], []
            for (row, _), result in zip(batch, encoder.encode([document for _, document in batch]), strict=True):
                if isinstance(result, RowError):
                    bad.add(row, str(result))
                elif result[0].size == 0:
                    bad.add(row, "no tokens")
                else:
                    documents.append(result)
                    numbers.append(row.number)
            writer.add(documents, numbers)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                logger.info("{}: tokenized {:,} documents, {:,} tokens", rows.name, writer.documents, writer.tokens)
        if writer.documents == 0:
            examples = _listed(rows, bad.examples)
            raise DataError(f"{rows.name}: " + (f"all {bad.count} rows are bad:{examples}" if bad.count else "no rows"))
        store = writer.commit(rows.name, bad.count, tuple(bad.examples))
    seconds = time.monotonic() - started
    logger.info("{}: tokenized in {:.1f} s, kept in {}", rows.name, seconds, store.directory)
    return store


def _parsed(
    rows: Source, source: SourceConfig, config: DataConfig, bad: _BadRows
) -> Iterator[tuple[SourceRow, Text | Conversation]]:
    """The good rows, parsed; the format, unless given, is that of the first row whose keys fit one."""
    row_format = None if source.format == "auto" else source.format
    for row in rows:
        if row.value is None:
            bad.add(row, row.error)
            continue
        try:
            row_format = row_format or detect_format(row.value)
            document = parse_row(row.value, row_format, train_on_prompt=config.train_on_prompt)
        except RowError as error:
            bad.add(row, str(error))
            continue
        yield row, document


def _in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _listed(rows: Source, examples: Sequence[tuple[int, str]]) -> str:
    """Where the rows lie now: the tokens may have been made from a copy elsewhere."""
    return "".join(f"\n  {rows.places[place]}{rest}" for place, rest in examples)


def _report_bad_rows(rows: Source, meta: StoreMeta) -> None:
    if not meta.bad_rows:
        return
    examples = _listed(rows, meta.bad_examples)
    more = "" if meta.bad_rows <= len(meta.bad_examples) else f"\n  and {meta.bad_rows - len(meta.bad_examples)} more"
    logger.warning(
        "{}: skipped {} bad rows of {}:{}{}", rows.name, meta.bad_rows, meta.bad_rows + meta.documents, examples, more
    )
