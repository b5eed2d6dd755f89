"""Where the documents come from and how they become batches."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from trainer.config.base import Section, Weight


class SourceConfig(Section):
    """One source of documents ([[data.sources]])."""

    path: str = Field(min_length=1)
    """A .jsonl or .parquet file, a folder of them, a `datasets.save_to_disk` folder, or a hub data set name."""
    split: str = "train"
    """Split of a Hugging Face data set; ignored for files."""
    subset: str | None = None
    """Configuration name of a Hugging Face data set; ignored for files."""
    weight: Weight | None = None
    """Share of this source in the mix, relative to the other weights. Without any, every row is seen once an epoch."""
    format: Literal["auto", "messages", "completion", "text"] = "auto"
    """Row layout: `messages` (+`tools`), `prompt`+`completion`, or `text`; "auto" looks at the first row's keys."""


class FakeConfig(Section):
    """Synthetic documents for benchmarks: token ids from `seed`, log-normal lengths."""

    documents: int = Field(default=10_000, ge=1, le=2**26)
    """Number of documents in an epoch."""
    mean_tokens: int = Field(default=400, ge=1, le=2**24)
    """Mean document length, in tokens."""
    sigma: float = Field(default=0.8, ge=0.0, le=5.0)
    """Standard deviation of the logarithm of the length; 0 = every document has `mean_tokens`."""
    vocab_size: int = Field(default=1000, ge=1, le=2**31 - 1)
    """Ids are drawn from [0, vocab_size)."""


class DataConfig(Section):
    """Documents, rows and batches."""

    sources: tuple[SourceConfig, ...] = ()
    """Training sources ([[data.sources]] tables). One of `sources` and `fake` is required."""
    val_sources: tuple[SourceConfig, ...] = ()
    """Held-out sources for `val.interval`."""
    val_documents: NonNegativeInt = 0
    """Without `val_sources`: hold this many documents out of the training sources (chosen by `seed`); 0 = none."""
    fake: FakeConfig | None = None
    """Synthetic data for benchmarks ([data.fake])."""
    seq_len: int = Field(default=2048, ge=2, le=2**24)
    """Tokens in a row; longer documents are cut at this length."""
    pack: bool = True
    """Put several documents into a row (best-fit-decreasing); they never attend to each other."""
    batch_size: int = Field(default=64, ge=1, le=2**20)
    """Rows in one optimizer step, over all ranks and micro-steps."""
    micro_batch_size: PositiveInt = 1
    """Rows of one rank in one micro-step; batch_size / (micro_batch_size x ranks) micro-steps make a step, the same step."""
    epoch_end: Literal["carry", "flush"] = "carry"
    """"carry": batches run on across the end of an epoch; "flush": an epoch's last, shorter batch is applied by itself."""
    shuffle: bool = True
    """Draw a new order of documents for every epoch from `seed`."""
    num_workers: int = Field(default=0, ge=0, le=256)
    """Loader processes per rank; the order of samples does not depend on it."""
    train_on: tuple[Literal["assistant", "user", "system", "tool"], ...] = Field(default=("assistant",), min_length=1)
    """Roles whose tokens are supervised in `messages` rows."""
    train_on_prompt: bool = False
    """Supervise the prompt of `prompt`+`completion` rows as well."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be read or tokenized: "fail" names file and line, "skip" counts it and goes on."""
    log_ids: bool = False
    """Write the sample ids of every global batch to samples.jsonl."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """Folder for tokenized data; default $XDG_CACHE_HOME/exact-trainer or ~/.cache/exact-trainer."""


class MeasureConfig(Section):
    """Measuring on held-out data."""

    interval: NonNegativeInt = 0
    """Measure every N steps and after the last one; 0 = never."""
    at_start: bool = True
    """Also measure before the first step of a fresh run (step 0)."""


class ValConfig(MeasureConfig):
    """Validation loss on held-out documents."""

    batches: NonNegativeInt = 0
    """Rows used are `batches` x data.batch_size; 0 = all held-out rows."""
