"""From a ModelConfig to a model ready to train: config.json, meta, shards, storage, weights."""

from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.model import ModelConfig
from trainer.core.distributed import raise_together
from trainer.errors import ModelError
from trainer.models.base import CausalLM
from trainer.models.decoder import Decoder
from trainer.models.files import resolve_model_dir
from trainer.models.hf_model import HFModel, cast_at_use
from trainer.models.load import check_files, load_weights
from trainer.models.parallelize import compile_blocks, recompute_blocks, shard
from trainer.models.shards import copy_shard
from trainer.models.spec import decoder_spec, read_config
from trainer.models.state import persistent_tensors


def build_model(
    config: ModelConfig,
    *,
    mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    vocab_size: int = 0,
    values: bool = True,
) -> CausalLM:
    """Returns the model with float32 parameters on `device`, sharded over `mesh` (None: a single process).

    Every rank calls it. No rank ever holds more than its shards plus one parameter, except for `impl = "hf"` with
    random weights.

    Args:
        config: the [model] section.
        mesh: ("shard") or ("replicate", "shard").
        device: of the parameters; a mesh must have the same type.
        seed: of random initial values (`random_init`, and added vocabulary rows).
        vocab_size: token ids that the tokenizer can produce. Where the model has fewer rows, its embedding and output
            grow to this number: old rows are kept, new ones drawn from `seed`.
        values: False leaves the weights as the memory was, for a checkpoint that is loaded next; only config.json is
            read then.

    Raises:
        ModelError: files are missing or wrong, or the architecture is not supported.
    """
    model_dir = resolve_model_dir(config.name)
    model = _on_meta(config, model_dir, vocab_size, device)
    if mesh is None:
        cast_at_use(model)
    recompute_blocks(model, config.activation_checkpointing)
    if _compiles(config, device):
        compile_blocks(model)
    if mesh is not None:
        shard(model, mesh)

    model.to_empty(device=device)
    model.tie_weights()  # to_empty gives every module a parameter of its own
    model.reset_buffers()
    error = None
    try:
        if values and config.random_init:
            _initialize(model, seed)
        elif values:
            load_weights(model, model_dir, seed=seed)
    except ModelError as problem:
        error = problem
    raise_together(error, f"loading {model_dir}")
    model.train()
    return model


def check_model(config: ModelConfig, *, values: bool) -> None:
    """Finds out whether the model can be built, before an hour goes into tokenizing data for it. Every rank calls it.

    `values`: its weights will be loaded, so their files are looked at too: that they are there, and which tensors they
    hold. Reads config.json and the tables of the files.

    Raises:
        ModelError: as `build_model`.
    """
    model = model_on_meta(config)
    if values and not config.random_init:
        check_files(model, resolve_model_dir(config.name))


def model_on_meta(config: ModelConfig, *, vocab_size: int = 0) -> CausalLM:
    """Returns the model without storage: its names, shapes and what is tied. Reads config.json alone.

    Raises:
        ModelError: as `build_model`.
    """
    return _on_meta(config, resolve_model_dir(config.name), vocab_size, torch.device("cpu"))


def _on_meta(config: ModelConfig, model_dir: Path, vocab_size: int, device: torch.device) -> CausalLM:
    dtype = getattr(torch, config.dtype)
    if config.impl == "hf":
        return HFModel(model_dir, dtype, vocab_size)
    spec = decoder_spec(read_config(model_dir), where=str(model_dir / "config.json"))
    rows_added = max(0, vocab_size - spec.vocab_size)
    spec = replace(spec, vocab_size=spec.vocab_size + rows_added)
    with torch.device("meta"):
        return Decoder(spec, dtype, config.attention, static_attention=_compiles(config, device), rows_added=rows_added)


def _compiles(config: ModelConfig, device: torch.device) -> bool:
    return config.compile == "on" or (config.compile == "auto" and device.type != "cpu")


@torch.no_grad()
def _initialize(model: CausalLM, seed: int) -> None:
    value = model.initializer(seed)
    for name, tensor in persistent_tensors(model).items():
        copy_shard(tensor, value(name))
