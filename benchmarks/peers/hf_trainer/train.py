"""Worker in an environment with transformers: its Trainer on the given documents, in our packed rows or padded."""

import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments, default_data_collator

from benchmarks.gate import Gate
from benchmarks.peers import common


def pad(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads documents to the longest of a micro-batch."""
    ids = [feature["input_ids"] for feature in features]
    ones = [torch.ones_like(document) for document in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(ones, batch_first=True),
    }


def without_borders(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as one stream: documents attend to those before them. Wrong, but what packing often means."""
    batch = default_data_collator(features)
    del batch["position_ids"]
    return batch


def main() -> None:
    arguments = common.arguments_of(sys.argv)
    gate = Gate(torch.set_num_threads)
    path, seq_len = arguments["documents"], arguments["case"]["seq_len"]
    if arguments["variant"] == "padded":
        dataset, collator = common.document_dataset(path).with_format("torch"), pad
    else:
        dataset = common.packed_dataset(path, seq_len)
        collator = default_data_collator if arguments["variant"] == "packed" else without_borders
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        trainer = common.counting(Trainer, gate)(
            model=common.random_model(arguments["model_dir"]),
            args=TrainingArguments(**common.training_arguments(arguments, Path(folder)), remove_unused_columns=False),
            train_dataset=dataset,
            data_collator=collator,
            callbacks=[common.GateCallback(gate)],
        )
        common.train_until_stopped(trainer)


if __name__ == "__main__":
    main()
