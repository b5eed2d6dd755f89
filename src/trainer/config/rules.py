"""Every rule that joins two fields of a config.

A rule that needs more than the config (files, the number of ranks, the length of an epoch) is checked at launch.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import PydanticCustomError

from trainer.config.problems import RULE, Problem, config_error
from trainer.config.schema import lookup, no_such_key
from trainer.config.train import OptimConfig

if TYPE_CHECKING:
    from trainer.config.run import RunConfig, SFTConfig


def check_sft(config: "SFTConfig") -> None:
    """Holds a config of supervised fine-tuning against its rules.

    Raises:
        PydanticCustomError: of type RULE, with every broken one.
    """
    raise_all(config, [*common_rules(config), *_data_rules(config)])


def common_rules(c: "RunConfig") -> Iterator["Broken"]:
    """The rules of every kind of run."""
    yield from _run_rules(c)
    yield from _step_rules(c, c.max_steps)
    yield from _optim_rules(c)
    yield from _resume_rules(c)


def check_steps(config: "RunConfig", max_steps: int) -> None:
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


def check_schedule(config: "RunConfig", steps: int, what: str) -> None:
    """The rules about the schedule for a length that only a launch knows.

    Raises:
        ConfigError: it does not fit into ``steps``, the steps that are ``what``.
    """
    problems = [Problem("", f"{broken.text} ({steps} steps are {what})") for broken in _schedule_rules(config, steps)]
    if problems:
        raise config_error(problems)


class Broken(NamedTuple):
    keys: tuple[str, ...]
    """The fields that the rule joins; shown with their values and origins."""
    text: str
    """What is wrong and what to do."""


def raise_all(config: "RunConfig", rules: Iterable[Broken]) -> None:
    """Raises one error that tells of all broken rules, if there are any."""
    if rules := list(rules):
        broken = [(rule.text, {key: _get(config, key) for key in rule.keys}) for rule in rules]
        raise PydanticCustomError(RULE, "{text}", {"text": "; ".join(text for text, _ in broken), "broken": broken})


def _get(config: "RunConfig", key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node[int(name)] if name.isdecimal() else getattr(node, name)
    return node


def _run_rules(c: "RunConfig") -> Iterator[Broken]:
    if not c.model.name:
        extra = " (random_init reads its config.json)" if c.model.random_init else ""
        yield Broken(("model.name",), f"model.name is required: a local model directory or a hub name{extra}")
    if (c.max_steps is None) == (c.epochs is None):
        yield Broken(
            ("max_steps", "epochs"),
            "set exactly one of max_steps and epochs; a flag takes back what a file sets: --epochs none",
        )
    if c.parallel.dp_shard == 0:
        yield Broken(
            ("parallel.dp_shard",), "parallel.dp_shard must be -1 (all ranks of a replica group) or a number of ranks"
        )
    if c.model.attention == "varlen" and c.runtime.device == "cpu":
        yield Broken(
            ("model.attention", "runtime.device"),
            'varlen attention needs a GPU: use model.attention = "auto" or "sdpa"',
        )
    elif c.model.attention == "varlen" and c.model.impl == "hf":
        yield Broken(
            ("model.attention", "model.impl"),
            'varlen attention belongs to model.impl = "native", transformers\' modules have their own: use '
            'model.attention = "auto"',
        )
    elif c.model.attention == "varlen" and c.model.dtype == "float32":
        yield Broken(
            ("model.attention", "model.dtype"),
            'varlen attention computes in 16 bits: use model.dtype = "bfloat16", or model.attention = "auto"',
        )
    only_interval = not (c.ckpt.micro_interval or c.ckpt.minutes or c.ckpt.at)
    if c.ckpt.keep_every and c.ckpt.interval and only_interval and c.ckpt.keep_every % c.ckpt.interval:
        yield Broken(
            ("ckpt.keep_every", "ckpt.interval"),
            "ckpt.keep_every must be a multiple of ckpt.interval: no other steps are saved",
        )
    if c.ckpt.keep_best and not (c.val.interval and c.ckpt.keep_last):
        yield Broken(
            ("ckpt.keep_best", "val.interval", "ckpt.keep_last"),
            "ckpt.keep_best needs validation (val.interval), and ckpt.keep_last: without it every checkpoint is kept",
        )


def _step_rules(c: "RunConfig", max_steps: int | None) -> Iterator[Broken]:
    yield from _schedule_rules(c, max_steps)
    if max_steps is None:
        return
    if c.stop_step is not None and c.stop_step > max_steps:
        yield Broken(
            ("stop_step", "max_steps"),
            "stop_step lies beyond the end of the run: lower it, or unset it to train to max_steps",
        )
    if any(step > max_steps for step in c.ckpt.at):
        yield Broken(("ckpt.at", "max_steps"), "ckpt.at names a step beyond the end of the run: leave it out")


def _schedule_rules(c: "RunConfig", max_steps: int | None) -> Iterator[Broken]:
    s = c.scheduler
    if s.decay_steps is not None and s.type != "linear":
        yield Broken(
            ("scheduler.decay_steps", "scheduler.type"),
            f'a {s.type} schedule has no decay_steps: set scheduler.decay_steps = "none", or scheduler.type = "linear"',
        )
    if s.min_lr > c.optim.lr:
        yield Broken(("scheduler.min_lr", "optim.lr"), "scheduler.min_lr must not exceed the peak, optim.lr")
    if max_steps is None:
        return
    decay_steps = s.decay_steps if s.type == "linear" and s.decay_steps else 0
    if s.warmup_steps > max_steps:
        yield Broken(
            ("scheduler.warmup_steps", "max_steps"),
            "the warmup outlasts the run: lower scheduler.warmup_steps or raise max_steps",
        )
    elif s.warmup_steps + decay_steps > max_steps:
        yield Broken(
            ("scheduler.warmup_steps", "scheduler.decay_steps", "max_steps"),
            f"warmup and decay take {s.warmup_steps + decay_steps} steps, more than the run has: lower one or raise max_steps",
        )


_MUON_KEYS = ("adamw_lr", "nesterov", "adjust_lr", "ns_coefficients", "ns_steps", "implementation")


def _optim_rules(c: "RunConfig") -> Iterator[Broken]:
    optim, defaults = c.optim, OptimConfig()
    if optim.type == "adamw" and optim.momentum is not None:
        yield Broken(
            ("optim.momentum", "optim.type"), 'optim.momentum belongs to optim.type = "sgd"; adamw has optim.betas'
        )
    if optim.type in ("sgd", "sign_sgd") and optim.betas != defaults.betas:
        yield Broken(
            ("optim.betas", "optim.type"),
            f'optim.betas belong to optim.type = "adamw"; {optim.type} has optim.momentum',
        )
    if optim.type in ("sgd", "sign_sgd") and optim.eps != defaults.eps:
        yield Broken(("optim.eps", "optim.type"), f'optim.eps belongs to optim.type = "adamw"; {optim.type} has none')
    if optim.type == "custom":
        for name in ("betas", "eps", "momentum"):
            if getattr(optim, name) != getattr(defaults, name):
                yield Broken(
                    (f"optim.{name}", "optim.type"),
                    f"optim.{name} is not given to optim.class_path: put it in optim.args",
                )
    if optim.type != "muon":
        for name in _MUON_KEYS:
            if getattr(optim, name) != getattr(defaults, name):
                yield Broken((f"optim.{name}", "optim.type"), f'optim.{name} belongs to optim.type = "muon"')
    if (optim.type == "custom") != (optim.class_path is not None):
        yield Broken(
            ("optim.type", "optim.class_path"), 'optim.class_path and optim.type = "custom" go together: set both'
        )
    if optim.args and optim.type != "custom":
        yield Broken(("optim.args", "optim.type"), 'optim.args belong to optim.type = "custom"')
    if c.scheduler.decay_shape != "linear" and c.scheduler.type != "linear":
        yield Broken(
            ("scheduler.decay_shape", "scheduler.type"), 'scheduler.decay_shape belongs to scheduler.type = "linear"'
        )


SKIPS = ("skip_optimizer", "skip_scheduler", "skip_dataloader", "skip_progress")
"""Fields of [ckpt] that leave a part of the checkpoint out of a resume."""


def _skip_rules(c: "RunConfig") -> Iterator[Broken]:
    keys = tuple(f"ckpt.{name}" for name in SKIPS if getattr(c.ckpt, name))
    if not keys:
        return
    if c.resume is None:
        yield Broken(keys, f"{keys[0]} leaves something out of a resume, and this is none: add --resume, or drop it")
    elif c.resume.if_exists:
        yield Broken(
            (*keys, "resume.if_exists"),
            f"with resume.if_exists every further start would leave it out again: give {keys[0]} once, with --resume",
        )
    if c.ckpt.skip_progress and c.resume and not is_fork(c):
        yield Broken(
            ("ckpt.skip_progress", "resume.dir", "output_dir"),
            "skip_progress counts from step 0 again, and in the same directory the run's old, higher steps would pass "
            "for newer ones: name the old run in resume.dir and set another output_dir",
        )


def _resume_rules(c: "RunConfig") -> Iterator[Broken]:
    yield from _skip_rules(c)
    if c.resume is None:
        return
    source = c.resume.dir
    if source and c.resume.step is not None and re.fullmatch(r"step_\d+", os.path.basename(os.path.normpath(source))):
        yield Broken(
            ("resume.dir", "resume.step"),
            "resume.dir already names one step: unset resume.step, or give the run's directory",
        )
    if c.overwrite and (source is None or _inside(source, c.output_dir)):
        yield Broken(
            ("overwrite", "resume.dir", "output_dir"),
            "overwrite moves the run aside that is to be resumed: drop one of the two, or set another output_dir",
        )
    for name in c.resume.override:
        key = tuple(name.split("."))
        if lookup(type(c), key) is None:
            yield Broken(("resume.override",), f"resume.override names {name}: {no_such_key(type(c), key)}")


def is_fork(config: "RunConfig") -> bool:
    """Whether the run begins from another run's checkpoint, in a directory of its own."""
    source = config.resume.dir if config.resume else None
    # checkpoints/ may be a link to another disk
    own = (config.output_dir, os.path.join(config.output_dir, "checkpoints"))
    return source is not None and not any(_inside(source, directory) for directory in own)


def _inside(path: str, directory: str) -> bool:
    path, directory = os.path.realpath(path), os.path.realpath(directory)
    return os.path.commonpath([path, directory]) == directory


def _data_rules(c: "RunConfig") -> Iterator[Broken]:
    d = c.data
    if bool(d.sources) == (d.fake is not None):
        yield Broken(
            ("data.sources", "data.fake"),
            "set exactly one of data.sources ([[data.sources]] tables) and data.fake ([data.fake])",
        )
    if d.micro_batch_size > d.batch_size:
        yield Broken(
            ("data.micro_batch_size", "data.batch_size"),
            "a micro-batch larger than the whole batch is mostly padding: lower data.micro_batch_size",
        )
    if len({source.weight is None for source in d.sources}) > 1:
        keys = tuple(f"data.sources.{index}.weight" for index in range(len(d.sources)))
        yield Broken(keys, "give all data.sources a weight, or none of them")
    yield from _val_rules(c)


def _val_rules(c: "RunConfig") -> Iterator[Broken]:
    d = c.data
    if d.fake is not None and (d.val_sources or d.val_documents):
        yield Broken(
            ("data.val_sources", "data.val_documents", "data.fake"),
            "data.fake brings its own held-out documents: unset the other two",
        )
    elif d.val_sources and d.val_documents:
        yield Broken(
            ("data.val_sources", "data.val_documents"), "set one of data.val_sources and data.val_documents, not both"
        )
    elif c.val.interval and d.fake is None and not d.val_sources and not d.val_documents:
        yield Broken(
            ("val.interval", "data.val_sources", "data.val_documents"),
            "there is nothing to validate on: set data.val_documents or data.val_sources, or val.interval = 0",
        )
    if any(source.weight is not None for source in d.val_sources):
        yield Broken(
            ("data.val_sources",),
            "validation reads every held-out row once: a weight in data.val_sources means nothing",
        )
