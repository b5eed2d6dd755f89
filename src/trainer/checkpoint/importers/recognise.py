"""Whose checkpoint is this? Told by the names in a directory, and by two small JSON files. Imports neither torch nor numpy.

Nothing here trusts what it reads: a directory can only be given a name and a reason, never be taken for one of ours.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20  # trainer_state.json holds the whole log of a run


class Kind(StrEnum):
    HF_TRAINER = "hf-trainer"
    ACCELERATE = "accelerate"
    DCP = "dcp"
    WEIGHTS = "weights"
    OTHER = "other"
    """Known by name, and nothing that can be brought in."""


@dataclass(frozen=True)
class Recognised:
    kind: Kind
    reason: str
    """Whose it is, and what can be done with it, in one line."""


_IMPORT = "trainer ckpt import brings it in"

# What no importer reads, by a name that only it has. First match wins.
_OTHERS: tuple[tuple[str, str], ...] = (
    (r"mp_rank_\d+(_\d+)?|latest_checkpointed_iteration\.txt", "a Megatron-LM checkpoint"),
    (r"zero_pp_rank_.*\.pt|mp_rank_\d+_model_states\.pt|zero_to_fp32\.py|global_step\d+", "DeepSpeed ZeRO shards"),
    (
        r"pytorch_model_fsdp_\d+|optimizer_\d+",
        "an FSDP checkpoint of the Hugging Face Trainer or Accelerate, in shards",
    ),
    (r"pytorch_model_fsdp\.bin", "an FSDP checkpoint of the Hugging Face Trainer or Accelerate, as one pickle"),
    (r"adapter_model\.(safetensors|bin)|adapter_config\.json", "a LoRA adapter without its base model"),
    (r"model_and_optim", "a checkpoint of OLMo-core"),
    (r"recipe_state\.pt|recipe_state", "a checkpoint of torchtune"),
    (r"meta_\d+\.json|optim_\d+_rank\d+\.pt", "a checkpoint of nanochat"),
    (r".*\.ckpt|.*\.nemo", "a checkpoint of Lightning or NeMo, which is a pickle"),
    (r"consolidated\.\d+\.pth", "Llama weights in Meta's own format, which are pickles"),
    (r".*\.gguf", "weights in GGUF"),
)


_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|.*\.index\.json")


def recognise(path: Path) -> Recognised | None:
    """Returns whose a directory is; None if nothing in it is known."""
    names = _names(path)
    if not names:
        return None
    if "trainer" in names and ".metadata" in _names(path / "trainer"):
        return Recognised(Kind.DCP, f"a checkpoint of prime-rl (in trainer/); {_IMPORT}")
    for pattern, what in _OTHERS:
        if any(re.fullmatch(pattern, name) for name in names):
            return Recognised(Kind.OTHER, f"{what}; it cannot be brought in")
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return _dcp(path, names)
    if "trainer_state.json" in names:
        return _hf_trainer(path, names)
    if "optimizer.bin" in names or "random_states_0.pkl" in names:
        return Recognised(Kind.ACCELERATE, f"a checkpoint of Accelerate; {_IMPORT}")
    if "config.json" in names or any(_WEIGHTS.fullmatch(name) for name in names):
        return Recognised(Kind.WEIGHTS, "a model directory: weights only")
    return None


def _names(path: Path) -> AbstractSet[str]:
    try:
        return {entry.name for entry in os.scandir(path)}
    except OSError:
        return set()


def _dcp(path: Path, names: AbstractSet[str]) -> Recognised:
    what = "a torch.distributed.checkpoint directory that another trainer wrote"
    if ".metadata" not in names:
        return Recognised(Kind.OTHER, f"{what}, incomplete: it has no .metadata, which is written last")
    return Recognised(Kind.DCP, f"{what}; {_IMPORT} if it is of prime-rl or torchtitan")


def _hf_trainer(path: Path, names: AbstractSet[str]) -> Recognised:
    try:
        state = read_small_json(path / "trainer_state.json")
    except ValueError as error:
        return Recognised(Kind.OTHER, f"a checkpoint of the Hugging Face Trainer whose trainer_state.json {error}")
    what = f"a checkpoint of the Hugging Face Trainer, step {state.get('global_step')!r}"
    middle = mid_cycle_reason(state)
    if middle:
        return Recognised(Kind.OTHER, f"{what}, {middle}")
    if "optimizer.pt" not in names:
        return Recognised(Kind.WEIGHTS, f"{what}, without its optimizer.pt: weights only")
    return Recognised(Kind.HF_TRAINER, f"{what}; {_IMPORT}")


def read_small_json(path: Path) -> dict[str, Any]:
    """Returns the table in a JSON file that somebody else wrote.

    Raises:
        ValueError: it cannot be read, is too large, or is no table; the text completes "<file> ...".
    """
    try:
        size_bytes = os.stat(path).st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ValueError(f"has {size_bytes} bytes; at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise ValueError("is no JSON table")
    return value


# Where trainers note how many micro-batches of the next update they had done, and how many make one.
_DONE = frozenset(
    {"micro_step", "micro_steps", "micro_batch_step", "accumulation_step", "accum_step", "grad_accum_step"}
)
_CYCLE = frozenset({"gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps", "grad_accum"})


def mid_cycle_reason(entries: Mapping[str, Any]) -> str:
    """Returns why a state is one from the middle of an accumulation cycle; "" if nothing says so.

    entries: names (their last part after a dot counts) -> values. Such a state lacks the gradients of the micro-batches
    that were done, so that no run can go on from it as if nothing had happened.
    """
    last: Callable[[str], str] = lambda name: name.rpartition(".")[2]  # noqa: E731
    done = [(name, value) for name, value in entries.items() if last(name) in _DONE and type(value) is int]
    cycle = next((v for name, v in entries.items() if last(name) in _CYCLE and type(v) is int and v > 0), None)
    for name, value in done:
        inside = value % cycle if cycle else value
        if inside:
            of = f" of {cycle}" if cycle else ""
            return (
                f"written in the middle of gradient accumulation ({name} = {value}: micro-batch {inside}{of} of the next "
                "update is done) without the pending gradients"
            )
    return ""
