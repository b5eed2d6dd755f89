"""Worker in TRL's environment: GRPOTrainer on the given prompts, generating with transformers."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from benchmarks.gate import Gate
from benchmarks.peers import common


def vowels(completions: list[str], **_: object) -> list[float]:
    """The environment's reward: the share of vowels."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def main() -> None:
    arguments = common.arguments_of(sys.argv)
    gate = Gate(torch.set_num_threads)
    arguments["rows"] = arguments["prompts"] * arguments["samples"]
    prompts = json.loads(Path(arguments["prompt_file"]).read_text())
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        settings = common.training_arguments(arguments, Path(folder)) | {
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        }
        trainer = GRPOTrainer(
            model=common.random_model(arguments["model_dir"]),
            reward_funcs=vowels,
            args=GRPOConfig(
                **settings,
                num_generations=arguments["samples"],
                max_completion_length=arguments["max_new_tokens"],
                temperature=1.0,
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_file=arguments["tokenizer_file"], pad_token="<|endoftext|>", eos_token="<|im_end|>"
            ),
            callbacks=[common.GateCallback(gate)],
        )
        common.train_until_stopped(trainer)


if __name__ == "__main__":
    main()
