"""Worker in TRL's environment: SFTTrainer on the given documents, packed by TRL or padded."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from benchmarks.gate import Gate
from benchmarks.peers import common


def main() -> None:
    arguments = common.arguments_of(sys.argv)
    gate = Gate(torch.set_num_threads)
    packed = arguments["variant"] == "packed"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        settings = SFTConfig(
            **common.training_arguments(arguments, Path(folder)),
            max_length=arguments["case"]["seq_len"],
            packing=packed,
            packing_strategy="bfd",
        )
        trainer = common.counting(SFTTrainer, gate)(
            model=common.random_model(arguments["model_dir"]),
            args=settings,
            train_dataset=common.document_dataset(arguments["documents"]),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_file=arguments["tokenizer"], pad_token="<|endoftext|>", eos_token="<|im_end|>"
            ),
            callbacks=[common.GateCallback(gate)],
        )
        common.train_until_stopped(trainer)


if __name__ == "__main__":
    main()
