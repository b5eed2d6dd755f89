"""What a resumed run takes from its checkpoint and what from its config, decided before anything is built."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from trainer.config.arguments import parse_arguments
from trainer.config.compare import Difference, differences, within
from trainer.config.kinds import KINDS, kind_of_tables
from trainer.config.problems import explain
from trainer.config.rules import check_schedule
from trainer.config.run import RLConfig, RunConfig
from trainer.errors import CheckpointMismatch
from trainer.optim.groups import OVERRIDABLE

C = TypeVar("C", bound=RunConfig)

ORDER = ("data", "seed", "envs", "rl")
"""Config keys, and tables of them, that decide which samples come in which order."""

CUTS = ("data.batch_size", "data.epoch_end", "data.seq_len", "data.pack")
"""Config keys that decide how many batches an epoch has."""

DOCUMENTS = ("data.train_on", "data.train_on_prompt", "data.on_bad_row", "model.tokenizer", "model.chat_template")
"""Config keys that decide what the documents of the sources are: with them another `data.sources` is wanted as well."""

# What `ckpt.skip_*` leaves out: the owner that keeps its fresh state, and the config keys that describe it, for which
# this run's config then wins.
SKIPPED = {
    "skip_optimizer": ("optimizer", ("optim",)),
    "skip_scheduler": ("schedule", ("scheduler",)),
    "skip_dataloader": ("data", ORDER),
    "skip_progress": ("progress", ()),
}


@dataclass(frozen=True)
class ResumePlan:
    """What a checkpoint's config means for this run.

    Attributes:
        differences: every key that differs, and whose value is used.
        keep_group_entries: entries of the optimizer's groups for which this run's config wins.
        override_scheduler: the schedule is this run's, not the checkpoint's.
        override_data: keys that decide the order of samples for which this run's config wins.
        skip: owners of the checkpoint's state that are not loaded.
    """

    differences: tuple[Difference, ...] = ()
    keep_group_entries: frozenset[str] = frozenset()
    override_scheduler: bool = False
    override_data: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()


def plan(config: RunConfig, saved: Any) -> ResumePlan:
    """Compares the config in a checkpoint's manifest with this run's.

    Raises:
        CheckpointMismatch: there is none that can be read; the data order or the optimizer would be another one, and no
            override says so.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointMismatch(
            "the checkpoint's manifest holds no config: no `trainer sft` or `trainer rl` wrote it, and only the program that did "
            "knows how to go on from it"
        )
    kind = KINDS[kind_of_tables(saved)]
    try:
        before = kind.model_validate(saved)
    except ValidationError as error:
        raise CheckpointMismatch(
            f"the checkpoint's config cannot be read by this version: {error.errors()[0]['msg']} "
            f"at {'.'.join(map(str, error.errors()[0]['loc']))}"
        ) from error
    skipped = [SKIPPED[name] for name in SKIPPED if getattr(config.ckpt, name)]
    override = (*(config.resume.override if config.resume else ()), *(key for _, keys in skipped for key in keys))
    skip = frozenset(owner for owner, _ in skipped)
    if type(before) is not type(config) and not skip >= {"data", "progress"}:
        was, now = ("reinforcement learning" if isinstance(c, RLConfig) else "fine-tuning" for c in (before, config))
        raise CheckpointMismatch(
            f"the checkpoint is of {was}, this run is {now}: its place in the data means nothing here. Take over weights, "
            "optimizer and schedule alone with --ckpt.skip-dataloader --ckpt.skip-progress in an output_dir of its own "
            "(and --ckpt.skip-optimizer --ckpt.skip-scheduler to begin those anew as well)"
        )
    found = differences(before, config, override)
    conflicts = [f"  {difference}" for difference in found if difference.winner == "conflict"]
    if conflicts:
        raise CheckpointMismatch("\n".join(["this run cannot go on from the checkpoint as it is:", *conflicts]))
    if before.optim.type != config.optim.type and "optimizer" not in skip:
        raise CheckpointMismatch(
            f"the checkpoint was written with optim.type = {before.optim.type!r}, this run has {config.optim.type!r}: "
            f"optimizer state cannot be carried over; leave it out with --ckpt.skip-optimizer"
        )
    _check_length(config, found, skip)
    override_data = {name for name in override if name.split(".")[0] in ORDER}
    if any(within(key, override) for key in DOCUMENTS):
        override_data.add("data.sources")
    kept = [entry for key, entries in OVERRIDABLE.items() if within(key, override) for entry in entries]
    if within("optim.args", override):  # those left out now, too: they are the class's own defaults
        kept += [*parse_arguments(before.optim.args, "optim.args"), *parse_arguments(config.optim.args, "optim.args")]
    return ResumePlan(
        differences=tuple(found),
        keep_group_entries=frozenset(kept),
        override_scheduler=any(name.split(".")[0] == "scheduler" for name in override),
        override_data=frozenset(override_data),
        skip=skip,
    )


def _check_length(config: RunConfig, found: Sequence[Difference], skip: Set[str]) -> None:
    """Refuses to count `epochs` in batches of a kind that those already taken were not of.

    With half of one epoch trained in batches of 4, batches of 8 would come to the number of steps that are done.
    """
    cuts = [difference for difference in found if difference.key in CUTS]
    if config.epochs is not None and cuts and "progress" not in skip:
        lines = [f"  {cut.key}: checkpoint {cut.saved!r}, config {cut.current!r}" for cut in cuts]
        raise CheckpointMismatch(
            "\n".join(
                [f"epochs = {config.epochs} cannot be counted in steps across a change of how an epoch is cut:", *lines]
            )
            + "\nSay how many steps the run shall have in all, those of the checkpoint included: --epochs none --max-steps N"
        )


def start_of_schedule(config: RunConfig, plan: ResumePlan, step: int, max_steps: int) -> int:
    """Returns the step at which the schedule begins: 0, or with `ckpt.skip_scheduler` that of the resume.

    Raises:
        ConfigError: the config's warmup and decay do not fit into the steps that are left.
    """
    if "schedule" not in plan.skip or "progress" in plan.skip or step >= max_steps:
        return 0
    check_schedule(config, max_steps - step, "left for the new schedule of ckpt.skip_scheduler")
    return step


def effective(config: C, plan: ResumePlan, given: Mapping[str, str]) -> C:
    """Returns the config with the checkpoint's value wherever the checkpoint wins: what the run really trains with.

    given: where this run's values come from; see `origins`.

    Raises:
        CheckpointMismatch: the values of both sides, each sound by itself, break a rule together.
    """
    sections: dict[str, dict[str, Any]] = {}
    for difference in plan.differences:
        if difference.winner == "checkpoint":
            section, field = difference.key.split(".", 1)
            sections.setdefault(section, {})[field] = difference.saved
    if not sections:
        return config
    joined = config.model_copy(
        update={section: getattr(config, section).model_copy(update=fields) for section, fields in sections.items()}
    )
    try:
        type(config).model_validate(joined.model_dump(mode="json"))
    except ValidationError as error:
        problems = explain(type(config), error, origins(given, plan))
        raise CheckpointMismatch(
            "\n  ".join(["the checkpoint's values do not go together with this run's:", *map(str, problems)])
            + "\nTake the config's with --resume.override scheduler or --resume.override optim, or set these values anew"
        ) from error
    return joined


def origins(given: Mapping[str, str], plan: ResumePlan) -> dict[str, str]:
    """Returns where each value of the effective config comes from."""
    from_checkpoint = {
        difference.key: "checkpoint" for difference in plan.differences if difference.winner == "checkpoint"
    }
    return {**given, **from_checkpoint}
