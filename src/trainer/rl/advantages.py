"""Rewards of a batch of groups to one advantage per rollout: the baselines and scales of the critic-free methods.

    grpo                   (r - mean) / std of the group               DeepSeekMath, Shao et al. 2024, arXiv:2402.03300
    dr_grpo                r - mean of the group                       Liu et al. 2025, arXiv:2503.20783
    rloo                   r - mean of the group's other rollouts      Ahmadian et al. 2024, arXiv:2402.14740
    reinforce_pp           (r - mean) / std of the batch               Hu et al. 2025, arXiv:2501.03262
    reinforce_pp_baseline  (r - mean of the group) / std of the batch  the same
    maxrl                  (r - mean) / mean of the group              Tajwar et al. 2026, arXiv:2602.02710

Standard deviations are those of a sample (n - 1), as `torch.std` computes them. Means are correctly rounded (`fsum`) over
differences to the least reward: they do not depend on the order, and equal rewards give exactly 0.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

from trainer.errors import TrainingError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"]

_ROUNDING = 1e-9
"""Rewards closer together than this, relative to the largest, are equal: their difference is how they were summed up."""


def advantages(rewards: Sequence[Sequence[float | None]], kind: AdvantageKind) -> list[list[float]]:
    """Returns one advantage for each reward, in the same layout.

    A rollout without a reward (None, or not finite) takes part in no statistic and gets 0. So does one whose group holds no
    other reward: it has no baseline. Only "reinforce_pp" has one for it, the mean of the whole batch.

    Args:
        rewards: one sequence for each group of the whole global batch; groups may differ in size.
        kind: `objective.advantage`.

    Raises:
        TrainingError: a negative reward under "maxrl", whose baseline divides: its sign would be turned.
    """
    known = [[value for value in group if _counts(value)] for group in rewards]
    if kind == "reinforce_pp":
        found = _over_std_of_batch(_centered_on_batch(known), least=1)
    elif kind == "reinforce_pp_baseline":
        found = _over_std_of_batch([_centered(values) for values in known], least=2)
    else:
        found = [_of_group(values, kind) for values in known]
    results = []
    for group, own in zip(rewards, found, strict=True):
        places = iter(own)
        results.append([next(places) if _counts(value) else 0.0 for value in group])
    return results


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether all are the same, but for how they were summed up, or there are none."""
    return not rewards or max(rewards) - min(rewards) <= _ROUNDING * max(map(abs, rewards))


def _counts(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _of_group(values: list[float], kind: AdvantageKind) -> list[float]:
    if kind == "maxrl" and min(values, default=0.0) < 0.0:
        raise TrainingError(
            f'objective.advantage = "maxrl" takes rewards as probabilities of success, and one is {min(values)}: '
            "let the environment's rewards start at 0, or choose another advantage"
        )
    centered = _centered(values)
    if not any(centered):
        return centered
    if kind == "rloo":
        return [value * len(values) / (len(values) - 1) for value in centered]  # = r - mean of the others
    scale = {"grpo": _std(centered), "maxrl": math.fsum(values) / len(values)}.get(kind, 1.0)
    return [value / scale for value in centered]


def _centered_on_batch(groups: list[list[float]]) -> list[list[float]]:
    whole = iter(_centered([value for values in groups for value in values]))
    return [[next(whole) for _ in values] for values in groups]


def _over_std_of_batch(centered: list[list[float]], *, least: int) -> list[list[float]]:
    """Divides by the std over all groups of at least `least` rewards: a lone one is its own mean, and its 0 says nothing
    about how far rewards lie apart."""
    std = _std([value for values in centered if len(values) >= least for value in values])
    return [[value / std if std else 0.0 for value in values] for values in centered]


def _centered(values: list[float]) -> list[float]:
    """Returns each value less their mean; exactly 0 where all are equal."""
    if are_equal(values):
        return [0.0] * len(values)
    differences = [value - min(values) for value in values]
    mean = math.fsum(differences) / len(differences)
    return [difference - mean for difference in differences]


def _std(centered: list[float]) -> float:
    """Returns the sample standard deviation of values whose mean is 0; 0 for fewer than two."""
    if len(centered) < 2:
        return 0.0
    return math.hypot(*centered) / math.sqrt(len(centered) - 1)  # a sum of squares would underflow for tiny rewards
