"""`trainer sft`: supervised fine-tuning from a validated config."""

from functools import partial

from trainer.config.load import Loaded
from trainer.config.run import SFTConfig
from trainer.sft.supply import supply
from trainer.train import setup
from trainer.train.cross_entropy import cross_entropy
from trainer.train.loop import fit


def run(loaded: Loaded[SFTConfig], *, owns_process: bool = False) -> int:
    """Trains to the end (or to stop_step), resuming first if the config says so. Every rank calls it.

    Returns the exit code: 0, or that of a run that was asked to stop and has saved (`ckpt.signal_exit_code`).

    owns_process: the process ends with the run, so signals that come after a stop are of no interest.

    Raises:
        TrainerError: what stands in the way, before or during training.
    """
    loss_function = partial(cross_entropy, chunk_tokens=loaded.config.model.loss_chunk_tokens)
    with setup.start(loaded, supply(loss_function), owns_process=owns_process) as run:
        fit(run)
        return setup.finish(run)
