"""Weights & Biases, imported only when ``wandb.mode`` is not "off".

Nothing that goes wrong here ends a run: it is a warning, once, and the run goes on without W&B. metrics.jsonl has every
row all the same.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainer.config.run import RunConfig
from trainer.core.log import logger
from trainer.train.sinks.jsonl import Row


class WandbSink:
    """Sends every row, under one run id over all resumes and with strictly increasing steps.

    ``earlier_rows`` gives the run's rows up to ``start_step``: those that an earlier process lost on its way to W&B are
    sent again. Rows that W&B has already (it was ahead when the run was killed, and cannot take them back) are not.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        run_id: str,
        keep_through: int,
        earlier_rows: Callable[[], Iterable[Row]],
    ) -> None:
        self._run: Any = None
        self._last_step = -1  # the newest step W&B has
        self._guarded(lambda: self._open(run_dir, config, run_id, keep_through, earlier_rows))

    def write(self, row: Row) -> None:
        if self._run is not None:
            self._guarded(lambda: self._send(row))

    def close(self, *, failed: bool) -> None:
        if self._run is not None:
            self._guarded(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _open(
        self,
        run_dir: Path,
        config: RunConfig,
        run_id: str,
        keep_through: int,
        earlier_rows: Callable[[], Iterable[Row]],
    ) -> None:
        import wandb

        offline = config.wandb.mode == "offline"
        run_dir.mkdir(parents=True, exist_ok=True)
        held = _cut_history(run_dir, run_id, keep_through) if offline else -1
        self._run = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            name=config.wandb.name or run_dir.resolve().name,
            id=run_id,
            resume="allow",
            mode="offline" if offline else "online",
            dir=run_dir,
            config=config.model_dump(mode="json"),
            # Our console output is in logs/; capturing it would also fight with the progress bar over the terminal.
            settings=wandb.Settings(silent=True, console="off", login_timeout=60),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._last_step = held if offline else self._run.starting_step - 1
        if self._last_step > keep_through >= 0:
            logger.info("W&B has steps up to {} already; their rows are not sent again", self._last_step)
        for row in earlier_rows():
            self._send(row)
        if offline:
            logger.info("W&B offline run {}; upload it with: wandb sync {}", run_id, run_dir / "wandb")
        else:
            logger.info("W&B run {}", self._run.url)

    def _send(self, row: Row) -> None:
        if row["step"] > self._last_step:
            # commit: W&B would hold the row back until the next one, and a kill would lose it
            self._run.log(row, step=row["step"], commit=True)
            self._last_step = row["step"]

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a library for pictures does, the training run is worth more
            self._run = None
            logger.warning(
                "W&B is off for the rest of this process ({}: {}). Training goes on and metrics.jsonl is complete; "
                'run `wandb login` first for wandb.mode = "online", or set "offline" or "off"',
                type(error).__name__,
                error,
            )


def _cut_history(run_dir: Path, run_id: str, keep_through: int) -> int:
    """The last step that the offline logs hold, once the steps past ``keep_through`` are cut off."""
    from trainer.train.sinks.wandb_history import cut_offline_history

    try:
        return cut_offline_history(run_dir / "wandb", run_id, keep_through)
    except Exception as error:  # another format in a later version of W&B: send the new steps only
        logger.warning("cannot read the earlier offline W&B logs of this run, new steps are added to them: {}", error)
        return keep_through
