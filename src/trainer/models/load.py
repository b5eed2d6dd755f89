"""Weights from Hugging Face files into a (sharded) model. Each rank reads the rows it holds and nothing else."""

import re
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.models.base import CausalLM
from trainer.models.files import open_weights
from trainer.models.shards import local_rows
from trainer.models.state import persistent_tensors

# Written by old versions of transformers; the values follow from config.json.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class WeightSource(Protocol):
    def names(self) -> set[str]: ...
    def shape(self, name: str) -> torch.Size: ...
    def rows(self, name: str, rows: slice) -> Tensor: ...


class Tensors:
    """Whole tensors in memory, as a source."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def rows(self, name: str, rows: slice) -> Tensor:
        tensor = self._tensors[name]
        return tensor[rows] if tensor.ndim else tensor


def load_weights(model: CausalLM, model_dir: Path, *, seed: int) -> None:
    """Fills the model's float32 parameters from the directory's safetensors (any float dtype).

    Vocabulary rows beyond those of the files are drawn from `seed`.

    Raises:
        ModelError: a file, a key or a shape is wrong; the message names it.
    """
    with open_weights(model_dir) as files:
        problems = _key_problems(model, files)
        converted = model.converted_weights(model_dir) if problems else None
        if converted is None:
            _raise_if(problems, model_dir)
            _fill(model, files, model_dir, seed)
            return
    source = Tensors(converted)
    _raise_if(_key_problems(model, source), model_dir)
    _fill(model, source, model_dir, seed)


def check_files(model: CausalLM, model_dir: Path) -> None:
    """Checks that the directory's files hold the tensors of the model; it may be on the meta device. No tensor is read.

    Raises:
        ModelError: a file or a tensor is missing or there are too many.
    """
    with open_weights(model_dir) as files:
        other_names_may_do = type(model).converted_weights is not CausalLM.converted_weights
        _raise_if([] if other_names_may_do else _key_problems(model, files), model_dir)


def tied_names(model: CausalLM) -> tuple[str, str] | None:
    """Returns (embedding's name, output's name) of a tied weight, None if the model ties nothing."""
    if not model.tied:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return f"{names[id(model.embedding)]}.weight", f"{names[id(model.output)]}.weight"


def _key_problems(model: CausalLM, source: WeightSource) -> list[str]:
    wanted = set(persistent_tensors(model))
    found = {name for name in source.names() if name in wanted or not _DERIVED.search(name)}
    tied = tied_names(model)
    if tied is not None and found & set(tied):  # either name will do, and so will both
        wanted -= set(tied)
        found -= set(tied)
    missing = [f"missing: {name}" for name in sorted(wanted - found)]
    return missing + [f"surplus: {name}" for name in sorted(found - wanted)]


def _raise_if(problems: list[str], model_dir: Path) -> None:
    if problems:
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(
            f"the weights in {model_dir} are not those of its config.json:\n  " + "\n  ".join(problems[:10]) + more
        )


@torch.no_grad()
def _fill(model: CausalLM, source: WeightSource, model_dir: Path, seed: int) -> None:
    tied = tied_names(model)
    growing = {id(module.weight) for module in (model.embedding, model.output)}
    for name, tensor in persistent_tensors(model).items():
        stored = tied[1] if tied is not None and name == tied[0] and name not in source.names() else name
        found = source.shape(stored)
        grows = model.rows_added > 0 and id(tensor) in growing
        expected = (tensor.shape[0] - model.rows_added, *tensor.shape[1:]) if grows else tuple(tensor.shape)
        if found != expected:
            raise ModelError(f"{model_dir}: {stored} has shape {tuple(found)}, but config.json makes it {expected}")
        local, rows = local_rows(tensor)
        if not tensor.ndim:
            local.copy_(source.rows(stored, rows))
            continue
        old = slice(rows.start, min(rows.stop, found[0]))
        kept = max(0, old.stop - old.start)
        if kept:
            local[:kept].copy_(source.rows(stored, old))
            if tied is not None and name == tied[0] and set(tied) <= source.names():
                _check_tied(source, tied, old, model_dir)
        if not _is_finite(local[:kept]):
            raise ModelError(
                f"{model_dir}: {stored} holds NaN or infinite values: training could only make more of them. The file is "
                "damaged, or the run that wrote it had diverged; download it again, or take other weights"
            )
        if grows and kept < len(local):
            local[kept:].copy_(model.initializer(seed)(name)[rows.start + kept : rows.stop])


def _is_finite(tensor: Tensor) -> bool:
    """One pass without a copy: the least and the greatest value are NaN if any value is."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _check_tied(source: WeightSource, tied: tuple[str, str], rows: slice, model_dir: Path) -> None:
    if source.shape(tied[0]) != source.shape(tied[1]) or not torch.equal(*(source.rows(name, rows) for name in tied)):
        raise ModelError(
            f"{model_dir}: config.json says tie_word_embeddings, but {tied[1]} and {tied[0]} differ; "
            "loading would discard one of them: set tie_word_embeddings to false, or remove the stale tensor"
        )
