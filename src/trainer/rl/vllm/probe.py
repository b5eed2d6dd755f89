"""Does the server serve the model that trains? Its log-probabilities say so; that its output changed would not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.rng import numpy_generator
from trainer.errors import TrainingError
from trainer.models.base import CausalLM

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of a token's log-probability. In float32 5e-6 is usual. In bfloat16 two implementations of the same
weights differ by hundredths; what the bound finds there is another model, not a slightly wrong one."""
PROMPT_TOKENS = (1, 7, 33, 160)
"""Lengths of the probe's prompts: the longest fills a block of a prefix cache, which must not outlive its weights."""
NEW_TOKENS = 8


@dataclass(frozen=True)
class Probe:
    """What a server completed: token ids of the prompt and after it, and its log-probabilities of the latter."""

    url: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


def probe_prompts(vocab_size: int, max_tokens: int) -> list[list[int]]:
    """Returns the fixed prompts for a model: arbitrary tokens, the same ones at every probe."""
    longest = max(1, max_tokens - NEW_TOKENS)
    lengths = sorted({min(length, longest) for length in PROMPT_TOKENS})
    return [
        numpy_generator(0, "probe", length).integers(0, vocab_size, length).tolist()  # any seed does
        for length in lengths
    ]


@torch.no_grad()
def model_logprobs(model: CausalLM, ids: Sequence[int], temperature: float) -> list[float]:
    """Returns the log-probability of each token but the first, given those before it. Collective where sharded.

    Args:
        temperature: of the distribution; 0 counts as 1, as it does where tokens are drawn.
    """
    was_training = model.training
    model.eval()
    try:
        tokens = torch.tensor([list(ids)], device=model.embedding.weight.device)
        logits: Tensor = model(tokens)[0, :-1].float() / (temperature or 1.0)
    finally:
        model.train(was_training)
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()


def difference(probe: Probe, own: Sequence[float]) -> float:
    """Returns the largest absolute difference between the server's log-probabilities and the last ones of `own`."""
    if not probe.ids:
        return float("inf")
    pairs = zip(probe.logprobs, own[-len(probe.ids) :], strict=True)
    return max(abs(theirs - ours) if theirs == theirs else float("inf") for theirs, ours in pairs)


def mismatch(
    url: str, version: int, found: float, bound: float, dtype: torch.dtype, *, tied: bool, at_one: float | None
) -> TrainingError:
    """Returns the error for a server that serves something else, with what is known to cause that.

    Args:
        found: largest difference.
        at_one: the difference to our log-probabilities at temperature 1, where the run's temperature is another one.
    """
    kind = str(dtype).removeprefix("torch.")
    message = (
        f"{url} does not serve the model that trains: with the weights of step {version} its log-probabilities differ from "
        f"the trainer's by up to {found:.3g} on fixed prompts; at most {bound:g} is expected in {kind}."
    )
    if at_one is not None and at_one <= bound:
        return TrainingError(
            f"{message} They are those at temperature 1, and not at rl.temperature: start the server with --logprobs-mode "
            "processed_logprobs, or set rl.temperature = 1."
        )
    causes = [
        "another config.json, --dtype or quantization than the trainer's",
        "--logprobs-mode is not of log-probabilities",
    ]
    if tied:
        causes.insert(
            0,
            "the embeddings are tied, and the server kept a head packed from older weights (the plugin of this very "
            "version must be in its environment: `make vllm`)",
        )
    return TrainingError(f"{message} Known causes: " + "; ".join(causes) + ".")
