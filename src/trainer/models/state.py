"""The model's part of a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.errors import CheckpointMismatch


def persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter (a tied one once, under its first name) and every buffer that belongs into a checkpoint.

    Plain tensors or DTensors, live: what is copied into them is what trains.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


class ModelState:
    """Stateful owner of the float32 weights. Names are those of transformers, whatever the sharding."""

    def __init__(self, model: nn.Module):
        # Taken once, while the shards are registered: between forward and backward a sharded model shows whole weights.
        self._tensors = persistent_tensors(model)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns {name: live tensor}; reading changes nothing."""
        return dict(self._tensors)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies into the live tensors, in place.

        Raises:
            CheckpointMismatch: a name is missing or unexpected, or a shape differs; nothing was copied then.
        """
        problems = [f"missing: {name}" for name in self._tensors if name not in state_dict]
        problems += [f"unexpected: {name}" for name in state_dict if name not in self._tensors]
        problems += [
            f"{name}: shape {tuple(state_dict[name].shape)} in the checkpoint, {tuple(tensor.shape)} in the model"
            for name, tensor in self._tensors.items()
            if name in state_dict and state_dict[name].shape != tensor.shape
        ]
        if problems:
            more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointMismatch(
                "the checkpoint's weights do not fit the model; resume with the model they were saved from:\n  "
                + "\n  ".join(problems[:10])
                + more
            )
        for name, tensor in self._tensors.items():
            if state_dict[name] is not tensor:
                tensor.copy_(state_dict[name])
