"""What each parameter is, told from the type of the module that owns it and never from its name."""

from typing import Literal

import torch
from torch import nn

Role = Literal["matrix", "embedding", "head", "vector", "experts", "router"]
"""The last two are the weights of a mixture of experts, one stack of matrices per projection, and what chooses among
them; `parameter_roles` does not tell them yet."""


def parameter_roles(model: nn.Module, head: nn.Module | None = None) -> dict[str, Role]:
    """Returns the role of every trainable parameter, each tied parameter once under its first name.

    "embedding": the weight of an `nn.Embedding`, wherever it is also used; "head": the weight of `head` (default
    `model.lm_head`); "matrix": any other parameter with two or more dimensions; "vector": norms, biases and scalars.
    """
    head = head if head is not None else getattr(model, "lm_head", None)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head_weight = getattr(head, "weight", None)
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            roles[name] = _role(parameter, embeddings, head_weight)
    return roles


def _role(parameter: torch.Tensor, embeddings: set[int], head_weight: torch.Tensor | None) -> Role:
    if id(parameter) in embeddings:
        return "embedding"
    if parameter is head_weight:
        return "head"
    return "matrix" if parameter.ndim >= 2 else "vector"
