"""What a run imports by and by, imported at once: for the server that `fresh` forks new processes from."""

import gc

import pytest
import torch._dynamo
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import support.observed
import trainer.sft.train
import trainer.train.loop

__all__ = ["AutoTokenizer", "LlamaConfig", "PreTrainedTokenizerFast", "pytest", "support", "torch", "trainer"]

gc.collect()
gc.freeze()  # a collection in a forked process looks at its own objects alone, and copies no page of the rest
