"""Another trainer's checkpoint made one of ours: a run of the given config that stands where that one stood.

The state is put into a model, an optimizer and a loader as `setup` would build them, and saved as any run saves: so what
comes out is what a resume expects. Runs in one process on CPU, with memory for the weights and the optimizer's state.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.importers.dcp_states import read_dcp
from trainer.checkpoint.importers.foreign import ForeignState
from trainer.checkpoint.importers.hf_trainer import read_hf
from trainer.checkpoint.importers.recognise import Kind, recognise
from trainer.checkpoint.importers.schedules import fitting_schedule, schedule_of_torch
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.rules import check_steps
from trainer.config.run import RunConfig
from trainer.config.train import CkptConfig
from trainer.core.distributed import World
from trainer.data.build import build_data
from trainer.data.loader import BatchLoader
from trainer.errors import CheckpointError, CheckpointMismatch
from trainer.models.base import CausalLM
from trainer.models.build import build_model
from trainer.models.files import resolve_model_dir
from trainer.models.hf_model import transformers_on_meta
from trainer.models.load import load_weights, tied_names
from trainer.models.roles import parameter_roles
from trainer.models.spec import DecoderSpec, decoder_spec, read_config
from trainer.models.state import ModelState
from trainer.models.tokenizer import load_tokenizer, vocabulary_rows
from trainer.optim.build import build_groups, build_optimizer, build_schedule
from trainer.optim.groups import DECAYED
from trainer.optim.schedule import Schedule, ScheduleState
from trainer.optim.state import OptimizerState
from trainer.train.progress import Progress

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class Imported:
    """What was written, and what to know about it."""

    path: Path
    kind: str
    step: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: Path,
    out: Path,
    config: RunConfig,
    *,
    step: int | None = None,
    fresh_optimizer: bool = False,
    schedule_of_config: bool = False,
) -> Imported:
    """Writes ``out/checkpoints/step_NNNNNNNN`` from the foreign checkpoint `source`.

    config: of the run that is to go on; its model.name has the architecture, its data are those that come next. step: the
    updates done, where the files disagree or do not say. fresh_optimizer: take weights alone, as step 0. schedule_of_config:
    let the config's schedule apply from here on, whatever the saved learning rates are.

    Raises:
        CheckpointError: the source cannot be imported exactly; the message names what stands in the way.
    """
    if config.optim.type != "adamw":
        raise CheckpointError(f'optim.type = "{config.optim.type}": only AdamW states can be imported')
    recognised = recognise(source)
    kind = recognised.kind if recognised else Kind.OTHER
    if recognised is None or kind is Kind.OTHER:
        why = recognised.reason if recognised else "nothing in it is known"
        raise CheckpointError(f"{source} cannot be imported: {why}")
    model_dir = resolve_model_dir(config.model.name)
    if kind is Kind.WEIGHTS or fresh_optimizer:
        return _import_weights(source, out, config, model_dir, kind, fresh_optimizer)
    spec = _spec(config, model_dir)
    _check_architecture(source, model_dir, spec)
    if kind is Kind.DCP:
        state = read_dcp(source, spec, step)
    else:
        state = read_hf(source, kind, transformers_on_meta(model_dir), step)
    return _write(state, out, config, schedule_of_config)


def _import_weights(
    source: Path, out: Path, config: RunConfig, model_dir: Path, kind: Kind, fresh_optimizer: bool
) -> Imported:
    if not fresh_optimizer:
        raise CheckpointError(
            f"{source} holds weights and no optimizer state, so no run can go on from it exactly. Start from its weights "
            f"with --model.name {source}; or give --fresh-optimizer for a checkpoint of step 0 with new optimizer state"
        )
    if kind is Kind.DCP:
        raise CheckpointError(f"{source}: --fresh-optimizer takes weights from safetensors only")
    _check_architecture(source, model_dir, _spec(config, model_dir))
    note = "weights only: step 0, new optimizer state, the config's learning rates and schedule"
    state = ForeignState("weights", 0, source, [], lambda name, entry: None, {}, notes=[note])
    return _write(state, out, config, schedule_of_config=True)


# -- what must fit ---------------------------------------------------------------------------------------------------------


def _spec(config: RunConfig, model_dir: Path) -> DecoderSpec | None:
    if config.model.impl != "native":
        return None
    return decoder_spec(read_config(model_dir), where=str(model_dir / "config.json"))


_INCIDENTAL = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "architectures"})


def _check_architecture(source: Path, model_dir: Path, spec: DecoderSpec | None) -> None:
    """Refuses a checkpoint whose own config.json describes another model than the run's: shapes alone do not tell.

    Raises:
        CheckpointMismatch: naming what differs.
    """
    if not (source / "config.json").exists() or source.resolve() == model_dir.resolve():
        return
    if spec is not None:
        ours, theirs = asdict(spec), asdict(decoder_spec(read_config(source), where=str(source / "config.json")))
    else:
        ours, theirs = read_config(model_dir), read_config(source)
    ignored = _INCIDENTAL | {"vocab_size", "init_std", "initializer_range"}  # a table that grew is told by its shape
    names = [name for name in ours if name not in ignored and ours[name] != theirs.get(name)]
    if names:
        lines = [f"  {name}: {source} {theirs.get(name)!r}, {model_dir} {ours[name]!r}" for name in names]
        raise CheckpointMismatch("\n".join(["the checkpoint is of another model than model.name:", *lines]))


# -- building and writing ------------------------------------------------------------------------------------------------


def _write(state: ForeignState, out: Path, config: RunConfig, schedule_of_config: bool) -> Imported:
    device, world = torch.device("cpu"), World()
    tokenizer = load_tokenizer(config.model) if config.data.fake is None else None
    vocab_size = vocabulary_rows(tokenizer) if tokenizer is not None else 0
    model = _model(state, config, device, vocab_size)
    config = _with_groups(config, state, model)
    optimizer = build_optimizer(
        config.optim, build_groups(config.optim, model.named_parameters(), parameter_roles(model))
    )
    _fill_optimizer(optimizer, state, model)

    data = build_data(config.data, tokenizer=tokenizer, seed=config.seed, world=world)
    loader = BatchLoader(data.train, config.data, seed=config.seed, rank=0, world_size=1)
    max_steps = config.max_steps or loader.batches_in_epochs(config.epochs or 1)
    check_steps(config, max_steps)
    configured = build_schedule(config.scheduler, lr=config.optim.lr, total_steps=max_steps)
    chosen = configured if schedule_of_config else _schedule(state, configured)
    notes = [*state.notes, *_notes(state, chosen, configured)]
    schedule = ScheduleState(chosen, optimizer.param_groups)
    schedule.apply(state.step)
    progress = Progress(step=state.step, tokens=state.tokens, samples=state.samples)
    app = AppState(
        model=ModelState(model),
        optimizer=OptimizerState(optimizer),
        schedule=schedule,
        progress=progress,
        data=loader,
    )
    described = {
        "config": config.model_dump(mode="json"),
        "data": loader.state_dict(),
        "device": config.runtime.device,
        "imported": {"kind": state.kind, "notes": notes},
    }
    final = out / "checkpoints" / f"step_{state.step:08d}"
    if final.exists():
        raise CheckpointError(f"{final} exists; give a directory that has no such step")
    path = CheckpointManager(out, CkptConfig(), app, describe=lambda: described).save(state.step)
    loader.close()
    return Imported(path, state.kind, state.step, tuple(notes))


def _model(state: ForeignState, config: RunConfig, device: torch.device, vocab_size: int) -> CausalLM:
    """Returns the model with the foreign weights, in float32."""
    random = config.model.model_copy(update={"random_init": True})
    model = build_model(random, mesh=None, device=device, seed=config.seed, vocab_size=vocab_size)
    if isinstance(state.weights, Path):
        load_weights(model, state.weights, seed=config.seed)
        return model
    tensors = {name: state.weights[name] for name in _drop_tied(state.weights, model)}
    wanted = ModelState(model).state_dict()
    _check_names(tensors, wanted, f"the weights of the {state.kind} checkpoint")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(_shaped(tensors[name](), tensor, name))
    return model


def _drop_tied(weights: Mapping[str, Any], model: CausalLM) -> list[str]:
    """Returns the names without the output weight of a model that ties it, which some trainers save a second time."""
    tied = tied_names(model)
    return [name for name in weights if tied is None or name != tied[1]]


def _check_names(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    lines = [f"  missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"  surplus: {name}" for name in sorted(found.keys() - wanted.keys())]
    if lines:
        more = [f"  ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise CheckpointMismatch("\n".join([f"{what} are not those of model.name:", *lines[:10], *more]))


def _shaped(tensor: Tensor, target: Tensor, name: str) -> Tensor:
    if tensor.shape != target.shape:
        raise CheckpointMismatch(f"{name}: the checkpoint has {list(tensor.shape)}, the model {list(target.shape)}")
    if not tensor.is_floating_point():
        raise CheckpointMismatch(f"{name}: the checkpoint has {tensor.dtype}, weights and moments are floats")
    return tensor


def _with_groups(config: C, state: ForeignState, model: CausalLM) -> C:
    """Returns the config with the optimizer's settings of the foreign groups, and with the rule that makes its groups.

    Raises:
        CheckpointError: no rule of ours (optim.decay) has groups whose parameters all had the same entries.
    """
    if not state.groups:
        return config
    entries = {name: dict(group.entries) for group in state.groups for name in group.names}
    tied = tied_names(model)
    if tied is not None and tied[0] not in entries and tied[1] in entries:
        entries[tied[0]] = entries.pop(tied[1])
    roles = parameter_roles(model)
    _check_names(entries, dict.fromkeys(roles), "the parameters of the optimizer's groups")
    first = next(iter(entries.values()))
    for name, own in entries.items():
        odd = next((key for key in first if key != "weight_decay" and own[key] != first[key]), None)
        if odd:
            raise CheckpointError(
                f"{name} had {odd} = {own[odd]} and others {first[odd]}: this trainer has one {odd} for all parameters"
            )
    policies = dict.fromkeys([config.optim.decay, *DECAYED])
    for policy in policies:
        decayed = {entries[name]["weight_decay"] for name in roles if roles[name] in DECAYED[policy]}
        others = {entries[name]["weight_decay"] for name in roles if roles[name] not in DECAYED[policy]}
        if len(decayed) <= 1 and others <= {0.0}:
            optim = {"lr": first["initial_lr"], "betas": tuple(first["betas"]), "eps": first["eps"], "decay": policy}
            optim["weight_decay"] = next(iter(decayed), 0.0)
            return config.model_copy(update={"optim": config.optim.model_copy(update=optim)})
    values = sorted({value["weight_decay"] for value in entries.values()})
    shown = [f"{name} {entry['weight_decay']}" for name, entry in entries.items()]
    raise CheckpointError(
        f"weight decay {values} is spread over the parameters in a way that no optim.decay makes "
        f"({', '.join(DECAYED)}): {', '.join(shown[:6])}, ..."
    )


@torch.no_grad()
def _fill_optimizer(optimizer: torch.optim.Optimizer, state: ForeignState, model: CausalLM) -> None:
    """Copies moments and step counters; a parameter that never had a gradient keeps its zeros."""
    tied = tied_names(model)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            theirs = tied[1] if tied is not None and name == tied[0] and name not in state.updates else name
            if theirs not in state.updates:
                continue
            live = optimizer.state[parameter]
            live["step"].fill_(state.updates[theirs])
            for entry in ("exp_avg", "exp_avg_sq"):
                moment = state.moment(theirs, entry)
                if moment is not None:
                    live[entry].copy_(_shaped(moment, live[entry], f"{entry} of {name}"))


def _schedule(state: ForeignState, configured: Schedule) -> Schedule:
    """Returns the schedule under which the saved lr is right.

    Raises:
        CheckpointError: neither the saved schedule nor the config's gives it.
    """
    entries = state.groups[0].entries
    peak = entries["initial_lr"]
    factor = entries["lr"] / peak if peak else 0.0
    points = [(step, lr / peak) for step, lr in state.lr_points if peak]
    saved = schedule_of_torch(state.scheduler) if state.scheduler else None
    if saved is None:
        return fitting_schedule(configured, step=state.step, factor=factor, points=points, horizon=state.horizon)
    if saved.type == "constant":
        saved = replace(saved, total_steps=max(configured.total_steps, saved.total_steps))
    fitting_schedule(saved, step=state.step, factor=factor, points=points, horizon=None)  # damaged lr is refused
    return saved


def _notes(state: ForeignState, chosen: Schedule, configured: Schedule) -> list[str]:
    notes = ["data: from the beginning of this config's order; the other trainer's position means nothing in it"]
    if state.groups:
        lr, now = state.groups[0].entries["lr"], state.groups[0].entries["initial_lr"] * chosen.factor(state.step)
        same = math.isclose(lr, now, rel_tol=1e-9)
        notes.append(f"lr {now:.9g} at step {state.step}" + ("" if same else f" (the files have {lr:.9g})"))
    if chosen != configured:
        notes.append(f"schedule: {_changes(configured, chosen)}; it is the checkpoint's and wins on a resume")
    lacking = [] if not state.groups else [n for g in state.groups for n in g.names if n not in state.updates]
    if lacking:
        notes.append(f"{len(lacking)} parameters never had a gradient ({lacking[0]}, ...): their moments are zero")
    return notes


def _changes(a: Schedule, b: Schedule) -> str:
    left, right = asdict(a), asdict(b)
    return ", ".join(f"{name} {right[name]} (config {left[name]})" for name in left if left[name] != right[name])
