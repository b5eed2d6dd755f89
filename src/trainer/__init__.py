"""SFT and RL training for language models with exact resumes.

The public names below are imported when they are first used, so that ``import trainer`` itself costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "SFTConfig": "trainer.config.run",
    "load_config": "trainer.config.load",
    "TrainerError": "trainer.errors",
    "ConfigError": "trainer.errors",
    "LaunchError": "trainer.errors",
    "DataError": "trainer.errors",
    "ModelError": "trainer.errors",
    "CheckpointError": "trainer.errors",
    "IncompleteCheckpoint": "trainer.errors",
    "CorruptCheckpoint": "trainer.errors",
    "CheckpointMismatch": "trainer.errors",
    "TrainingError": "trainer.errors",
    "Muon": "trainer.optim.muon",
    "SignSGD": "trainer.optim.sign_sgd",
    "Schedule": "trainer.optim.schedule",
    "ScheduleLR": "trainer.optim.torch_scheduler",
    "CPUOffloadOptimizer": "trainer.optim.offload.state",
    "FullCPUOffloadOptimizer": "trainer.optim.offload.full",
    "OptimizerState": "trainer.optim.state",
    "AppState": "trainer.checkpoint.app_state",
    "CheckpointManager": "trainer.checkpoint.manager",
    "linear_cross_entropy": "trainer.kernels.linear_cross_entropy",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
