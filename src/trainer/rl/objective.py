"""What a batch of rollouts asks of the policy: pure functions on flat tensors, one entry per token.

Everything is a *sum* over the trained tokens of weight x token loss; the caller divides by a denominator that it knows for
the whole global batch beforehand (`aggregation`), so that neither micro-batches nor ranks change the gradient.

In the formulas A is a token's advantage, r = exp(logprobs - old_logprobs), sg[.] holds gradients back, and [.] is 1 where
its condition holds.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.config.rl import ObjectiveConfig
from trainer.core.imports import import_object
from trainer.errors import ConfigError, TrainingError
from trainer.rl.measures import Measures

_MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: exp(20) = 5e8 is outside of any clip range, and exp(89) would be inf in float32."""


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one micro-batch, trained or not; all of length N, on one device.

    Where `mask` is false the other tensors may hold anything, NaN included: nothing of it reaches a loss, a gradient or
    a measure.

    Attributes:
        logprobs: float32, of the policy being trained, at the sampling temperature; carries the gradient.
        old_logprobs: float32, denominator of the ratio: the engine's, or the trainer's from before the batch's first step.
        engine_logprobs: float32, of the policy that sampled.
        advantages: float32.
        weights: float32, how much a token counts (`aggregation`).
        mask: bool, the trained tokens.
        sequence: int64 in [0, N), equal for the tokens of one sequence; a sequence lies in one micro-batch.
        entropy: float32, of the policy's distribution at each token, if computed; carries a gradient if it is to have one.
        ref_logprobs: float32, of the reference model, if there is one.
        teacher_logprobs: float32, of the teacher, if there is one.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    sequence: Tensor
    entropy: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss returns.

    Attributes:
        loss: float32 [N], differentiable, lower is better; before weights, and any finite value where not trained.
        clip_low, clip_high, masked: bool [N], tokens that the method clipped from below, above, or left out; only measured.
    """

    loss: Tensor
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    masked: Tensor | None = None


PolicyFunction = Callable[[TokenBatch, ObjectiveConfig], PolicyLoss]
"""Where `mask` is false, its input holds zeros; its output counts for nothing there."""


# -- policy losses -------------------------------------------------------------------------------------------------------


def ppo(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Proximal policy optimization, Schulman et al. 2017, arXiv:1707.06347; two bounds as in DAPO, Yu et al. 2025,
    arXiv:2503.14476.
    """
    return _clipped(_ratio(tokens), tokens.advantages, config)


def gspo(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-min(s A, clip(s) A) with s = sg[exp(mean over the sequence of logprobs - old_logprobs)] x logprobs' own gradient.

    Group sequence policy optimization, Zheng et al. 2025, arXiv:2507.18071, in its token form: where a sequence's
    advantages and weights are equal, value and gradient are those of the sequence form, and they need not be.
    """
    difference = (tokens.logprobs - tokens.old_logprobs).detach()
    length = _sequence_sums(tokens.mask.to(difference.dtype), tokens.sequence)
    mean = _sequence_sums(difference, tokens.sequence) / length.clamp(min=1.0)
    log_ratio = mean[tokens.sequence].clamp(max=_MAX_LOG_RATIO)
    ratio = log_ratio.exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return _clipped(ratio, tokens.advantages, config)


def cispo(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs: every token keeps a gradient.

    MiniMax-M1, 2025, arXiv:2506.13585.
    """
    ratio = _ratio(tokens).detach()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -ratio.clamp(low, high) * tokens.advantages * tokens.logprobs
    return PolicyLoss(loss, clip_low=ratio < low, clip_high=ratio > high)


def dppo(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-[inside] r A: left out are tokens whose *probability* already moved too far from the engine's in A's direction.

    Outside: A > 0 and p - p_engine > clip_high, or A < 0 and p_engine - p > clip_low. Divergence proximal policy
    optimization with the binary total variation, Qi et al. 2026, arXiv:2602.04879.
    """
    moved = _moved(tokens)
    outside = ((tokens.advantages > 0) & (moved > config.clip_high)) | (
        (tokens.advantages < 0) & (moved < -config.clip_low)
    )
    return _inside(tokens, outside)


def ipo(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-[inside] r A: left out are tokens whose *probability* moved too far from the engine's, whatever A.

    Outside: p - p_engine > clip_high or p_engine - p > clip_low. INTELLECT policy optimization, the default of prime-rl
    (not the preference loss of the same name).
    """
    moved = _moved(tokens)
    return _inside(tokens, (moved > config.clip_high) | (moved < -config.clip_low))


def reinforce(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    """-A logprobs. Williams 1992, Machine Learning 8."""
    return PolicyLoss(-tokens.advantages * tokens.logprobs)


POLICY_LOSSES: dict[str, PolicyFunction] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "ipo": ipo,
    "reinforce": reinforce,
}


def policy_function(config: ObjectiveConfig) -> PolicyFunction:
    """Returns the policy loss that the config names.

    Raises:
        ConfigError: objective.class_path names nothing that can be called.
    """
    if config.loss != "custom":
        return POLICY_LOSSES[config.loss]
    function: PolicyFunction = import_object(config.class_path or "", "objective.class_path")
    if not callable(function):
        raise ConfigError(f"objective.class_path = {config.class_path!r} is no function")
    return function


def _ratio(tokens: TokenBatch) -> Tensor:
    return (tokens.logprobs - tokens.old_logprobs).clamp(max=_MAX_LOG_RATIO).exp()


def _moved(tokens: TokenBatch) -> Tensor:
    """The policy's probability less the engine's, detached: the trust region is around the policy that sampled."""
    return tokens.logprobs.detach().exp() - tokens.engine_logprobs.exp()


def _clipped(ratio: Tensor, advantages: Tensor, config: ObjectiveConfig) -> PolicyLoss:
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return PolicyLoss(loss, clip_low=(ratio < low) & (advantages < 0), clip_high=(ratio > high) & (advantages > 0))


def _inside(tokens: TokenBatch, outside: Tensor) -> PolicyLoss:
    return PolicyLoss(torch.where(outside, 0.0, -_ratio(tokens) * tokens.advantages), masked=outside)


def _sequence_sums(values: Tensor, sequence: Tensor) -> Tensor:
    """Returns [N], entry s the sum of `values` over sequence s; the same bits in every run."""
    sums = torch.zeros_like(values)
    if values.device.type == "cpu":
        return sums.index_add_(0, sequence, values)
    return sums.index_put_((sequence,), values, accumulate=True)  # sorts first, where index_add_ would race


# -- terms ---------------------------------------------------------------------------------------------------------------


def importance_weights(old_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Returns min(p_old / p_engine, cap), without gradient: float32 of the inputs' shape.

    Truncated importance sampling between the engine that sampled and the trainer's model of the same weights
    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    return (old_logprobs - engine_logprobs).detach().clamp(max=_MAX_LOG_RATIO).exp().clamp(max=cap)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Returns an estimate of KL(policy || reference) from each sampled token, differentiable; float32 of the inputs' shape.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logprobs - ref_logprobs. Schulman 2020, "Approximating KL
    divergence".
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).clamp(max=_MAX_LOG_RATIO).exp() - 1 + difference


def token_advantages(tokens: TokenBatch, config: ObjectiveConfig) -> Tensor:
    """Returns the advantages with what each token adds to them, without gradient: float32 [N].

    + distill x (teacher_logprobs - logprobs): on-policy distillation (Agarwal et al. 2023, arXiv:2306.13649; Thinking
    Machines 2025). - kl x (logprobs - ref_logprobs) for "k1": as a loss of its own its gradient is zero in expectation,
    in the reward it is that of the divergence.
    """
    advantages, logprobs = tokens.advantages, tokens.logprobs.detach()
    if config.distill:
        advantages = advantages + config.distill * (_given(tokens, "teacher_logprobs") - logprobs)
    if config.kl and config.kl_estimator == "k1":
        advantages = advantages - config.kl * kl_estimate(logprobs, _given(tokens, "ref_logprobs"), "k1")
    return advantages


# -- the objective -------------------------------------------------------------------------------------------------------


def objective(tokens: TokenBatch, config: ObjectiveConfig) -> tuple[Tensor, Measures]:
    """Returns the sum over trained tokens of weight x (importance weight x policy loss + KL penalty - entropy bonus).

    Returns:
        0-dim float32, differentiable in `tokens.logprobs` and `tokens.entropy`; 0 without a trained token, and
        connected to the graph all the same; and what was measured on the way.

    Raises:
        ConfigError: a custom loss cannot be imported or returns something else than it should.
        TrainingError: a custom loss failed.
        ValueError: the config has a term whose tensor is missing.
    """
    tokens = _neutral_outside_mask(tokens)
    policy = _policy_loss(replace(tokens, advantages=token_advantages(tokens, config)), config)
    _check(policy, tokens, config)
    loss = policy.loss
    if config.old_logprobs == "trainer" and config.importance_cap is not None:
        loss = loss * importance_weights(tokens.old_logprobs, tokens.engine_logprobs, config.importance_cap)
    if config.kl and config.kl_estimator != "k1":
        loss = loss + config.kl * kl_estimate(tokens.logprobs, _given(tokens, "ref_logprobs"), config.kl_estimator)
    if config.entropy:
        loss = loss - config.entropy * _given(tokens, "entropy")
    loss_sum = (torch.where(tokens.mask, loss, 0.0) * tokens.weights).sum()
    return loss_sum, _measure(tokens, policy, config)


def aggregation(
    tokens_per_sequence: Sequence[int], aggregate: Literal["token", "sequence", "constant"], max_new_tokens: int
) -> tuple[list[float], float]:
    """Returns the weight of each token of each sequence, and the denominator of the loss, for a whole global batch.

    The denominator counts exactly what has a weight: "token": 1, over the trained tokens; "sequence": 1 / tokens of its
    own, over the sequences that have any; "constant": 1 / max_new_tokens, over the same (Dr. GRPO, arXiv:2503.20783).

    Args:
        tokens_per_sequence: trained tokens; 0 for a sequence that is left out, whose weight is 0.
        max_new_tokens: most tokens that a sequence can have.

    Returns:
        one weight per sequence, and the denominator; 0 where nothing is trained.
    """
    trained = [count for count in tokens_per_sequence if count]
    if aggregate == "token":
        return [1.0 if count else 0.0 for count in tokens_per_sequence], float(sum(trained))
    if aggregate == "sequence":
        return [1.0 / count if count else 0.0 for count in tokens_per_sequence], float(len(trained))
    return [1.0 / max_new_tokens if count else 0.0 for count in tokens_per_sequence], float(len(trained))


def _policy_loss(tokens: TokenBatch, config: ObjectiveConfig) -> PolicyLoss:
    function = policy_function(config)
    if config.loss != "custom":
        return function(tokens, config)
    try:
        return function(tokens, config)
    except Exception as error:
        raise TrainingError(
            f"objective.class_path = {config.class_path!r} failed at {_line_of(error)}: {type(error).__name__}: {error}"
        ) from error


def _line_of(error: Exception) -> str:
    """The innermost line of the traceback, as path:number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _given(tokens: TokenBatch, name: str) -> Tensor:
    value = getattr(tokens, name)
    if value is None:
        raise ValueError(f"the objective has a term that needs {name}, and they were not computed")
    return value


def _neutral_outside_mask(tokens: TokenBatch) -> TokenBatch:
    """Zeros everything that is not trained. By `where`, not by a product: 0 x NaN is NaN, in backward too."""
    cleaned: dict[str, Any] = {}
    for field in fields(tokens):
        value = getattr(tokens, field.name)
        if value is not None and field.name != "mask":
            cleaned[field.name] = torch.where(
                tokens.mask, value, torch.zeros((), dtype=value.dtype, device=value.device)
            )
    return replace(tokens, **cleaned)


def _check(policy: PolicyLoss, tokens: TokenBatch, config: ObjectiveConfig) -> None:
    if not isinstance(policy, PolicyLoss) or policy.loss.shape != tokens.logprobs.shape:
        found = tuple(policy.loss.shape) if isinstance(policy, PolicyLoss) else type(policy).__name__
        raise ConfigError(
            f"objective.class_path = {config.class_path!r} must return a trainer.rl.objective.PolicyLoss with one loss "
            f"for each of the {len(tokens.logprobs)} tokens, and returned {found}"
        )


@torch.no_grad()
def _measure(tokens: TokenBatch, policy: PolicyLoss, config: ObjectiveConfig) -> Measures:
    """`tokens` hold zeros outside the mask: a ratio of 1 there, and nothing else but zeros."""
    ratio = _ratio(tokens).double()
    trainer = tokens.old_logprobs if config.old_logprobs == "trainer" else tokens.logprobs
    mismatch = (trainer - tokens.engine_logprobs).abs().double()
    values: dict[str, Tensor | None] = {
        "tokens": tokens.mask,
        "ratio": ratio,
        "clip_low": _flags(policy.clip_low, tokens),
        "clip_high": _flags(policy.clip_high, tokens),
        "masked": _flags(policy.masked, tokens),
        "mismatch": mismatch,
        "entropy": tokens.entropy,
    }
    if tokens.ref_logprobs is not None:
        values["kl"] = kl_estimate(tokens.logprobs, tokens.ref_logprobs, config.kl_estimator)
    sums = {
        name: torch.where(tokens.mask, value.double(), 0.0).sum() for name, value in values.items() if value is not None
    }
    maxima = {"ratio_deviation_max": (ratio - 1).abs().amax(), "mismatch_max": mismatch.amax()}
    return Measures(sums, maxima)


def _flags(flags: Tensor | None, tokens: TokenBatch) -> Tensor:
    return torch.zeros_like(tokens.mask) if flags is None else flags
