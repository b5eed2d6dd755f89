"""Export as a Hugging Face model directory, which transformers (and everything built on it) loads."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.core import files
from trainer.core.distributed import World, on_main, raise_together, world_from_env
from trainer.errors import ModelError
from trainer.models.base import CausalLM
from trainer.models.files import INDEX, SINGLE, resolve_model_dir
from trainer.models.load import tied_names
from trainer.models.shards import whole_tensor
from trainer.models.spec import read_config
from trainer.models.state import persistent_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_FILE_BYTES = 5 * 10**9
_GENERATION = "generation_config.json"
_VOCABULARY = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    *_VOCABULARY,
)


def export_hf(
    model: CausalLM,
    source: str | Path,
    out_dir: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Writes the model as a Hugging Face directory; every rank calls it, rank 0 writes.

    The weights are the exact float32 masters, a tied weight once. config.json, generation config and tokenizer come
    from `source` (the tokenizer as given, if one is). The directory appears whole or not at all; one that is already
    there is replaced. Rank 0 holds at most one file's worth of whole weights at a time.

    `read` gives the whole float32 tensor of a name in place of the model's own, which may then be on the meta device.

    Raises:
        ModelError: the config ties weights that differ, or the directory cannot be written.
    """
    source = resolve_model_dir(str(source))
    if read is None:
        _check_tied(model)
    world = world_from_env()
    staging = out_dir.with_name(f".{out_dir.name}.tmp-{os.getpid()}")
    on_main(_guard(out_dir, _begin), staging, out_dir)
    error: ModelError | None = None
    names = file_names(model, max_file_bytes)
    # every rank gathers to the end, whatever rank 0 meets
    for file_name, tensors in gathered(model, names, world, read):
        if world.is_main and error is None:
            try:
                _guard(out_dir, save_file)(tensors, staging / file_name, metadata={"format": "pt"})
            except ModelError as problem:
                error = problem
    raise_together(error, f"exporting to {out_dir}")
    on_main(_guard(out_dir, _complete), model, source, staging, out_dir, names, tokenizer)


def export_config(model: CausalLM, source: Path) -> dict[str, Any]:
    """Returns the source's config.json with what training may have changed: dtype, vocabulary and tying."""
    config = read_config(source)
    for key in ("torch_dtype", "dtype"):
        config.pop(key, None)
    return config | {"dtype": "float32", "vocab_size": model.vocab_size, "tie_word_embeddings": model.tied}


def _check_tied(model: CausalLM) -> None:
    if not model.tied or model.output.weight is model.embedding.weight:
        return
    embedding, output = (whole_tensor(module.weight.detach()) for module in (model.embedding, model.output))
    if not torch.equal(embedding, output):
        names = tied_names(model)
        assert names is not None
        raise ModelError(
            f"the config ties {names[1]} to {names[0]}, but their values differ: exporting one would lose the other; "
            "set tie_word_embeddings to false in the model's config.json"
        )


def _exported(model: CausalLM) -> dict[str, Tensor]:
    tensors = persistent_tensors(model)
    tied = tied_names(model)
    if tied is not None:
        tensors.pop(tied[1], None)
    return tensors


def file_names(model: CausalLM, max_file_bytes: int) -> dict[str, str]:
    """Returns {tensor: file}, filling one file after the other up to `max_file_bytes`."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in _exported(model).items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if groups[-1] and size + tensor_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor_bytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, names in enumerate(groups, start=1)
        for name in names
    }


@torch.no_grad()
def gathered(
    model: CausalLM, names: dict[str, str], world: World, read: Callable[[str], Tensor] | None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields (file, its tensors); the tensors are whole and on CPU on rank 0, and none elsewhere."""
    tensors = _exported(model)
    for file_name in dict.fromkeys(names.values()):
        whole: dict[str, Tensor] = {}
        for name in (name for name, file in names.items() if file == file_name):
            tensor = whole_tensor(tensors[name].detach()) if read is None else read(name)
            if world.is_main:
                whole[name] = tensor.cpu().contiguous()
        yield file_name, whole


def _begin(staging: Path, out_dir: Path) -> None:
    _remove_leftovers(out_dir, "tmp")
    files.make_dirs(staging)


def _remove_leftovers(out_dir: Path, kind: str) -> None:
    """Removes what exports to this directory have left beside it that were killed, each as large as the model."""
    if not out_dir.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(out_dir.name)}\.{kind}-\d+")
    for path in out_dir.parent.iterdir():
        if name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _complete(
    model: CausalLM,
    source: Path,
    staging: Path,
    out_dir: Path,
    names: dict[str, str],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    for name in (_GENERATION, *_copied_of_tokenizer(source, tokenizer)):
        if (source / name).exists():
            shutil.copyfile(source / name, staging / name)
    if tokenizer is not None:
        tokenizer.save_pretrained(staging)
    _write_json(staging / "config.json", export_config(model, source))
    if set(names.values()) != {SINGLE}:
        total = sum(tensor.numel() * tensor.element_size() for tensor in _exported(model).values())
        _write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    files.fsync_dir(staging)
    _replace(staging, out_dir)


def _copied_of_tokenizer(source: Path, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[str, ...]:
    """Returns the source's files that go along with what the tokenizer itself writes.

    special_tokens_map.json and chat_template.jinja would win over what it writes, which may be another end-of-text token or
    no template; vocabularies, which other programs read, are those of the source alone.
    """
    if tokenizer is None:
        return _TOKENIZER
    return _VOCABULARY if Path(tokenizer.name_or_path).resolve() == source.resolve() else ()


def _replace(staging: Path, out_dir: Path) -> None:
    """Puts `staging` in the place of `out_dir`; a failure leaves what was there."""
    if not out_dir.exists():
        files.rename(staging, out_dir)
        _remove_leftovers(out_dir, "old")
        return
    previous = out_dir.with_name(f".{out_dir.name}.old-{os.getpid()}")
    files.rename(out_dir, previous)
    try:
        files.rename(staging, out_dir)
    except OSError:
        os.rename(previous, out_dir)
        raise
    _remove_leftovers(out_dir, "old")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _guard(out_dir: Path, function: Any) -> Any:
    """Returns `function` with a failing disk reported as a ModelError."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # safetensors reports a full disk as its own RuntimeError
            raise ModelError(f"{out_dir} cannot be written: {error}") from error

    return guarded
