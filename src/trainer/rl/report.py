"""What a step's row of metrics says about its rollouts."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from trainer.rl.advantages import are_equal
from trainer.rl.types import Group, Rollout


def describe_groups(groups: Sequence[Group], version: int, overlong: Literal["keep", "mask"]) -> dict[str, float]:
    """Returns reward, its parts, lengths and shares over the rollouts of a batch.

    Keys: reward (mean), reward_std (over all rollouts), reward/PART, completion_tokens (mean; of the model, all turns),
    completion_tokens_max, turns (mean), truncated_share, unscored (rollouts whose scoring failed), equal_share (groups whose
    rewards are all equal, of the rollouts that count: against the group's mean no advantage but 0), staleness (steps
    between the oldest token's weights and these, mean), staleness_max.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"groups": 0}
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    tokens = np.array([int(rollout.trained.sum()) for rollout in rollouts])
    lags = np.array([version - group.version for group in groups])
    found = {
        "groups": len(groups),
        "completion_tokens": float(tokens.mean()),
        "completion_tokens_max": int(tokens.max()),
        "turns": _mean([rollout.turns for rollout in rollouts]),
        "truncated_share": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "unscored": len(rollouts) - len(scored),
        "equal_share": _mean([teaches_nothing(group, overlong) for group in groups]),
        "staleness": float(lags.mean()),
        "staleness_max": int(lags.max()),
    }
    if scored:
        rewards = np.array([rollout.reward for rollout in scored], np.float64)
        found |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std())}
    return found | _parts(scored)


def _parts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = sorted({name for rollout in rollouts for name in rollout.parts})
    return {f"reward/{name}": _mean([r.parts[name] for r in rollouts if name in r.parts]) for name in names}


def teaches_nothing(group: Group, overlong: Literal["keep", "mask"]) -> bool:
    """Whether no rollout is above or below the group's mean: the rewards that count are equal, or there are none."""
    rewards = [rollout.reward_under(overlong) for rollout in group.rollouts]
    return are_equal([reward for reward in rewards if reward is not None])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))
