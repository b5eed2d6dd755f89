"""A few tokens of text from a model in training: to look at, not to serve."""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.rng import torch_generator
from trainer.models.base import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Returns the tokens that follow `prompt`, up to and including the first of `eos_ids`.

    The whole text is read again for every token (there is no cache). Over sharded models all ranks call it with the
    same arguments and get the same tokens.

    Args:
        temperature: 0 takes the most probable token; above, tokens are drawn from softmax(logits / temperature).
        seed: with the token's position, the address of its draw.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    ids = torch.tensor([list(prompt)], device=device)
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in eos_ids):
        logits = model(ids, head=_last_logits)
        if temperature > 0:
            generator = torch_generator(seed, "generate", len(new))
            token = torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True).cpu()
        new.append(int(token))
        ids = torch.cat([ids, token.view(1, 1).to(device)], dim=1)
    model.train(training)
    return new


def _last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns [vocab] float32."""
    return F.linear(hidden[0, -1], weight).float()
