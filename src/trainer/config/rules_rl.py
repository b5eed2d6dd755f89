"""The rules that join fields of a config for reinforcement learning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.rules import Broken, common_rules, raise_all

if TYPE_CHECKING:
    from trainer.config.run import RLConfig


def check_rl(config: "RLConfig") -> None:
    """Holds a config of reinforcement learning against its rules.

    Raises:
        PydanticCustomError: of type RULE, with every broken one.
    """
    raise_all(config, [*common_rules(config), *_batch_rules(config), *_objective_rules(config), *_engine_rules(config)])


def _batch_rules(c: "RLConfig") -> Iterator[Broken]:
    if not c.envs:
        yield Broken(
            ("envs",),
            "there is nothing to learn from: name an environment ([[envs]] tables), or train on data with `trainer sft`",
        )
    for index, env in enumerate(c.envs):
        if env.min_reward is not None and env.max_reward is not None and env.min_reward > env.max_reward:
            keys = (f"envs.{index}.min_reward", f"envs.{index}.max_reward")
            yield Broken(keys, "no group can lie between the two: min_reward must not exceed max_reward")
        if env.score_seconds > c.runtime.timeout_seconds / 4:
            yield Broken(
                (f"envs.{index}.score_seconds", "runtime.timeout_seconds"),
                "the other ranks would not wait for a few that hang: score_seconds must not exceed a quarter of it",
            )
    if c.epochs is not None:
        yield Broken(("epochs",), "prompts are drawn without an end: set max_steps instead of epochs")
    if c.ckpt.micro_interval:
        yield Broken(
            ("ckpt.micro_interval",), "batches of rollouts differ in their micro-steps: save by ckpt.interval instead"
        )
    if c.rl.max_new_tokens >= c.data.seq_len:
        yield Broken(
            ("rl.max_new_tokens", "data.seq_len"),
            "a rollout must fit into a row, prompt and all: raise data.seq_len, or lower rl.max_new_tokens",
        )
    if c.data.fake is not None or c.data.val_sources or c.data.val_documents:
        yield Broken(
            ("data.fake", "data.val_sources", "data.val_documents"),
            "these belong to supervised fine-tuning; here val.interval measures rewards on held-out prompts",
        )
    if bool(c.data.sources) != (c.objective.sft > 0):
        yield Broken(
            ("data.sources", "objective.sft"),
            "data.sources are for the cross-entropy loss that objective.sft mixes in: set both, or neither",
        )


def _objective_rules(c: "RLConfig") -> Iterator[Broken]:
    o = c.objective
    if c.rl.samples == 1 and o.advantage != "reinforce_pp":
        yield Broken(
            ("rl.samples", "objective.advantage"),
            f'with one completion of each prompt {o.advantage} has nothing to compare: raise rl.samples, or take "reinforce_pp"',
        )
    if c.rl.filter_equal and o.advantage == "reinforce_pp":
        yield Broken(
            ("rl.filter_equal", "objective.advantage"),
            "the baseline of reinforce_pp is the batch's mean, against which a group of equal rewards does teach: leave "
            'rl.filter_equal off, or take "reinforce_pp_baseline"',
        )
    if (o.loss == "custom") != (o.class_path is not None):
        yield Broken(
            ("objective.loss", "objective.class_path"),
            'objective.class_path and objective.loss = "custom" go together: set both',
        )
    if o.loss == "reinforce" and o.iterations > 1:
        yield Broken(
            ("objective.loss", "objective.iterations"),
            "reinforce has no ratio to correct for the steps already taken on a batch: set objective.iterations = 1",
        )
    if o.reference is not None and not o.kl:
        yield Broken(
            ("objective.reference", "objective.kl"), "a reference model is used by objective.kl only: set both"
        )
    if (o.teacher is not None) != (o.distill > 0):
        yield Broken(
            ("objective.teacher", "objective.distill"), "objective.teacher and objective.distill go together: set both"
        )
    if o.iterations > 1 and c.rl.max_lag:
        yield Broken(
            ("objective.iterations", "rl.max_lag"),
            "with several steps on a batch nothing is gained by generating ahead: set one of them to its default",
        )


def _engine_rules(c: "RLConfig") -> Iterator[Broken]:
    e = c.engine
    if e.type == "local" and (e.urls or e.launch):
        yield Broken(
            ("engine.type", "engine.urls", "engine.launch"),
            'servers are used with engine.type = "vllm"; "local" generates in the training process',
        )
    if e.type == "vllm" and bool(e.urls) == e.launch:
        yield Broken(
            ("engine.urls", "engine.launch"), "set one of engine.urls (running servers) and engine.launch (start one)"
        )
    truncates = c.rl.top_p < 1 or c.rl.top_k > 0
    if e.type == "vllm" and truncates and (c.rl.temperature != 1 or c.val.temperature not in (0, 1)):
        yield Broken(
            ("rl.temperature", "val.temperature", "rl.top_p", "rl.top_k", "engine.type"),
            "vLLM returns log-probabilities either at temperature 1 or of what top_p and top_k leave, and the ratio needs "
            "those of the whole vocabulary at the sampling temperature: set both temperatures to 1 (val's may be 0), or "
            'rl.top_p = 1 and rl.top_k = 0, or engine.type = "local"',
        )
