"""`trainer rl`: reinforcement learning from a validated config."""

from trainer.config.load import Loaded
from trainer.config.run import RLConfig
from trainer.rl.supply import RLSupply
from trainer.train import setup
from trainer.train.loop import fit


def run(loaded: Loaded[RLConfig], *, owns_process: bool = False) -> int:
    """Trains to the end (or to stop_step), resuming first if the config says so. Every rank calls it.

    Returns the exit code: 0, or that of a run that was asked to stop and has saved (`ckpt.signal_exit_code`).

    owns_process: the process ends with the run, so signals that come after a stop are of no interest.

    Raises:
        TrainerError: what stands in the way, before or during training.
    """
    with setup.start(loaded, RLSupply, owns_process=owns_process) as run:
        fit(run)
        return setup.finish(run)
