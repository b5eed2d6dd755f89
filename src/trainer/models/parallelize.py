"""How a model's blocks run: recomputed, compiled, sharded. The order matters and is this file's subject.

Recomputation wraps a block's forward, compilation wraps that, and FSDP's hooks stay outside of both: weights are
gathered before a block is entered, in forward and again in backward, and never inside a recomputed region.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.kernels.products import OPERATORS
from trainer.models.base import CausalLM

Recompute = Literal["none", "selective", "full"]


def recompute_blocks(model: CausalLM, mode: Recompute) -> None:
    """Keeps only each block's input ("full"), or its matrix products and attention as well ("selective")."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.random_forward}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def compile_blocks(model: CausalLM, backend: str = "inductor") -> None:
    """Compiles each block's forward; all blocks have one shape of code, so the second one is found in the cache."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)


def has_failed_to_compile(error: BaseException) -> bool:
    """Whether the error says that torch.compile could not compile, as where there is no compiler for what it writes."""
    exceptions = sys.modules.get("torch._dynamo.exc")  # imported by whatever compiles; takes a second
    return exceptions is not None and isinstance(error, exceptions.TorchDynamoException)


def shard(model: CausalLM, mesh: DeviceMesh) -> None:
    """Shards every block, and embedding, final norm and output in one more group, over `mesh` (FSDP2).

    A 2-D mesh ("replicate", "shard") shards inside a replica group and sums gradients across groups (HSDP). Weights are
    gathered in the compute dtype; gradients are reduced in float32 and *summed* over all ranks, because the loss is
    already divided by the global number of supervised tokens.
    """
    policy = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The root's weights are the last used in forward and the first in backward: freeing them between would be undone
    # at once. A forward without backward frees them by the hook below.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM
    model.register_forward_hook(_free_after_evaluation)


def _free_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    # Otherwise the parameters a validation leaves registered are whole copies, not the shards that are trained.
    if not torch.is_grad_enabled() and isinstance(module, FSDPModule):
        module.reshard()


_PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
} | set(OPERATORS)


def _keep_products(context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _PRODUCTS or "varlen_attn" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
