"""What is particular to reinforcement learning: environments, rollouts, the objective and the engine that generates."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trainer.config.base import Section, Weight
from trainer.config.data import MeasureConfig

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class EnvConfig(Section):
    """One environment ([[envs]])."""

    name: str = Field(min_length=1)
    """Built in: "reverse-text", "arithmetic", "sort". "reasoning-gym:TASK" and "verifiers:TASKSET" need those packages.
    Your own: "package.module:Class" or "path/to/file.py:Class"."""
    weight: Weight = 1.0
    """Share of the prompts, relative to the other environments' weights."""
    args: tuple[str, ...] = ()
    """Arguments of the environment as "name=value", each value JSON, such as ["min_length=3", "max_length=6"]."""
    prompts: PositiveInt = 4096
    """Different training prompts; after as many draws they come again in another order."""
    system: str | None = None
    """System message put before every prompt."""
    score_seconds: PositiveFloat = 10.0
    """Scoring one completion may take this long; a sample whose scoring hangs is left out and counted."""
    min_reward: float | None = None
    """Groups whose mean reward is below this are not trained on (too hard); unset = all are."""
    max_reward: float | None = None
    """Groups whose mean reward is above this are not trained on (too easy); unset = all are."""


class EvalConfig(MeasureConfig):
    """Reward on held-out prompts."""

    prompts: PositiveInt = 64
    """Held-out prompts of each environment; they never occur in training."""
    samples: PositiveInt = 1
    """Completions of each: k of avg@k and pass@k."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 takes the most probable token."""
    pass_reward: float = 1.0
    """A completion passes from this reward on."""


class RLSection(Section):
    """How rollouts are generated ([rl])."""

    prompts: PositiveInt = 16
    """Prompts in one batch, over all ranks."""
    samples: PositiveInt = 8
    """Completions of each prompt: the size of a group, whose mean reward is the baseline."""
    max_new_tokens: PositiveInt = 256
    """Tokens the model may produce in one turn."""
    max_turns: PositiveInt = 8
    """Turns of the model in one rollout, where an environment answers."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities in the objective are those at this temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens that holds this much probability; 1 = from all."""
    top_k: NonNegativeInt = 0
    """Sample from the most probable tokens only; 0 = from all."""
    stop: tuple[str, ...] = ()
    """Tokens that end a completion, besides the model's own end-of-sequence tokens."""
    score_processes: PositiveInt = 4
    """Processes of each rank that score for environments which are not built in; one more starts for each second that a
    batch's scoring takes, up to this many."""
    max_lag: NonNegativeInt = 0
    """Steps by which the weights that generated a batch may be older than those it trains; 0 = generate, then train."""
    filter_equal: bool = False
    """Leave out groups whose rewards are all equal, cut completions aside under overlong = "mask": they teach nothing. Other
    prompts are drawn in their place."""
    max_resamples: NonNegativeInt = 4
    """Rounds of further prompts that the filters may cause in one batch; what is missing then is missing."""


class ObjectiveConfig(Section):
    """What is maximised ([objective])."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"] = "grpo"
    """Baseline and scale of the rewards: "grpo" = (r - mean) / std of the group; "dr_grpo" without the std; "rloo" leave
    one out; "reinforce_pp" = (r - mean) / std of the whole batch; "reinforce_pp_baseline" with the group's mean; "maxrl" =
    (r - mean) / mean, for rewards from 0."""
    loss: Literal["ppo", "gspo", "cispo", "dppo", "ipo", "reinforce", "custom"] = "ppo"
    """Policy loss: "ppo" clips token ratios, "gspo" sequence ratios, "cispo" clips the weight and keeps the gradient, "dppo"
    and "ipo" mask tokens that moved too far, "reinforce" has no ratio; "custom": `class_path`."""
    class_path: str | None = None
    """loss = "custom": import path of a function like those of trainer.rl.objective, such as "my_package.losses:my_loss"."""
    clip_low: PositiveFloat = 0.2
    """Ratios below 1 - clip_low get no gradient that lowers them further; "dppo", "ipo": probabilities that fell by more."""
    clip_high: PositiveFloat = 0.28
    """Ratios above 1 + clip_high get no gradient that raises them further; larger than clip_low keeps exploration (DAPO);
    "dppo", "ipo": probabilities that rose by more."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Weight of a token: 1 / tokens of the batch, 1 / (sequences x tokens of its own), or 1 / (sequences x max_new_tokens)."""
    iterations: PositiveInt = 1
    """Optimizer steps on each batch of rollouts."""
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """The ratio's denominator: the engine's log-probabilities, or the trainer's own, computed before a batch's first step."""
    importance_cap: PositiveFloat | None = 2.0
    """old_logprobs = "trainer": tokens are weighted by trainer / engine probability, at most this; unset = no correction."""
    overlong: Literal["keep", "mask"] = "keep"
    """Completions cut at max_new_tokens: train on them, or leave them out of loss, baseline and denominator."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model; 0 = no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of it (Schulman, 2020): "k2" and "k3" are added to the loss, "k1" is taken off each token's advantage."""
    reference: str | None = None
    """Reference model; by default the one that `model.name` holds."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    distill: NonNegativeFloat = 0.0
    """Weight of on-policy distillation: the teacher's log-probability of each token, less the policy's, as advantage."""
    teacher: str | None = None
    """Teacher model of `distill`, with the same vocabulary."""
    sft: NonNegativeFloat = 0.0
    """Weight of a cross-entropy loss on `data.sources`, mixed into every step."""


class EngineConfig(Section):
    """What generates ([engine])."""

    type: Literal["local", "vllm"] = "local"
    """"local" generates in this process with the training weights; "vllm" asks servers."""
    slots: PositiveInt = 64
    """Completions under way at once per rank; a server has its own limit (vLLM's --max-num-seqs) over all of them."""
    urls: tuple[str, ...] = ()
    """vllm: addresses of running servers."""
    launch: bool = False
    """vllm: start a server on rank 0's host and stop it at the end; it listens on loopback."""
    python: str | None = None
    """vllm: interpreter of the environment that has vLLM; default .vllm/bin/python, which `make vllm` creates."""
    port: int = Field(default=8017, ge=1, le=65535)
    """vllm: port of the server that is launched."""
    args: tuple[str, ...] = ()
    """vllm: more arguments of the server, such as ["--gpu-memory-utilization", "0.5"]."""
    devices: str | None = None
    """vllm: GPUs that the launched server sees, such as "6,7"; by default those that this process sees."""
    weights_dir: str | None = None
    """vllm: directory for published weights, on a disk that the servers see too; default weights-served/ in the run's."""
    start_seconds: PositiveFloat = 600.0
    """vllm: a server must answer within this time of its start; for as long, requests wait for one that starts again."""
    request_seconds: PositiveFloat = 600.0
    """vllm: a request that takes longer is sent again, to another server if there is one."""
    keep_cache: bool = False
    """vllm: let completions under way keep keys and values of older weights when weights change."""
