"""Sharded gradients that stay in the dtype in which they were reduced."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_reduced_in_float32(model: nn.Module) -> None:
    """Makes FSDP hand over gradients as it reduced them, in float32, though parameters are narrower.

    Newer releases of torch follow each parameter's `grad_dtype`. Older ones, such as 2.11, round the sum over the ranks to the
    parameters' dtype, unless the group of parameters is told that they were float32.
    """
    if isinstance(model, FSDPModule):

        def once(module: nn.Module, args: Any) -> None:
            hook.remove()
            _tell_groups(module)

        hook = model.register_forward_pre_hook(once)  # behind FSDP's own, in which the groups learn their dtypes, once


def _tell_groups(model: nn.Module) -> None:
    for module in model.modules():
        for group in _groups(module) if isinstance(module, FSDPModule) else ():
            if getattr(group, "_orig_dtype", None) in (None, torch.float32):
                continue
            group._orig_dtype = torch.float32
            for sharded in group.fsdp_params:
                if sharded.sharded_param.requires_grad:
                    sharded.sharded_param.grad_dtype = torch.float32  # lost when the model was given its dtype


def _groups(module: FSDPModule) -> list[Any]:
    """Returns the module's groups of parameters; older releases have one at most, under another name."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
