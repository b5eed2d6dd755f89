"""What the peers' workers share. Imported in their environments: torch, transformers and datasets, nothing of ours."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks.gate import Gate, Stopped


class GateCallback(TrainerCallback):
    """Waits at the gate where an optimizer step begins."""

    def __init__(self, gate: Gate):
        self._gate = gate

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._gate.before_step()


def counting(trainer_class: type, gate: Gate) -> type:
    """Returns the trainer class with a count of the useful tokens of every micro-step."""

    class Counting(trainer_class):
        def training_step(self, model, inputs, *args, **kwargs):
            mask = inputs.get("useful", inputs.get("attention_mask"))
            inputs.pop("useful", None)
            gate.count(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
            return super().training_step(model, inputs, *args, **kwargs)

    return Counting


def train_until_stopped(trainer: Any) -> None:
    """Trains until the gate ends it."""
    try:
        trainer.train()
    except Stopped:
        pass


def random_model(model_dir: str) -> torch.nn.Module:
    """Returns transformers' model of the same config.json, with random float32 weights."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.float32)


def documents(path: str) -> list[np.ndarray]:
    """Returns the token ids of each document."""
    with np.load(path) as data:
        ids, lengths = data["ids"], data["lengths"]
    return np.split(ids, np.cumsum(lengths)[:-1])


def document_dataset(path: str) -> Dataset:
    """Returns one row per document: `input_ids`."""
    return Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents(path)]})


def packed_dataset(path: str, seq_len: int) -> Dataset:
    """Returns rows packed like ours (the row of each document is given): `input_ids`, `labels`, `position_ids`."""
    with np.load(path) as data:
        row_of = data["row_of"]
    rows = int(row_of.max()) + 1
    input_ids, position_ids = np.zeros((rows, seq_len), np.int64), np.tile(np.arange(seq_len), (rows, 1))
    labels, useful = np.full((rows, seq_len), -100), np.zeros((rows, seq_len), np.int64)
    used = np.zeros(rows, np.int64)
    for row, ids in zip(row_of, documents(path), strict=True):
        here = slice(used[row], used[row] + len(ids))
        input_ids[row, here], position_ids[row, here] = ids, np.arange(len(ids))
        labels[row, here] = ids  # shifted inside the model
        labels[row, used[row]] = -100  # the first token of a document is not predicted from the one before
        useful[row, here] = 1
        used[row] += len(ids)
    for row, start in enumerate(used):
        position_ids[row, start:] = np.arange(seq_len - start)
    columns = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "useful": useful}
    return Dataset.from_dict(columns).with_format("torch")


def training_arguments(arguments: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """Returns the settings that make a peer do what our run does: optimizer, clipping, schedule, precision, no saving."""
    case = arguments["case"]
    rows, micro_rows = arguments["rows"], arguments["micro_rows"]
    return {
        "output_dir": str(output_dir),
        "max_steps": 10**6,
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "bf16": case["dtype"] == "bfloat16",
        "gradient_checkpointing": False,  # TRL's default is True
        "use_cpu": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_drop_last": True,
        "seed": 0,
    }


def arguments_of(argv: list[str]) -> dict[str, Any]:
    return json.loads(argv[1])
