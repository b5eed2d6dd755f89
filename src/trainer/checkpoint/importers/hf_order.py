"""Names for the numbers in a torch optimizer's state: which parameter is number 7?

``optimizer.state_dict()`` numbers the parameters group by group, in the order they were given. The Hugging Face Trainer
gives those with weight decay first, then the others, each in the model's order; what counts as which has changed between
its versions. Each known rule is tried, and one is taken only if every group's size and every saved shape agrees.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape, in the model's order."""


def parameter_names(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], shapes: Mapping[int, tuple[int, ...]], where: str
) -> list[list[str]]:
    """Returns the names of each group's parameters.

    model: transformers' own, with its order of parameters; may be on meta. groups: "param_groups" of the state. shapes:
    number -> shape of its moments.

    Raises:
        CheckpointError: no rule fits, so that numbers cannot be told from each other.
    """
    named = dict(model.named_parameters())
    given = [group.get("param_names") for group in groups]
    candidates = [rule(model) for rule in _RULES]
    if all(isinstance(names, list) for names in given):  # an optimizer that was given named parameters says it itself
        candidates = [[[str(name) for name in names] for names in given if names is not None]]
    sizes = [len(group["params"]) for group in groups]
    for candidate in candidates:
        filled = [names for names in candidate if names]
        for layout in (candidate, filled):
            if [len(names) for names in layout] == sizes and _shapes_agree(layout, groups, shapes, named):
                return layout
    raise CheckpointError(
        f"{where}: its {sum(sizes)} parameters in groups of {sizes} cannot be told apart: the model has {len(named)}, and no "
        "known way of grouping them (decay first, by layer type or name; all in one) gives these sizes and shapes. States "
        "of frozen or added parameters, or of a custom optimizer, cannot be imported"
    )


def _shapes_agree(
    layout: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[int, tuple[int, ...]],
    named: Mapping[str, torch.Tensor],
) -> bool:
    flat = [name for names in layout for name in names]
    if len(set(flat)) != len(flat) or not set(flat) <= named.keys():
        return False
    numbers = [number for group in groups for number in group["params"]]
    pairs = zip(numbers, flat, strict=True)
    return all(number not in shapes or shapes[number] == tuple(named[name].shape) for number, name in pairs)


def _split(model: nn.Module, decayed: Callable[[str], bool]) -> list[list[str]]:
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if decayed(name)], [name for name in names if not decayed(name)]]


_NEW = [re.compile(p) for p in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")]


def _by_name_and_layer(model: nn.Module) -> list[list[str]]:
    """transformers since 4.46: neither LayerNorm modules, nor names like a norm's or a bias's (also of a parent module)."""
    layers = _inside(model, (nn.LayerNorm,))

    def decayed(name: str) -> bool:
        tails = [name.lower()[place:] for place in (0, *(m.end() for m in re.finditer(r"\.", name)))]
        return name not in layers and not any(pattern.search(tail) for pattern in _NEW for tail in tails)

    return _split(model, decayed)


def _by_layer(model: nn.Module) -> list[list[str]]:
    """Before: neither LayerNorm modules (with those RMSNorms that registered themselves: Llama's did) nor biases."""
    norms = tuple({type(m) for m in model.modules() if type(m).__name__ in ("LlamaRMSNorm", "T5LayerNorm")})
    layers = _inside(model, (nn.LayerNorm, *norms))
    return _split(model, lambda name: name not in layers and "bias" not in name)


def _by_layer_norm_alone(model: nn.Module) -> list[list[str]]:
    """The same where the RMSNorms had not: their weights were decayed."""
    layers = _inside(model, (nn.LayerNorm,))
    return _split(model, lambda name: name not in layers and "bias" not in name)


def _by_old_names(model: nn.Module) -> list[list[str]]:
    """The example scripts: neither "bias" nor "LayerNorm.weight" (or layer_norm.weight) in the name."""
    excluded = ("bias", "LayerNorm.weight", "layer_norm.weight")
    return _split(model, lambda name: not any(part in name for part in excluded))


def _all_in_one(model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in model.named_parameters()]]


def _inside(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """Names of the parameters of modules of these types."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters()
    }


_RULES = (_by_name_and_layer, _by_layer, _by_layer_norm_alone, _all_in_one, _by_old_names)
