"""Tiny models in Hugging Face directories, and batches for them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from trainer.config.model import ModelConfig
from trainer.kernels.linear_cross_entropy import linear_cross_entropy
from trainer.models.base import CausalLM
from trainer.models.build import build_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)


def write_config(model_dir: Path, family: str = "llama", **changes: Any) -> Path:
    """A directory with only a config.json, for `random_init`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps({"model_type": family} | SIZES | changes))
    return model_dir


def save_reference(model_dir: Path, family: str = "llama", **changes: Any) -> Any:
    """Saves a transformers model with weights large enough that every part matters, and returns it."""
    sizes = GPT2 if family == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(family, **(sizes | {"bos_token_id": 1, "eos_token_id": 2} | changes))
    reference: Any = transformers.AutoModelForCausalLM.from_config(config)
    reference.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            center = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
    reference.save_pretrained(model_dir)
    return reference


def build(model_dir: Path, *, mesh: Any = None, seed: int = 0, vocab_size: int = 0, **model: Any) -> CausalLM:
    settings = {"dtype": "float32"} | model
    config = ModelConfig(name=str(model_dir), **settings)
    return build_model(config, mesh=mesh, device=torch.device("cpu"), seed=seed, vocab_size=vocab_size)


def packed(*rows: list[int], tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """One row per list of document lengths, padded to `tokens`; labels are the shifted ids within each document."""
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.zeros(len(rows), tokens, dtype=torch.long) for name in ("input_ids", "position_ids")}
    batch["labels"] = torch.full((len(rows), tokens), -100)
    batch["document_ids"] = torch.full((len(rows), tokens), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths):
            span = slice(start, start + length)
            ids = torch.randint(0, SIZES["vocab_size"], (length,), generator=generator)
            batch["input_ids"][row, span] = ids
            batch["position_ids"][row, span] = torch.arange(length)
            batch["document_ids"][row, span] = number
            batch["labels"][row, start : start + length - 1] = ids[1:]
            start += length
    return batch


def loss_sum(model: CausalLM, batch: dict[str, Tensor]) -> Tensor:
    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.flatten(0, 1), weight, batch["labels"].flatten())

    return model(batch["input_ids"], batch["position_ids"], batch["document_ids"], head=head)


def gradients(model: CausalLM) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.detach().clone() for name, grad in found.items() if grad is not None}
