"""The one training loop. SFT and RL differ in where the batch comes from and in the loss, not here."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint.retention import BEST_METRICS
from trainer.core import device as devices
from trainer.core.log import logger
from trainer.data.batch import GlobalBatch
from trainer.errors import TrainingError
from trainer.optim.offload.base import OffloadOptimizer
from trainer.train.pending import Row
from trainer.train.run import Run
from trainer.train.step import StepResult, train_step


def fit(run: Run) -> None:
    """Trains from the run's current step to its last one, validating, logging and saving on the way.

    A request to stop ends it earlier, with a checkpoint; `run.requests.stopping` tells.
    """
    config, progress = run.config, run.progress
    if progress.step >= run.last_step:
        logger.info(f"step {progress.step} of {run.last_step} is reached: nothing to train")
    if not _begin(run):
        return
    run.model.train()
    with scheduled_garbage_collection(config.runtime.gc_interval) as collect:
        while progress.step < run.last_step:
            started = time.perf_counter()
            batch = run.loader.next_batch()
            done = run.pending.micro_step
            row = take_step(run, batch)
            if row is None:
                return
            row |= batch.measures | speed(
                run, batch, time.perf_counter() - started, 1 - done / len(batch.micro_batches)
            )
            run.log_samples(batch)
            is_last = progress.step == run.max_steps
            if config.val.interval and (progress.step % config.val.interval == 0 or is_last):
                if not validate(run, row):
                    return
            run.metrics.log(row)
            run.checkpoints.poll()  # where a save beside the training has failed, the run ends here
            asked = run.requests.agree()
            if asked or run.save_is_due():
                run.save()
            if asked.stop:
                return
            collect(progress.step)
    if config.ckpt.at_end:
        run.save()  # does nothing if this step was just saved, or is the one resumed from
    run.checkpoints.wait()


def _begin(run: Run) -> bool:
    """Does what comes before the first step. Returns whether to go on: a stop may have been asked for meanwhile."""
    row = run.pending.row
    if row is None and run.resumed_from is None and run.config.val.interval and run.config.val.at_start:
        row = {"step": 0}
    if row is not None:  # a validation before the first step, or one that was broken off before the resume
        if not validate(run, row):
            return False
        run.pending.row = None
        run.metrics.log(row)
    asked = run.requests.agree()
    if asked:
        run.save()
    return not asked.stop


def take_step(run: Run, batch: GlobalBatch) -> dict[str, float] | None:
    """Runs one step, advances every counter and the lr, and returns the step's row of metrics; None = stopped within it."""
    progress, rates, pending = run.progress, learning_rates(run.optimizer), run.pending
    done, loss_sum = pending.micro_step, pending.loss_sums[run.world.rank] if pending.micro_step else 0.0
    pending.clear()
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
        early=run.config.optim.on_nonfinite == "stop",
        done=done,
        loss_sum=loss_sum,
        pause=partial(_pause_cycle, run) if run.config.ckpt.on_signal == "now" else None,
    )
    if result is None:
        return None
    if not result.finite:
        _not_finite(run, result, progress.step + 1)
    progress.advance(batch, applied=result.finite)
    run.schedule.apply(progress.step)
    return result.measures | {
        "step": progress.step,
        "loss": result.loss,
        **rates,
        "grad_norm": result.grad_norm,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "epoch": progress.epoch,
    }


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns "lr", that of the first group, and "lr_<group>" for the groups that peak elsewhere (Muon's AdamW half)."""
    first, *others = optimizer.param_groups
    peak = first.get("initial_lr", first["lr"])
    apart = [group for group in others if group.get("initial_lr", group["lr"]) != peak]
    return {"lr": first["lr"]} | {f"lr_{group['name']}": group["lr"] for group in apart}


def _pause_cycle(run: Run, micro_step: int, loss_sum: Tensor) -> bool:
    """Serves requests between two micro-steps. Returns whether to stop."""
    asked = run.requests.agree()
    if asked:
        run.save_in_cycle(micro_step, loss_sum.item())
    return asked.stop


def _not_finite(run: Run, result: StepResult, step: int) -> None:
    found = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
    if run.config.optim.on_nonfinite == "stop":
        is_torn = isinstance(run.optimizer, OffloadOptimizer) and run.optimizer.is_torn
        weights = "are lost, as the update had begun" if is_torn else f"are those of step {step - 1}"
        raise TrainingError(
            f"{found} is not finite; the weights {weights}. Lower optim.lr, look at this batch (data.log_ids), or leave "
            f"such updates out with --optim.on-nonfinite skip"
        )
    logger.warning(f"{found}: update skipped")


def speed(run: Run, batch: GlobalBatch, seconds: float, share: float) -> dict[str, float]:
    """Returns the throughput of this step, over all ranks.

    Earlier processes' work is never counted: `share` is the part of the step's micro-steps that this one has done.
    """
    return {
        "tokens_per_second": batch.tokens * share / seconds,
        "step_seconds": seconds,
        "peak_memory_gib": devices.peak_memory_gib(run.device),
    }


def validate(run: Run, row: Row) -> bool:
    """Adds what is measured on held-out data to the row. Returns False if a stop came first: then row and checkpoint are written.

    Requests are served before each batch. A checkpoint written here knows that its row lacks the validation, and the
    resumed run does that first.
    """

    def pause() -> bool:
        asked = run.requests.agree()
        if asked and not asked.stop:
            run.save_before_validation(row)
        return asked.stop

    measured = run.supply.measure(run, pause)
    if measured is None:
        if len(row) > 1:
            run.metrics.log(row)
        run.save_before_validation(row)
        run.pending.row = row
        return False
    row |= measured
    run.validated = (run.progress.step, {name: measured[name] for name in BEST_METRICS if name in measured})
    return True


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
