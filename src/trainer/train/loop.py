"""The one training loop. SFT and RL differ in where the batch comes from and in the loss, not here."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.core import device as devices
from trainer.core.log import logger
from trainer.data.batch import GlobalBatch
from trainer.errors import TrainingError
from trainer.train.run import Run
from trainer.train.step import StepResult, evaluate, train_step


def fit(run: Run) -> None:
    """Trains from the run's current step to its last one, validating, logging and saving on the way."""
    config, progress = run.config, run.progress
    if progress.step >= run.last_step:
        logger.info(f"step {progress.step} of {run.last_step} is reached: nothing to train")
    elif run.resumed_from is None and config.val.interval and config.val.at_start:
        run.metrics.log({"step": 0, **validate(run)})
    run.model.train()
    with scheduled_garbage_collection(config.runtime.gc_interval) as collect:
        while progress.step < run.last_step:
            started = time.perf_counter()
            batch = run.loader.next_batch()
            row = take_step(run, batch)
            row |= speed(run, batch, time.perf_counter() - started)
            if config.val.interval and (progress.step % config.val.interval == 0 or progress.step == run.max_steps):
                row |= validate(run)
            run.metrics.log(row)
            run.log_samples(batch)
            run.checkpoints.poll()  # where a save beside the training has failed, the run ends here
            if run.checkpoints.due(progress.step, run.max_steps):
                run.save()
            collect(progress.step)
    if config.ckpt.at_end:
        run.save()  # does nothing if this step was just saved, or is the one resumed from
    run.checkpoints.wait()


def take_step(run: Run, batch: GlobalBatch) -> dict[str, float]:
    """Runs one step, advances every counter and the lr, and returns the step's row of metrics."""
    progress, lr = run.progress, run.optimizer.param_groups[0]["lr"]
    result = train_step(
        run.model,
        run.optimizer,
        run.loss_function,
        batch,
        step=progress.step,
        seed=run.config.seed,
        rank=run.world.rank,
        device=run.device,
        max_norm=run.config.optim.max_norm,
    )
    if not result.finite:
        _not_finite(run, result, progress.step + 1)
    progress.advance(batch, applied=result.finite)
    run.schedule.apply(progress.step)
    return {
        "step": progress.step,
        "loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "epoch": progress.epoch,
    }


def _not_finite(run: Run, result: StepResult, step: int) -> None:
    found = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
    if run.config.optim.on_nonfinite == "stop":
        raise TrainingError(
            f"{found} is not finite; the weights are those of step {step - 1}. Lower optim.lr, look at this batch "
            f"(data.log_ids), or leave such updates out with --optim.on-nonfinite skip"
        )
    logger.warning(f"{found}: update skipped")


def speed(run: Run, batch: GlobalBatch, seconds: float) -> dict[str, float]:
    """Returns the throughput of this step, over all ranks; earlier processes' work is never counted."""
    return {
        "tokens_per_second": batch.tokens / seconds,
        "step_seconds": seconds,
        "peak_memory_gib": devices.peak_memory_gib(run.device),
    }


def validate(run: Run) -> dict[str, float]:
    """Returns the held-out loss as the entries of a metrics row."""
    loss, tokens = evaluate(run.model, run.loss_function, run.validation, device=run.device)
    run.validated = (run.progress.step, loss)
    return {"val_loss": loss, "val_tokens": tokens}


@contextmanager
def scheduled_garbage_collection(interval: int) -> Iterator:
    """Collects at fixed steps on all ranks, so that no rank pauses alone in the middle of a collective."""
    if interval == 0 or not gc.isenabled():
        yield lambda step: None
        return
    gc.disable()
    gc.collect()
    try:
        yield lambda step: gc.collect(1) if step % interval == 0 else None
    finally:
        gc.enable()
