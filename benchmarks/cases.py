"""The models and documents that the training benchmarks use."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import CACHE


@dataclass(frozen=True)
class Case:
    """One model on one kind of rows.

    Attributes:
        hidden_size, layers, vocab_size: of a Llama with heads of 32 channels, untied, intermediate size 4 x hidden.
        seq_len: tokens of a row; documents have a log-normal length with a quarter of it as their mean.
        rows: packed rows in an optimizer step.
        micro_rows: packed rows in a micro-step.
        documents: in an epoch.
        dtype: compute dtype; master weights are float32.
        pack: False = a row is one document, four times as many rows per step, padded.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    seq_len: int
    rows: int
    micro_rows: int
    documents: int
    dtype: str = "float32"
    pack: bool = True

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Self:
        return cls(**arguments)

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def label(self) -> str:
        return f"d{self.hidden_size}-l{self.layers}-v{self.vocab_size}-t{self.seq_len}-{self.dtype}"

    @property
    def documents_per_row(self) -> int:
        """Documents of a packed row, on average; an unpacked batch has as many rows as a packed one has documents."""
        return 4

    @property
    def model_config(self) -> dict[str, Any]:
        """Returns the config.json that all participants build their model from."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden_size // 32,
            "num_key_value_heads": max(1, self.hidden_size // 64),
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": self.seq_len,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "use_cache": False,
        }

    def model_dir(self) -> Path:
        """Returns a folder with the config.json, written if need be."""
        folder = CACHE / "models" / self.label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.model_config, indent=1) + "\n")
        return folder

    def run_config(self, output_dir: Path) -> dict[str, Any]:
        """Returns the config of our run: an ordinary one, without saving and validation, one metrics row per step."""
        per_row = 1 if self.pack else self.documents_per_row
        return {
            "output_dir": str(output_dir),
            "overwrite": True,
            "max_steps": 10**6,
            "model": {"name": str(self.model_dir()), "random_init": True, "dtype": self.dtype},
            "data": {
                "fake": {"documents": self.documents, "mean_tokens": self.seq_len // 4, "vocab_size": self.vocab_size},
                "seq_len": self.seq_len,
                "pack": self.pack,
                "batch_size": self.rows * per_row,
                "micro_batch_size": self.micro_rows * per_row,
            },
            "optim": {"lr": 1e-3},
            "scheduler": {"type": "linear", "warmup_steps": 10},
            "ckpt": {"at_end": False, "export_weights": False},
            "log": {"level": "error", "progress": "off", "interval": 10**6},
            "runtime": {"device": "cpu"},
        }


LARGE = Case(hidden_size=256, layers=4, vocab_size=8192, seq_len=512, rows=8, micro_rows=4, documents=2000)
SMALL = Case(hidden_size=64, layers=2, vocab_size=8192, seq_len=64, rows=8, micro_rows=8, documents=4000)
"""A step of milliseconds: here overhead shows."""
DTYPES = ("float32", "bfloat16")


def cases(*, smoke: bool) -> list[Case]:
    """Returns every model with every dtype; for a smoke run the small one in float32 only."""
    if smoke:
        return [replace(SMALL, documents=200)]
    return [replace(size, dtype=dtype) for size in (LARGE, SMALL) for dtype in DTYPES]
