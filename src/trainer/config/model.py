"""What is trained: the model, its precision and how it is laid out over the ranks."""

from typing import Literal

from pydantic import Field, PositiveInt

from trainer.config.base import Section


class ModelConfig(Section):
    """The model, its precision and its speed."""

    name: str = ""
    """Local path or hub name of a Hugging Face model directory (config.json, safetensors, tokenizer). Required."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Path or name of the tokenizer; by default the one beside the model."""
    chat_template: str | None = Field(default=None, min_length=1)
    """Path of a Jinja file that replaces the tokenizer's own chat template."""
    impl: Literal["native", "hf"] = "native"
    """"native": our decoder for Llama, Qwen2 and Qwen3 (faster); "hf": any causal LM of transformers."""
    random_init: bool = False
    """Initialise from `seed` instead of loading weights; only config.json (and the tokenizer) is read then."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of forward and backward. Master weights, gradients and reductions are always float32."""
    offload: Literal["none", "optimizer", "full"] = "optimizer"
    """In host memory: nothing, the optimizer's state, or float32 masters and gradients as well. Never changes a result."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """"sdpa" runs everywhere; "varlen" is the GPU path for packed rows; "auto" takes varlen where it can."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """"full" recomputes every block in backward, "selective" all but the matrix products: less memory, more time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for each block; "auto" is on for GPUs and off on CPU, where compiling costs more than it saves."""
    loss_chunk_tokens: PositiveInt | None = None
    """Rows of logits held at once by the loss, in tokens; by default 28 MiB of them (with oneDNN 14), but at least 256 tokens."""


class ParallelConfig(Section):
    """How the ranks share the weights."""

    dp_replicate: PositiveInt = 1
    """HSDP: number of replica groups. The weights are sharded inside a group and reduced across groups."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Ranks that share one copy of the weights; -1 = all ranks of a replica group."""
