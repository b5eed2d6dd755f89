"""The rows of a run: one per step, written on rank 0 to every place that wants them."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from trainer.config.run import RunConfig
from trainer.core.log import logger
from trainer.errors import TrainingError
from trainer.train.sinks.console import Console
from trainer.train.sinks.jsonl import Row, RunEvents, StepFile, read_rows
from trainer.train.sinks.progress import ProgressBar, wants_bar
from trainer.train.sinks.wandb import WandbSink

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVENTS_FILE = "events.jsonl"


class Sink(Protocol):
    """A place for rows besides the run's own files."""

    def write(self, row: Row) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class MetricsLog:
    """Writes metrics.jsonl (and samples.jsonl), console lines or a progress bar, and W&B.

    Use it as a context manager: the bar is taken down and W&B is told whether the run failed. On ranks other than 0
    (``is_main`` false) every method does nothing.

    ``start_step`` is the step the process begins after; rows past it move to metrics.superseded.jsonl. ``fresh`` says
    that nothing was resumed, so that a row of step 0 is superseded as well; by default it is ``start_step == 0``.
    With ``redo`` the row of ``start_step`` itself comes once more, complete: the checkpoint was taken before its
    validation had ended. ``run_id`` names the run in W&B and must be the same over resumes.

    Raises ``TrainingError`` if the run's own files cannot be written.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: RunConfig,
        *,
        is_main: bool,
        start_step: int,
        max_steps: int,
        run_id: str,
        fresh: bool | None = None,
        redo: bool = False,
    ) -> None:
        self._open = is_main
        self._samples: StepFile | None = None
        self._sinks: list[Sink] = []
        if not is_main:
            return
        fresh = start_step == 0 if fresh is None else fresh
        first_step = start_step - 1 if redo else start_step
        keep_through = -1 if fresh else first_step
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)

        self._events = RunEvents(run_dir / EVENTS_FILE)
        generation_of = self._events.generation_of
        self._metrics = StepFile(run_dir / METRICS_FILE, keep_through=keep_through, generation_of=generation_of)
        if config.data.log_ids:
            kept = -1 if fresh else start_step
            self._samples = StepFile(run_dir / SAMPLES_FILE, keep_through=kept, generation_of=generation_of)
        self._events.start(first_step, fresh=fresh)  # last: until here the rows belong to the processes before this one
        self._last_step = start_step

        if config.wandb.mode != "off":
            self._sinks.append(
                WandbSink(
                    run_dir,
                    config,
                    run_id=run_id,
                    keep_through=keep_through,
                    earlier_rows=lambda: read_rows(run_dir / METRICS_FILE),
                )
            )
        last_step = min(max_steps, config.stop_step or max_steps)
        bar = wants_bar(config.log.progress)
        self._sinks.append(
            Console(
                start_step=start_step, last_step=last_step, max_steps=max_steps, interval=config.log.interval, quiet=bar
            )
        )
        if bar:
            self._sinks.append(ProgressBar(start_step=start_step, last_step=last_step, max_steps=max_steps))

    def log(self, row: Row) -> None:
        """Write the row of a step: plain numbers and strings, "step" among them and growing from call to call.

        Raises ``ValueError`` if the step does not grow, ``TrainingError`` if metrics.jsonl cannot be written.
        """
        if not self._open:
            return
        self._metrics.write(row)
        self._last_step = row["step"]
        for sink in self._sinks:
            sink.write(row)

    def log_samples(self, step: int, epoch: int, ids: Sequence[Sequence[str]]) -> None:
        """Write the sample ids of the global batch that fed ``step``, one list per row; needs ``data.log_ids``."""
        if self._samples is not None:
            self._samples.write({"step": step, "epoch": epoch, "ids": ids})

    def sync(self) -> None:
        """Make the rows durable. Called before a checkpoint is committed, so that no power cut leaves fewer rows than
        the checkpoint has steps."""
        if not self._open:
            return
        self._metrics.sync()
        if self._samples is not None:
            self._samples.sync()

    def close(self, *, failed: bool = False) -> None:
        """Close every place; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        for sink in reversed(self._sinks):
            sink.close(failed=failed)
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        self._events.end(self._last_step, failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close(failed=kind is not None)
        except TrainingError as failure:
            if kind is None:
                raise
            logger.error("{}", failure)  # on its way out is the error that came first
