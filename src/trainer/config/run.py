"""The roots of a config and every rule that joins two fields.

A rule that needs more than the config (files, the number of ranks, the length of an epoch) is checked at launch.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from trainer.config.base import Section
from trainer.config.data import DataConfig, ValConfig
from trainer.config.model import ModelConfig, ParallelConfig
from trainer.config.problems import RULE, Problem, config_error
from trainer.config.schema import lookup, no_such_key
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
    epochs: PositiveInt | None = None
    """Passes over the data; max_steps follows from it."""
    stop_step: PositiveInt | None = None
    """End cleanly after this step; the schedule still aims at max_steps."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    val: ValConfig = ValConfig()
    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    ckpt: CkptConfig = CkptConfig()
    resume: ResumeConfig | None = None
    wandb: WandbConfig = WandbConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class SFTConfig(RunConfig):
    """Supervised fine-tuning of a causal language model on conversations, completions or plain text."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        steps = _step_rules(self, self.max_steps)
        _raise_all(self, [*_run_rules(self), *steps, *_optim_rules(self), *_resume_rules(self), *_data_rules(self)])
        return self


def check_steps(config: RunConfig, max_steps: int) -> None:
    """The rules about ``max_steps`` once `epochs` has been turned into steps.

    Raises:
        ConfigError: the schedule or `stop_step` does not fit into ``max_steps``.
    """
    problems = [
        Problem("", f"{broken.text} (max_steps is {max_steps}, from epochs)")
        for broken in _step_rules(config, max_steps)
    ]
    if problems:
        raise config_error(problems)


def check_schedule(config: RunConfig, steps: int, what: str) -> None:
    """The rules about the schedule for a length that only a launch knows.

    Raises:
        ConfigError: it does not fit into ``steps``, the steps that are ``what``.
    """
    problems = [Problem("", f"{broken.text} ({steps} steps are {what})") for broken in _schedule_rules(config, steps)]
    if problems:
        raise config_error(problems)


class _Broken(NamedTuple):
    keys: tuple[str, ...]
    """The fields that the rule joins; shown with their values and origins."""
    text: str
    """What is wrong and what to do."""


def _raise_all(config: RunConfig, rules: list[_Broken]) -> None:
    if rules:
        broken = [(rule.text, {key: _get(config, key) for key in rule.keys}) for rule in rules]
        raise PydanticCustomError(RULE, "{text}", {"text": "; ".join(text for text, _ in broken), "broken": broken})


def _get(config: RunConfig, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node[int(name)] if name.isdecimal() else getattr(node, name)
    return node


def _run_rules(c: RunConfig) -> Iterator[_Broken]:
    if not c.model.name:
        extra = " (random_init reads its config.json)" if c.model.random_init else ""
        yield _Broken(("model.name",), f"model.name is required: a local model directory or a hub name{extra}")
    if (c.max_steps is None) == (c.epochs is None):
        yield _Broken(("max_steps", "epochs"), "set exactly one of max_steps and epochs")
    if c.parallel.dp_shard == 0:
        yield _Broken(
            ("parallel.dp_shard",), "parallel.dp_shard must be -1 (all ranks of a replica group) or a number of ranks"
        )
    if c.model.attention == "varlen" and c.runtime.device == "cpu":
        yield _Broken(
            ("model.attention", "runtime.device"),
            'varlen attention needs a GPU: use model.attention = "auto" or "sdpa"',
        )
    only_interval = not (c.ckpt.micro_interval or c.ckpt.minutes or c.ckpt.at)
    if c.ckpt.keep_every and c.ckpt.interval and only_interval and c.ckpt.keep_every % c.ckpt.interval:
        yield _Broken(
            ("ckpt.keep_every", "ckpt.interval"),
            "ckpt.keep_every must be a multiple of ckpt.interval: no other steps are saved",
        )
    if c.ckpt.keep_best and not (c.val.interval and c.ckpt.keep_last):
        yield _Broken(
            ("ckpt.keep_best", "val.interval", "ckpt.keep_last"),
            "ckpt.keep_best needs validation (val.interval), and ckpt.keep_last: without it every checkpoint is kept",
        )


def _step_rules(c: RunConfig, max_steps: int | None) -> Iterator[_Broken]:
    yield from _schedule_rules(c, max_steps)
    if max_steps is None:
        return
    if c.stop_step is not None and c.stop_step > max_steps:
        yield _Broken(
            ("stop_step", "max_steps"),
            "stop_step lies behind the end of the run: lower it, or unset it to train to max_steps",
        )
    if any(step > max_steps for step in c.ckpt.at):
        yield _Broken(("ckpt.at", "max_steps"), "ckpt.at names a step behind the end of the run: leave it out")


def _schedule_rules(c: RunConfig, max_steps: int | None) -> Iterator[_Broken]:
    s = c.scheduler
    if s.decay_steps is not None and s.type != "linear":
        yield _Broken(
            ("scheduler.decay_steps", "scheduler.type"),
            f'a {s.type} schedule has no decay_steps: set scheduler.decay_steps = "none", or scheduler.type = "linear"',
        )
    if s.min_lr > c.optim.lr:
        yield _Broken(("scheduler.min_lr", "optim.lr"), "scheduler.min_lr must not exceed the peak, optim.lr")
    if max_steps is None:
        return
    decay_steps = s.decay_steps if s.type == "linear" and s.decay_steps else 0
    if s.warmup_steps > max_steps:
        yield _Broken(
            ("scheduler.warmup_steps", "max_steps"),
            "the warmup outlasts the run: lower scheduler.warmup_steps or raise max_steps",
        )
    elif s.warmup_steps + decay_steps > max_steps:
        yield _Broken(
            ("scheduler.warmup_steps", "scheduler.decay_steps", "max_steps"),
            f"warmup and decay take {s.warmup_steps + decay_steps} steps, more than the run has: lower one or raise max_steps",
        )


_MUON_KEYS = ("adamw_lr", "nesterov", "adjust_lr", "ns_coefficients", "ns_steps")


def _optim_rules(c: RunConfig) -> Iterator[_Broken]:
    optim, defaults = c.optim, OptimConfig()
    if optim.type == "adamw" and optim.momentum is not None:
        yield _Broken(
            ("optim.momentum", "optim.type"), 'optim.momentum belongs to optim.type = "sgd"; adamw has optim.betas'
        )
    if optim.type in ("sgd", "sign_sgd") and optim.betas != defaults.betas:
        yield _Broken(
            ("optim.betas", "optim.type"),
            f'optim.betas belong to optim.type = "adamw"; {optim.type} has optim.momentum',
        )
    if optim.type != "muon":
        for name in _MUON_KEYS:
            if getattr(optim, name) != getattr(defaults, name):
                yield _Broken((f"optim.{name}", "optim.type"), f'optim.{name} belongs to optim.type = "muon"')
    if (optim.type == "custom") != (optim.class_path is not None):
        yield _Broken(
            ("optim.type", "optim.class_path"), 'optim.class_path and optim.type = "custom" go together: set both'
        )
    if optim.args and optim.type != "custom":
        yield _Broken(("optim.args", "optim.type"), 'optim.args belong to optim.type = "custom"')
    if c.scheduler.decay_shape != "linear" and c.scheduler.type != "linear":
        yield _Broken(
            ("scheduler.decay_shape", "scheduler.type"), 'scheduler.decay_shape belongs to scheduler.type = "linear"'
        )


SKIPS = ("skip_optimizer", "skip_scheduler", "skip_dataloader", "skip_progress")
"""Fields of [ckpt] that leave a part of the checkpoint out of a resume."""


def _skip_rules(c: RunConfig) -> Iterator[_Broken]:
    keys = tuple(f"ckpt.{name}" for name in SKIPS if getattr(c.ckpt, name))
    if not keys:
        return
    if c.resume is None:
        yield _Broken(keys, f"{keys[0]} leaves something out of a resume, and this is none: add --resume, or drop it")
    elif c.resume.if_exists:
        yield _Broken(
            (*keys, "resume.if_exists"),
            f"with resume.if_exists every further start would leave it out again: give {keys[0]} once, with --resume",
        )
    if c.ckpt.skip_progress and c.resume and not is_fork(c):
        yield _Broken(
            ("ckpt.skip_progress", "resume.dir", "output_dir"),
            "skip_progress counts from step 0 again, and in the same directory the run's old, higher steps would pass "
            "for newer ones: name the old run in resume.dir and set another output_dir",
        )


def _resume_rules(c: RunConfig) -> Iterator[_Broken]:
    yield from _skip_rules(c)
    if c.resume is None:
        return
    source = c.resume.dir
    if source and c.resume.step is not None and re.fullmatch(r"step_\d+", os.path.basename(os.path.normpath(source))):
        yield _Broken(
            ("resume.dir", "resume.step"),
            "resume.dir already names one step: unset resume.step, or give the run's directory",
        )
    if c.overwrite and (source is None or _inside(source, c.output_dir)):
        yield _Broken(
            ("overwrite", "resume.dir", "output_dir"),
            "overwrite moves the run aside that is to be resumed: drop one of the two, or set another output_dir",
        )
    for name in c.resume.override:
        key = tuple(name.split("."))
        if lookup(type(c), key) is None:
            yield _Broken(("resume.override",), f"resume.override names {name}: {no_such_key(type(c), key)}")


def is_fork(config: RunConfig) -> bool:
    """Whether the run begins from another run's checkpoint, in a directory of its own."""
    source = config.resume.dir if config.resume else None
    # checkpoints/ may be a link to another disk
    own = (config.output_dir, os.path.join(config.output_dir, "checkpoints"))
    return source is not None and not any(_inside(source, directory) for directory in own)


def _inside(path: str, directory: str) -> bool:
    path, directory = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([path, directory]) == directory


def _data_rules(c: RunConfig) -> Iterator[_Broken]:
    d = c.data
    if bool(d.sources) == (d.fake is not None):
        yield _Broken(
            ("data.sources", "data.fake"),
            "set exactly one of data.sources ([[data.sources]] tables) and data.fake ([data.fake])",
        )
    if d.micro_batch_size > d.batch_size:
        yield _Broken(
            ("data.micro_batch_size", "data.batch_size"),
            "a micro-batch larger than the whole batch is mostly padding: lower data.micro_batch_size",
        )
    if len({source.weight is None for source in d.sources}) > 1:
        keys = tuple(f"data.sources.{index}.weight" for index in range(len(d.sources)))
        yield _Broken(keys, "give all data.sources a weight, or none of them")
    yield from _val_rules(c)


def _val_rules(c: RunConfig) -> Iterator[_Broken]:
    d = c.data
    if d.fake is not None and (d.val_sources or d.val_documents):
        yield _Broken(
            ("data.val_sources", "data.val_documents", "data.fake"),
            "data.fake brings its own held-out documents: unset the other two",
        )
    elif d.val_sources and d.val_documents:
        yield _Broken(
            ("data.val_sources", "data.val_documents"), "set one of data.val_sources and data.val_documents, not both"
        )
    elif c.val.interval and d.fake is None and not d.val_sources and not d.val_documents:
        yield _Broken(
            ("val.interval", "data.val_sources", "data.val_documents"),
            "there is nothing to validate on: set data.val_documents or data.val_sources, or val.interval = 0",
        )
    if any(source.weight is not None for source in d.val_sources):
        yield _Broken(
            ("data.val_sources",),
            "validation reads every held-out row once: a weight in data.val_sources means nothing",
        )
