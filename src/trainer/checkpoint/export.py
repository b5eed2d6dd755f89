"""The weights of a checkpoint as a Hugging Face directory: no GPU, no process group, one tensor in memory at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.checkpoint.dcp import DTYPE_NAMES
from trainer.checkpoint.diff import open_contents
from trainer.checkpoint.discovery import Checkpoint
from trainer.checkpoint.manifest import check_bytes
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, CheckpointMismatch
from trainer.models.base import CausalLM
from trainer.models.build import model_on_meta
from trainer.models.files import resolve_model_dir
from trainer.models.hf import export_hf
from trainer.models.state import persistent_tensors
from trainer.models.tokenizer import load_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PREFIX = "model."  # the owner's name in front of each weight's own


def export_checkpoint(checkpoint: Checkpoint, out_dir: Path, *, model_dir: str | None = None) -> int:
    """Writes config.json, tokenizer and the float32 weights of `checkpoint` to `out_dir`; returns the number of tensors.

    Every byte is compared with its checksum first: what is exported is used without one.

    model_dir: where config.json and tokenizer are, if not where the run had them (`model.name` in its manifest).

    Raises:
        CheckpointError: the checkpoint does not say which model it is of, or is damaged.
        CheckpointMismatch: its weights are not those of that model.
        ModelError: the model's files cannot be found, or `out_dir` cannot be written.
    """
    config = saved_model_config(checkpoint, model_dir)
    check_bytes(checkpoint.path, checkpoint.manifest, checkpoint.manifest.files)
    contents = open_contents(checkpoint.path)
    saved = {name.removeprefix(_PREFIX): t for name, t in contents.layout.items() if name.startswith(_PREFIX)}
    model = _model(config, {name: tensor.shape for name, tensor in saved.items()}, checkpoint.path)
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}

    def read(name: str) -> Tensor:
        bits = contents.bits(_PREFIX + name)
        flat = torch.from_numpy(bits.reshape(-1).view("u1"))
        return flat.view(dtypes[saved[name].dtype]).reshape(saved[name].shape)

    files = resolve_model_dir(config.tokenizer or config.name)
    tokenizer = load_tokenizer(config) if any((files / name).exists() for name in _TOKENIZER_FILES) else None
    export_hf(model, config.name, out_dir, tokenizer=tokenizer, read=read)
    return len(saved)


def saved_model_config(checkpoint: Checkpoint, model_dir: str | None = None) -> ModelConfig:
    """Returns the [model] section of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the manifest has none, or this version cannot read it.
    """
    config: Any = checkpoint.manifest.run.get("config")
    section = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{checkpoint.path}: the manifest holds no config with a [model] section")
    values = {**section, "name": model_dir or section.get("name")}
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckpointError(
            f"{checkpoint.path}: the manifest's [model] section cannot be read by this version: model.{where}: "
            f"{error.errors()[0]['msg']}"
        ) from error


def _model(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path) -> CausalLM:
    """Returns the model on meta, with the vocabulary that the run had grown to; its names and shapes are the saved ones."""
    model = model_on_meta(config)
    names = {id(tensor): name for name, tensor in persistent_tensors(model).items()}
    rows = shapes.get(names[id(model.embedding.weight)], (0,))[0]
    if rows > model.vocab_size:
        model = model_on_meta(config, vocab_size=rows)
    expected = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(model).items()}
    if dict(shapes) != expected:
        wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        lines = [f"  {name}: checkpoint {shapes.get(name)}, model {expected.get(name)}" for name in wrong[:10]]
        raise CheckpointMismatch(
            "\n".join(
                [f"the weights in {path} are not those of {config.name} ({len(wrong)} differ):", *lines]
                + ["Give the directory of the right model with --model"]
            )
        )
    return model
