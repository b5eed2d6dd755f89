"""Rollouts: conversations of the model with an environment, as token ids, scored.

All conversations that are still going take each turn together, in one call of the engine. Every random draw is addressed
by (run seed, prompt number, sample, turn), so a rollout does not depend on which others are made beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.config.rl import RLSection
from trainer.core.rng import derive_seed
from trainer.errors import DataError, TrainingError
from trainer.rl.rendering import Renderer
from trainer.rl.scoring import Patience, Scorer
from trainer.rl.types import Completion, FinishReason, Generator, Group, Message, Prompt, Request, Rollout, Sampling


@dataclass
class _Episode:
    """One conversation under way."""

    prompt: Prompt
    sample: int
    messages: list[Message]
    ids: list[int]
    trained: list[bool]
    logprobs: list[float]
    versions: list[int]
    turns: int = 0
    finish_reason: FinishReason = "length"
    error: str | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] = (), versions: Sequence[int] = ()) -> None:
        """Appends tokens; those with log-probabilities are the model's."""
        self.ids += ids
        self.trained += [bool(logprobs)] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)
        self.versions += versions or [-1] * len(ids)

    def rollout(self) -> Rollout:
        return Rollout(
            ids=np.array(self.ids, np.int32),
            trained=np.array(self.trained, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish_reason=self.finish_reason,
            turns=self.turns,
            reward=self.reward,
            parts=self.parts,
            error=self.error,
        )


def rollouts(
    prompts: Sequence[Prompt],
    samples: int,
    *,
    engine: Generator,
    renderer: Renderer,
    scorer: Scorer,
    config: RLSection,
    sampling: Sampling,
    seed: int,
    seq_len: int,
    purpose: str = "rollout",
) -> list[Group]:
    """Returns `samples` scored rollouts of each prompt, in the order of the prompts.

    An episode ends when the environment has nothing more to say, after `config.max_turns` turns of the model, with a turn
    that was cut, or where the conversation would exceed `seq_len` tokens; then its finish reason is "length". A sample
    whose environment fails, or whose prompt leaves no room to answer, has no reward and says why.

    Args:
        sampling: with the stop tokens (see `stop_ids`).
        seed: the run's.
        seq_len: tokens of a whole conversation (`data.seq_len`).
        purpose: first part of the address of every draw; evaluation uses another.

    Raises:
        DataError: the chat template refuses a prompt.
        TrainingError: the engine broke its contract.
    """
    episodes = [
        episode
        for prompt in prompts
        for episode in _begin(prompt, samples, renderer=renderer, scorer=scorer, seq_len=seq_len)
    ]
    live, patience = [episode for episode in episodes if episode.error is None], scorer.patience()
    while live:
        requests = [
            Request(
                prompt_ids=[*episode.ids],
                max_new_tokens=min(config.max_new_tokens, seq_len - len(episode.ids)),
                seed=derive_seed(seed, purpose, episode.prompt.number, episode.sample, episode.turns),
            )
            for episode in live
        ]
        completions = engine.generate(requests, sampling)
        if len(completions) != len(requests):
            raise TrainingError(f"the engine returned {len(completions)} completions for {len(requests)} requests")
        for episode, completion in zip(live, completions, strict=True):
            _take_turn(episode, completion, renderer, sampling)
        goes_on = [episode for episode in live if _may_go_on(episode, scorer, config)]
        live = _answer(goes_on, renderer=renderer, scorer=scorer, patience=patience, seq_len=seq_len)
    _score(episodes, scorer, patience)
    return [
        Group(prompt.number, prompt.id, [episode.rollout() for episode in episodes[start : start + samples]])
        for prompt, start in zip(prompts, range(0, len(episodes), samples), strict=True)
    ]


def _begin(prompt: Prompt, samples: int, *, renderer: Renderer, scorer: Scorer, seq_len: int) -> list[_Episode]:
    loaded = scorer.environments[prompt.env]
    where = f"environment {loaded.config.name!r} (envs.{prompt.env}), prompt {prompt.id}"
    try:
        ids = renderer.prompt_ids(prompt.messages, loaded.environment.tools)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    error = None
    if len(ids) >= seq_len:
        why = f"the prompt has {len(ids)} tokens, which leaves no room to answer in {seq_len} (data.seq_len or the context)"
        error = scorer.lose(prompt, why)
        ids = ids[:seq_len]
    episodes = []
    for sample in range(samples):
        episode = _Episode(prompt, sample, [*prompt.messages], [], [], [], [], error=error)
        episode.add(ids)
        episodes.append(episode)
    return episodes


def _take_turn(episode: _Episode, completion: Completion, renderer: Renderer, sampling: Sampling) -> None:
    ids = completion.ids
    if not ids or not len(ids) == len(completion.logprobs) == len(completion.versions):
        raise TrainingError(
            f"prompt {episode.prompt.id}, sample {episode.sample}: the engine returned {len(ids)} tokens with "
            f"{len(completion.logprobs)} log-probabilities and {len(completion.versions)} versions; expected as many, "
            "and at least one"
        )
    episode.add(ids, completion.logprobs, completion.versions)
    episode.turns += 1
    episode.finish_reason = completion.finish_reason
    said = ids[:-1] if completion.finish_reason == "stop" and ids[-1] in sampling.stop_ids else ids
    episode.messages.append({"role": "assistant", "content": renderer.text(said)})


def _may_go_on(episode: _Episode, scorer: Scorer, config: RLSection) -> bool:
    multi_turn = scorer.environments[episode.prompt.env].multi_turn
    return multi_turn and episode.finish_reason == "stop" and episode.turns < config.max_turns


def _answer(
    episodes: list[_Episode], *, renderer: Renderer, scorer: Scorer, patience: Patience, seq_len: int
) -> list[_Episode]:
    """Lets the environments answer; returns the episodes in which the model is to speak again."""
    replies = scorer.step([(episode.prompt, episode.messages) for episode in episodes], patience)
    live = []
    for episode, reply in zip(episodes, replies, strict=True):
        episode.error = reply.error
        if reply.messages is None:
            continue
        turn = len(episode.messages) - 1
        messages = [*episode.messages, *reply.messages]
        tools = scorer.environments[episode.prompt.env].environment.tools
        try:
            ids = renderer.continuation_ids(messages, turn, episode.ids[-1], tools)
        except DataError as error:
            episode.error = f"prompt {episode.prompt.id}, after turn {episode.turns}: {error}"
            continue
        if len(episode.ids) + len(ids) >= seq_len:  # nothing could follow, so nobody needs to read it
            episode.finish_reason = "length"
            continue
        episode.messages = messages
        episode.add(ids)
        live.append(episode)
    return live


def _score(episodes: list[_Episode], scorer: Scorer, patience: Patience) -> None:
    whole = [episode for episode in episodes if episode.error is None]
    judged = scorer.score([(episode.prompt, episode.messages) for episode in whole], patience)
    for episode, result in zip(whole, judged, strict=True):
        episode.reward, episode.parts, episode.error = result.reward, result.parts, result.error


def evaluate_groups(groups: Sequence[Group], pass_reward: float, names: Sequence[str]) -> dict[str, float | None]:
    """Returns what held-out rollouts say, over all environments and, as "<name>/...", over each.

    The keys are "avg@k" (mean over the prompts of their mean reward), "pass@k" (share of prompts of which any sample
    passes), "pass@1" (chance that a single sample passes), "length_tokens" (mean tokens of the model), "truncated" (share
    of samples that were cut) and "failed" (samples without a reward, which count in the last three alone). k is the
    number of samples of a prompt. None where no sample has a reward.

    Args:
        pass_reward: a sample passes from this reward on.
        names: of the environments, by their position.
    """
    labels = [name if names.count(name) == 1 else f"{name}#{position}" for position, name in enumerate(names)]
    found = _evaluate(groups, pass_reward)
    for position, label in enumerate(labels):
        own = [group for group in groups if group.id.partition(":")[0] == str(position)]
        found |= {f"{label}/{key}": value for key, value in _evaluate(own, pass_reward).items()} if own else {}
    return found


def _evaluate(groups: Sequence[Group], pass_reward: float) -> dict[str, float | None]:
    samples = max((len(group.rollouts) for group in groups), default=1)
    everything = [rollout for group in groups for rollout in group.rollouts]
    rewards = [[r.reward for r in group.rollouts if r.reward is not None] for group in groups]
    scored = [own for own in rewards if own]
    passed = [[reward >= pass_reward for reward in own] for own in scored]
    return {
        f"avg@{samples}": _mean([sum(own) / len(own) for own in scored]),
        "pass@1": _mean([sum(own) / len(own) for own in passed]),
        f"pass@{samples}": _mean([float(any(own)) for own in passed]),
        "length_tokens": _mean([float(r.trained.sum()) for r in everything]),
        "truncated": _mean([float(r.finish_reason == "length") for r in everything]),
        "failed": float(sum(r.reward is None for r in everything)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
