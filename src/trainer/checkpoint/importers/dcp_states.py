"""prime-rl's and torchtitan's states in a DCP directory, under our names.

prime-rl writes one table "app": ``app.model.<name>``, ``app.optimizers.state.<name>.exp_avg``,
``app.optimizers.param_groups.0.lr``, ``app.scheduler...``, ``app.progress.step``; names are those of transformers.
torchtitan writes the weights at the top, ``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.<name>.lr``,
``lr_scheduler.last_epoch`` and ``train_state.step``; it has names of its own, and in Llama another order of the rows
of q_proj and k_proj (pairs of rotary channels side by side), in weights and moments alike.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.importers.dcp import DcpDirectory
from trainer.checkpoint.importers.foreign import ForeignGroup, ForeignState, agreed_step, check_adamw, update_count
from trainer.checkpoint.importers.recognise import mid_cycle_reason
from trainer.errors import CheckpointError
from trainer.models.spec import DecoderSpec

_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class _Names:
    """Where a trainer puts things, and how its names and tensors become ours."""

    kind: str
    model: str
    optimizer: str
    scheduler: str
    progress: str
    ours: Callable[[str], str]
    convert: Callable[[str, Tensor], Tensor]
    """(our name, weight or moment) -> it in our layout."""


def read_dcp(path: Path, spec: DecoderSpec | None, step: int | None) -> ForeignState:
    """Returns the state in a DCP directory of prime-rl or torchtitan.

    spec: the model of the run, where the native decoder knows it; torchtitan's names and layouts need it.

    Raises:
        CheckpointError: it is neither's, or of an optimizer or schedule that cannot be continued.
    """
    if not (path / ".metadata").exists() and (path / "trainer" / ".metadata").exists():
        path = path / "trainer"
    directory = DcpDirectory(path)
    names = _whose(directory, spec)
    weights = {
        names.ours(name.removeprefix(names.model)): name
        for name in directory.tensors
        if name.startswith(names.model) and not (names.model == "" and name.startswith(_NOT_WEIGHTS))
    }
    moments = _moments(directory, names)
    updates = {ours: update_count(directory.value(f"{key}step"), f"{path}: {ours}") for ours, key in moments.items()}
    groups = _groups(directory, names, set(moments))
    progress = directory.values(names.progress)
    middle = mid_cycle_reason(progress)
    if middle:
        raise CheckpointError(f"{path} was {middle}; import an earlier checkpoint")
    scheduler = directory.values(names.scheduler)
    counts = {f"{names.progress}step": progress["step"]} if type(progress.get("step")) is int else {}
    if type(scheduler.get("last_epoch")) is int:
        counts[f"{names.scheduler}last_epoch"] = scheduler["last_epoch"]

    def weight(ours: str) -> Callable[[], Tensor]:
        return lambda: names.convert(ours, directory.tensor(weights[ours]))

    def moment(ours: str, entry: str) -> Tensor | None:
        return names.convert(ours, directory.tensor(f"{moments[ours]}{entry}")) if ours in moments else None

    return ForeignState(
        kind=names.kind,
        step=agreed_step(counts, updates, step, str(path), next_step=frozenset({f"{names.progress}step"})),
        weights={ours: weight(ours) for ours in weights},
        groups=groups,
        moment=moment,
        updates=updates,
        scheduler=scheduler,
        tokens=_count(progress, "total_tokens", "ntokens_seen"),
        samples=_count(progress, "total_samples"),
    )


def _count(progress: Mapping[str, Any], *names: str) -> int:
    return next((progress[name] for name in names if type(progress.get(name)) is int), 0)


_NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader.")  # what lies beside torchtitan's weights


def _whose(directory: DcpDirectory, spec: DecoderSpec | None) -> _Names:
    names = directory.tensors
    if any(name.startswith("app.model.") for name in names):
        return _Names(
            kind="prime-rl",
            model="app.model.",
            optimizer="app.optimizers.",
            scheduler="app.scheduler.",
            progress="app.progress.",
            ours=lambda name: name,
            convert=lambda name, tensor: tensor,
        )
    if "tok_embeddings.weight" in names and any(name.startswith("optimizer.state.") for name in names):
        if spec is None or spec.family not in ("llama", "qwen3"):
            raise CheckpointError(
                f"{directory.path}: of torchtitan's models Llama and Qwen3 can be imported; the config's model is "
                f"{spec.family if spec else 'not one of the native decoder'}"
            )
        return _Names(
            kind="torchtitan",
            model="",
            optimizer="optimizer.",
            scheduler="lr_scheduler.",
            progress="train_state.",
            ours=lambda name: torchtitan_name(name, str(directory.path)),
            convert=lambda name, tensor: torchtitan_tensor(name, tensor, spec),
        )
    shown = ", ".join(sorted(names)[:3]) or "no tensors"
    what = (
        "weights without optimizer state" if "tok_embeddings.weight" in names else "neither prime-rl's nor torchtitan's"
    )
    raise CheckpointError(f"{directory.path}: a DCP directory with {what} (it has {shown}, ...); it cannot be imported")


def torchtitan_name(name: str, where: str) -> str:
    """Returns our name of a weight of torchtitan's Llama or Qwen3.

    Raises:
        CheckpointError: it is none.
    """
    plain = name.replace("attention.qkv_linear.", "attention.")
    if plain in _TOP:
        return _TOP[plain]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", plain)
    if match is None or match[2] not in _LAYER:
        raise CheckpointError(f"{where}: {name!r} is no weight of torchtitan's Llama or Qwen3; it cannot be imported")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}"


def torchtitan_tensor(name: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Returns a weight or moment in our layout: Llama's q_proj and k_proj rows with the rotary halves one after the other."""
    heads = {"q_proj.weight": spec.num_heads, "k_proj.weight": spec.num_kv_heads}.get(name.split("self_attn.")[-1])
    if heads is None or spec.family != "llama":
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _moments(directory: DcpDirectory, names: _Names) -> dict[str, str]:
    """Returns our parameter name -> the prefix of its AdamW state."""
    prefix, found = f"{names.optimizer}state.", {}
    for key in directory.tensors:
        if not key.startswith(prefix):
            continue
        name, _, entry = key.removeprefix(prefix).rpartition(".")
        if entry not in ("step", "exp_avg", "exp_avg_sq"):
            raise CheckpointError(
                f"{directory.path}: {key!r} is no state of AdamW (exp_avg, exp_avg_sq, step); states of other optimizers "
                "cannot be imported"
            )
        found.setdefault(name, set()).add(entry)
    if not found:
        raise CheckpointError(f"{directory.path} has no optimizer state under {prefix}; it cannot be imported")
    for name, entries in found.items():
        lacking = {"exp_avg", "exp_avg_sq"} - entries
        if lacking or not ("step" in entries or f"{prefix}{name}.step" in directory.objects):
            raise CheckpointError(f"{directory.path}: the optimizer state of {name!r} is incomplete: {sorted(entries)}")
    return {names.ours(name): f"{prefix}{name}." for name in found}


def _groups(directory: DcpDirectory, names: _Names, parameters: set[str]) -> list[ForeignGroup]:
    """Returns the groups: prime-rl's by number with their parameters, torchtitan's one for each parameter."""
    prefix, where = f"{names.optimizer}param_groups.", str(directory.path)
    by_group: dict[str, dict[str, Any]] = {}
    for key in (*directory.objects, *directory.tensors):
        if key.startswith(prefix):
            group, _, entry = key.removeprefix(prefix).rpartition(".")
            by_group.setdefault(group, {})[entry] = directory.value(key)
    groups = []
    for label, entries in by_group.items():
        members = entries.get("params") if label.isdecimal() else [label]
        if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
            raise CheckpointError(f"{where}: param group {label} does not name its parameters")
        groups.append(ForeignGroup(tuple(names.ours(name) for name in members), check_adamw(entries, where)))
    covered = {name for group in groups for name in group.names}
    if not parameters <= covered:
        raise CheckpointError(
            f"{where}: {sorted(parameters - covered)[0]} has optimizer state and is in no param group"
        )
    return groups
