"""Reinforcement learning's side of a run: rollouts of environments, the objective, rewards on held-out prompts."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from trainer.config.model import ModelConfig
from trainer.config.rl import ObjectiveConfig
from trainer.config.run import RLConfig
from trainer.core.distributed import gather_objects
from trainer.core.log import logger
from trainer.data.batch import MicroBatch
from trainer.data.build import build_data
from trainer.data.loader import BatchLoader
from trainer.errors import ConfigError, ModelError
from trainer.models.base import CausalLM
from trainer.models.build import build_model
from trainer.models.files import resolve_model_dir
from trainer.models.tokenizer import load_tokenizer
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.batches import ExampleMicroBatch, RolloutBatches
from trainer.rl.engines import build_engine
from trainer.rl.envs import load_environments
from trainer.rl.episodes import evaluate_groups, rollouts
from trainer.rl.loss import policy_loss
from trainer.rl.measures import Measures
from trainer.rl.objective import policy_function
from trainer.rl.prompts import PromptSequence
from trainer.rl.rendering import Renderer, stop_ids
from trainer.rl.report import teaches_nothing
from trainer.rl.scoring import Scorer
from trainer.rl.source import RolloutSource
from trainer.rl.types import Generator, Group, Prompt, Sampling
from trainer.train.boundary import Boundaries
from trainer.train.cross_entropy import cross_entropy
from trainer.train.run import Run
from trainer.train.supply import Place, Supply

EVAL_CHUNK = 256
"""Held-out completions of a rank between two looks at whether to stop."""


class RLSupply(Supply):
    """Batches of rollouts.

    Raises:
        ConfigError: an environment, a stop token or a custom loss cannot be found.
    """

    keeps_cycles = (
        False  # what a loss measures in a cycle is not in the checkpoint; the batch is, so nothing is generated twice
    )
    batches: RolloutBatches

    def __init__(self, place: Place[RLConfig]):
        config = place.config
        assert config.max_steps is not None
        self.max_steps = config.max_steps
        self.config = config
        self.environments = load_environments(config.envs, config.seed)
        self.names = [env.config.name.rpartition("/")[2] for env in self.environments]  # of a file without its folder
        self.prompts = PromptSequence(self.environments, config.seed)
        assert place.tokenizer is not None  # only synthetic documents come without one
        self.renderer = Renderer(place.tokenizer)
        stops = stop_ids(place.tokenizer, config.rl.stop, resolve_model_dir(config.model.name))
        r = config.rl
        self.sampling = Sampling(r.temperature, r.top_p, r.top_k, stops)
        self.greedy = Sampling(config.val.temperature, stop_ids=stops)
        self.loss_function = partial(
            _loss,
            config=config.objective,
            temperature=r.temperature,
            chunk_tokens=config.model.loss_chunk_tokens,
        )
        examples = _examples(place) if config.objective.sft else None
        order = self.prompts.fingerprint | {"rl.prompts": r.prompts, "rl.samples": r.samples}
        source = RolloutSource(config, place.world, order=order, keep=self._why_left_out, allow=place.allow)
        self.batches = RolloutBatches(source, place, self.renderer, self.names, examples)
        policy_function(config.objective)  # a custom loss that does not exist is told now
        self._tokenizer, self._world = place.tokenizer, place.world
        self._conversation_tokens = config.data.seq_len
        self._scorer: Scorer | None = None
        self._engine: Generator | None = None
        self._place = place

    def boundaries(self) -> Boundaries:
        return Boundaries(1, "carry", lambda epoch: 1)  # how many micro-steps a batch takes is known when it is there

    def attach(self, run: Run) -> None:
        self._limit_conversations(run.model)
        self._scorer = Scorer(
            self.environments,
            self.config.seed,
            processes=self.config.rl.score_processes,
            # The other ranks wait for this one's rewards, and not for ever.
            patience_seconds=self.config.runtime.timeout_seconds / 2 if self._world.size > 1 else math.inf,
        )
        self._engine = build_engine(self.config, run.model, self._place)
        self.batches.attach(run, self._frozen_models(run))
        self.batches.source.attach(self._engine, self.generate)

    def generate(self, numbers: Sequence[int]) -> list[Group]:
        """Returns scored groups of these prompts; this rank's own, without any collective."""
        prompts = [self.prompts.prompt(number) for number in numbers]
        return self._rollouts(prompts, self.config.rl.samples, self.sampling, "rollout")

    def measure(self, run: Run, pause: Callable[[], bool]) -> dict[str, float] | None:
        assert self._engine is not None
        started, val = time.perf_counter(), self.config.val
        self.batches.source.quiesce()
        self._engine.update(run.progress.step)
        prompts = self.prompts.held_out(val.prompts)
        chunk = max(1, EVAL_CHUNK // val.samples) * self._world.size
        found: list[Group] = []
        for first in range(0, len(prompts), chunk):
            if pause():
                return None
            own = prompts[first + self._world.rank : first + chunk : self._world.size]
            groups = self._rollouts(own, val.samples, self.greedy, "eval")
            found += [group for part in gather_objects(groups) for group in part]
        found.sort(key=lambda group: group.number)
        measured = evaluate_groups(found, val.pass_reward, self.names)
        reward = measured[f"avg@{val.samples}"]
        row = {f"eval/{key}": value for key, value in measured.items() if value is not None}
        row |= {"eval_seconds": time.perf_counter() - started}
        return row if reward is None else {"eval_reward": reward} | row

    def close(self) -> None:
        # First what generates and scores ahead, or the thread that does would go on to its end.
        if self._scorer is not None:
            self._scorer.close()
        if self._engine is not None:
            self._engine.close()
        self.batches.close()

    def _rollouts(self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, purpose: str) -> list[Group]:
        assert self._engine is not None and self._scorer is not None
        return rollouts(
            prompts,
            samples,
            engine=self._engine,
            renderer=self.renderer,
            scorer=self._scorer,
            config=self.config.rl,
            sampling=sampling,
            seed=self.config.seed,
            seq_len=self._conversation_tokens,
            purpose=purpose,
        )

    def _limit_conversations(self, model: CausalLM) -> None:
        """No conversation is longer than the model's context: an engine would refuse its next turn, and end the run."""
        context, seq_len = model.context_tokens, self.config.data.seq_len
        if context is None or seq_len <= context:
            return
        has = f"{self.config.model.name} has {context} positions (max_position_embeddings)"
        if model.learned_positions:  # padding of a row would be beyond them
            raise ConfigError(f"rows have {seq_len} tokens, but {has}, and none beyond; set data.seq_len = {context}")
        logger.warning(f"data.seq_len = {seq_len}, but {has}: conversations end there")
        self._conversation_tokens = context

    def _why_left_out(self, group: Group) -> str | None:
        """Returns the filter that keeps a group out of training, or None."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        if not rewards:
            return "unscored"
        env = self.config.envs[int(group.id.split(":")[0])]
        mean = sum(rewards) / len(rewards)
        if env.min_reward is not None and mean < env.min_reward:
            return "too_hard"
        if env.max_reward is not None and mean > env.max_reward:
            return "too_easy"
        is_equal = self.config.rl.filter_equal and teaches_nothing(group, self.config.objective.overlong)
        return "equal" if is_equal else None

    def _frozen_models(self, run: Run) -> dict[str, CausalLM]:
        """Returns the reference and the teacher, where the objective asks for them."""
        objective, models = self.config.objective, {}
        if objective.kl:
            models["ref_logprobs"] = self._frozen(run, "reference", objective.reference or self.config.model.name)
        if objective.teacher is not None:
            models["teacher_logprobs"] = self._frozen(run, "teacher", objective.teacher)
        return models

    def _frozen(self, run: Run, key: str, name: str) -> CausalLM:
        own = self.config.model
        config = own.model_copy(update={"name": name, "random_init": own.random_init and name == own.name})
        vocab_size = len(self._tokenizer)
        try:
            if name != own.name:
                self._check_vocabulary(config)
            model = build_model(
                config, mesh=self._place.mesh, device=run.device, seed=self.config.seed, vocab_size=vocab_size
            )
        except ModelError as error:
            raise ModelError(f"objective.{key} = {name!r} cannot be used: {error}") from error
        return model.requires_grad_(False).eval()

    def _check_vocabulary(self, config: ModelConfig) -> None:
        """Raises `ModelError` if the model came with a tokenizer that means other tokens by the same ids."""
        folder = resolve_model_dir(config.name)
        if not (folder / "tokenizer.json").exists():
            return
        ids, own = (
            load_tokenizer(config.model_copy(update={"tokenizer": None})).get_vocab(),
            self._tokenizer.get_vocab(),
        )
        differing = sum(ids.get(token) != number for token, number in own.items())
        if differing:
            raise ModelError(
                f"its tokenizer has other ids than the policy's for {differing} of {len(own)} tokens, so its "
                f"log-probabilities would be those of other texts; take a model with the same tokenizer"
            )


def _loss(
    model: nn.Module, micro_batch: MicroBatch, *, config: ObjectiveConfig, temperature: float, chunk_tokens: int | None
) -> Tensor | tuple[Tensor, Measures]:
    if isinstance(micro_batch, RolloutMicroBatch):
        return policy_loss(model, micro_batch, config, temperature, chunk_tokens)
    assert isinstance(micro_batch, ExampleMicroBatch)
    return micro_batch.scale * cross_entropy(model, micro_batch, chunk_tokens=chunk_tokens)


def _examples(place: Place[RLConfig]) -> BatchLoader:
    config, world = place.config, place.world
    data = build_data(config.data, tokenizer=place.tokenizer, seed=config.seed, world=world)
    return BatchLoader(
        data.train, config.data, seed=config.seed, rank=world.rank, world_size=world.size, allow=place.allow
    )
