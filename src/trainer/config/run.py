"""The roots of a config: supervised fine-tuning and reinforcement learning. The rules that join fields are in `rules`."""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trainer.config.base import Section
from trainer.config.data import DataConfig, MeasureConfig, ValConfig
from trainer.config.model import ModelConfig, ParallelConfig
from trainer.config.rl import EngineConfig, EnvConfig, EvalConfig, ObjectiveConfig, RLSection
from trainer.config.rules import check_sft
from trainer.config.rules_rl import check_rl
from trainer.config.train import (
    CkptConfig,
    LogConfig,
    OptimConfig,
    ResumeConfig,
    RuntimeConfig,
    SchedulerConfig,
    WandbConfig,
)


class RunConfig(Section):
    """What every kind of run has."""

    output_dir: str = Field(default="runs/default", min_length=1)
    """Directory of the run: config.toml, metrics.jsonl, logs/, checkpoints/, weights/, plots/."""
    overwrite: bool = False
    """Move an earlier run in `output_dir` aside instead of refusing to start."""
    seed: NonNegativeInt = 0
    """Root of all randomness: initialisation, data order, dropout."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run. One of `max_steps` and `epochs` is required."""
    epochs: int | None = Field(default=None, ge=1, le=10**6)
    """Passes over the data; max_steps follows from it."""
    stop_step: PositiveInt | None = None
    """End cleanly after this step; the schedule still aims at max_steps."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    val: MeasureConfig = MeasureConfig()
    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ckpt: CkptConfig = CkptConfig()
    resume: ResumeConfig | None = None
    wandb: WandbConfig = WandbConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class SFTConfig(RunConfig):
    """Supervised fine-tuning of a causal language model on conversations, completions or plain text."""

    val: ValConfig = ValConfig()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_sft(self)
        return self


class RLConfig(RunConfig):
    """Reinforcement learning: rollouts of environments, rewards, policy gradients."""

    val: EvalConfig = EvalConfig()
    rl: RLSection = RLSection()
    envs: tuple[EnvConfig, ...] = ()
    """Environments that prompts come from ([[envs]] tables)."""
    objective: ObjectiveConfig = ObjectiveConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_rl(self)
        return self


RL_TABLES = RLConfig.model_fields.keys() - SFTConfig.model_fields.keys()
"""Tables that only a config of reinforcement learning has."""
