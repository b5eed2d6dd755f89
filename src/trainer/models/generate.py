"""A few tokens of text from a model in training: to look at, not to serve."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.rng import torch_generator
from trainer.models.base import CausalLM
from trainer.models.decode import open_decoding
from trainer.models.decoder import Decoder
from trainer.models.served import is_plain


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

    The native decoder keeps keys and values. Sharded models and those of transformers read the whole text again for
    every token; over sharded models all ranks call it with the same arguments and get the same tokens.

    Args:
        temperature: 0 takes the most probable token; above, tokens are drawn from softmax(logits / temperature).
        seed: with the token's position, the address of its draw.
    """
    training = model.training
    model.eval()
    logits_behind = _reader(model, len(prompt) + max_new_tokens)
    ids, new = list(prompt), []
    while len(new) < max_new_tokens and not (new and new[-1] in eos_ids):
        logits = logits_behind(ids)
        if temperature > 0:
            generator = torch_generator(seed, "generate", len(new))
            token = torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True).cpu()
        new.append(int(token))
        ids.append(new[-1])
    model.train(training)
    return new


def _reader(model: CausalLM, tokens: int) -> Callable[[list[int]], Tensor]:
    """Returns a function from a text, longer by one token in every call, to the logits behind it: [vocab] float32."""
    # Beyond the context of pretraining, some rotary embeddings turn with the text's length, also what was read before.
    if isinstance(model, Decoder) and is_plain(model) and tokens <= model.spec.max_positions:
        decoding, refresh = open_decoding(model)
        refresh()
        decoding.begin(1, tokens)
        unread = True

        def behind(ids: list[int]) -> Tensor:
            nonlocal unread
            if unread and len(ids) > 1:
                decoding.prefill([ids[:-1]], [0])
            unread = False
            return decoding.step(np.array(ids[-1:]), np.array([len(ids) - 1]))[0]

        return behind
    device = next(model.parameters()).device
    return lambda ids: model(torch.tensor([ids], device=device), head=_last_logits)


def _last_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns [vocab] float32."""
    return F.linear(hidden[0, -1], weight).float()
