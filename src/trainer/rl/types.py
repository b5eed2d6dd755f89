"""What passes between environments, engines, the buffer and the objective."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
"""As in chat templates: "role" and "content", and what else the template reads."""
FinishReason = Literal["stop", "length"]
"""A completion ended with a stop token, or was cut."""


@dataclass(frozen=True)
class Prompt:
    """One draw from the run's endless sequence of prompts.

    Attributes:
        number: place in that sequence, from 0; addresses every random draw that concerns it.
        env: which of the config's environments it is from.
        index: which of that environment's prompts it is.
        messages: the conversation to answer.
        info: whatever the environment needs to score an answer; JSON-able.
    """

    number: int
    env: int
    index: int
    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """ "<environment>:<index>", the prompt whatever its place."""
        return f"{self.env}:{self.index}"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 takes the most probable token.
        top_p: draw from the smallest set of tokens with this probability; 1 = all.
        top_k: draw from that many most probable tokens; 0 = all.
        stop_ids: tokens that end a completion; the token itself belongs to it.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: Collection[int] = ()


@dataclass(frozen=True)
class Request:
    """One completion to generate.

    Attributes:
        prompt_ids: token ids of everything before it.
        max_new_tokens: cut it here.
        seed: of this request alone; with the token's place in the completion it addresses the token's draw, so that the
            result does not depend on what else is generated at the same time.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """What an engine generated.

    Attributes:
        ids: token ids, a stop token included.
        logprobs: of each token in the distribution over the *whole* vocabulary at the sampling temperature (1 for greedy
            decoding), whatever top_p and top_k left of it.
        versions: policy version (optimizer steps behind the weights) that produced each token.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class Generator(Protocol):
    """A rollout engine, as every rank sees it.

    Attributes:
        overlaps: `update` may be called while another thread is in `generate`; tokens then come from several versions.
    """

    overlaps: bool

    def update(self, version: int) -> None:
        """Serves the model's present weights from now on, as policy `version`. Collective over the ranks."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Returns one completion for each request, in their order; this rank's own, without any collective."""
        ...

    def close(self) -> None:
        """Ends a `generate` that is under way in another thread, and frees what the engine holds."""
        ...


@dataclass
class Rollout:
    """One sampled conversation, scored.

    Attributes:
        ids: int32 [T], prompt and everything that followed.
        trained: bool [T], tokens that the model produced.
        logprobs: float32 [T], the engine's; 0 where not `trained`.
        versions: int32 [T], policy version of each token; -1 where not `trained`.
        finish_reason: of the last turn.
        turns: turns of the model.
        reward: None if scoring failed; then it is in no loss and in no baseline.
        parts: named parts of the reward.
        error: why scoring failed.
    """

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    turns: int = 1
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def reward_under(self, overlong: Literal["keep", "mask"]) -> float | None:
        """Returns the reward that loss and baseline know of: None where it is in neither (see `objective.overlong`)."""
        return None if overlong == "mask" and self.finish_reason == "length" else self.reward


@dataclass
class Group:
    """All rollouts of one prompt, in the order of their sample numbers."""

    number: int
    """`Prompt.number`."""
    id: str
    """`Prompt.id`."""
    rollouts: list[Rollout]

    @property
    def version(self) -> int:
        """The oldest policy version that any of its tokens is from."""
        return min(int(r.versions[r.trained].min(initial=np.iinfo(np.int32).max)) for r in self.rollouts)
