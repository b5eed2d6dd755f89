"""Reinforcement learning's side of a run: rollouts of environments, the objective, rewards on held-out prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.run import RLConfig
from trainer.core.distributed import gather_objects
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.data.build import build_data
from trainer.data.loader import BatchLoader
from trainer.models.base import CausalLM
from trainer.models.build import build_model
from trainer.models.files import resolve_model_dir
from trainer.rl.advantages import advantages
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.engines import build_engine
from trainer.rl.envs import load_environments
from trainer.rl.episodes import evaluate_groups, rollouts
from trainer.rl.loss import policy_loss, token_logprobs
from trainer.rl.objective import aggregation
from trainer.rl.prompts import PromptSequence
from trainer.rl.records import write_rollouts
from trainer.rl.rendering import Renderer, stop_ids
from trainer.rl.report import describe_groups
from trainer.rl.rows import RolloutBatch, TrainedRollout, lay_out
from trainer.rl.scoring import Scorer
from trainer.rl.source import Batch, RolloutSource
from trainer.rl.types import Generator, Group, Sampling
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
    batches: "RolloutBatches"

    def __init__(self, place: Place[RLConfig]):
        config = place.config
        assert config.max_steps is not None
        self.max_steps = config.max_steps
        self.config = config
        self.environments = load_environments(config.envs, config.seed)
        self.names = [env.config.name for env in self.environments]
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
        self.batches = RolloutBatches(self, source, place, examples)
        self._tokenizer, self._world = place.tokenizer, place.world
        self._scorer: Scorer | None = None
        self._engine: Generator | None = None
        self._place = place

    def boundaries(self) -> Boundaries:
        return Boundaries(1, "carry", lambda epoch: 1)  # how many micro-steps a batch takes is known when it is there

    def attach(self, run: Run) -> None:
        self._scorer = Scorer(self.environments, self.config.seed)
        self._engine = build_engine(self.config, run.model, self._place)
        self.batches.attach(run, self._engine, self._frozen_models(run))
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
        self.batches.close()
        if self._engine is not None:
            self._engine.close()
        if self._scorer is not None:
            self._scorer.close()

    def _rollouts(self, prompts: Sequence[Any], samples: int, sampling: Sampling, purpose: str) -> list[Group]:
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
            seq_len=self.config.data.seq_len,
            purpose=purpose,
        )

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
        return "equal" if self.config.rl.filter_equal and len(set(rewards)) == 1 else None

    def _frozen_models(self, run: Run) -> dict[str, CausalLM]:
        """Returns the reference and the teacher, where the objective asks for them."""
        objective, models = self.config.objective, {}
        if objective.kl:
            models["ref_logprobs"] = self._frozen(run, objective.reference or self.config.model.name)
        if objective.teacher is not None:
            models["teacher_logprobs"] = self._frozen(run, objective.teacher)
        return models

    def _frozen(self, run: Run, name: str) -> CausalLM:
        own = self.config.model
        config = own.model_copy(update={"name": name, "random_init": own.random_init and name == own.name})
        model = build_model(
            config,
            mesh=self._place.mesh,
            device=run.device,
            seed=self.config.seed,
            vocab_size=len(self._tokenizer) if self._tokenizer is not None else 0,
        )
        return model.requires_grad_(False).eval()


class RolloutBatches:
    """Batches in rows, from the groups of a `RolloutSource`, whose state is theirs."""

    def __init__(
        self, supply: RLSupply, source: RolloutSource, place: Place[RLConfig], examples: BatchLoader | None = None
    ):
        self.supply, self.source, self.examples, self._place = supply, source, examples, place
        self.make_room, self.settle = source.make_room, source.settle
        self._run: Run | None = None
        self._frozen: dict[str, CausalLM] = {}

    def attach(self, run: Run, engine: Generator, frozen: dict[str, CausalLM]) -> None:
        del engine
        self._run, self._frozen = run, frozen

    def next_batch(self) -> RolloutBatch:
        """Returns this rank's part of the next batch, generated if need be. Collective."""
        assert self._run is not None
        started = time.perf_counter()
        step = self._run.progress.step
        batch = self.source.next_groups(step)
        seconds = time.perf_counter() - started
        trained, total_weight, values = self._prepare(batch)
        config = self._place.config
        laid = lay_out(
            trained,
            index=self.source.taken - 1,
            epoch=0,
            seq_len=config.data.seq_len,
            pack=config.data.pack,
            micro_batch_size=config.data.micro_batch_size,
            total_weight=total_weight,
            seed=config.seed,
            rank=self._place.world.rank,
            world_size=self._place.world.size,
        )
        self._add_logprobs(laid, batch, trained)
        laid.measures |= self._measures(batch, seconds, step)
        if self.examples is not None:
            _mix_in(laid, self.examples.next_batch(), config.objective.sft)
        if batch.steps == 1 and self._place.world.is_main:
            supply = self.supply
            write_rollouts(
                self._place.run_dir,
                step + 1,
                batch.groups,
                renderer=supply.renderer,
                names=supply.names,
                advantages=values,
            )
        return laid

    def state_dict(self) -> dict[str, Any]:
        state = self.source.state_dict()
        return state if self.examples is None else state | {"examples": self.examples.state_dict()}

    def state_before(self) -> dict[str, Any]:
        state = self.source.state_before()
        return state if self.examples is None else state | {"examples": self.examples.state_before()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `CheckpointMismatch` if prompts or examples would come in another order."""
        self.source.load_state_dict(state)
        if self.examples is not None and "examples" in state:
            self.examples.load_state_dict(state["examples"])

    def verify(self, saved: dict[str, Any]) -> list[str]:
        wrong = self.source.verify(saved)
        if self.examples is not None and "examples" in saved:
            wrong += [f"examples.{line}" for line in self.examples.verify(saved["examples"])]
        return wrong

    def close(self) -> None:
        self.source.close()
        if self.examples is not None:
            self.examples.close()

    def _prepare(self, batch: Batch) -> tuple[list[TrainedRollout], float, list[list[float]]]:
        """Returns the rollouts that are trained on, the loss's denominator, and every rollout's advantage."""
        config, groups = self._place.config, batch.groups
        masks = config.objective.overlong == "mask"

        def counted(rollout) -> bool:
            return rollout.reward is not None and not (masks and rollout.finish_reason == "length")

        rewards = [[r.reward if counted(r) else None for r in group.rollouts] for group in groups]
        values = advantages(rewards, config.objective.advantage)
        members = [
            (f"{group.number}:{sample}", rollout, value)
            for group, of_group in zip(groups, values, strict=True)
            for sample, (rollout, value) in enumerate(zip(group.rollouts, of_group, strict=True))
            if counted(rollout) and rollout.trained.any()
        ]
        lengths = [int(rollout.trained.sum()) for _, rollout, _ in members]
        weights, total = aggregation(lengths, config.objective.aggregate, config.rl.max_new_tokens)
        trained = [
            TrainedRollout(name, rollout, value, weight, rollout.logprobs)
            for (name, rollout, value), weight in zip(members, weights, strict=True)
        ]
        if batch.old_logprobs is not None:
            ends = np.cumsum([t.rollout.ids.size for t in trained])
            for part, member in zip(np.split(batch.old_logprobs, ends[:-1]), trained, strict=True):
                member.old_logprobs = part
        return trained, total or 1.0, values

    def _add_logprobs(self, laid: RolloutBatch, batch: Batch, trained: list[TrainedRollout]) -> None:
        """Fills in the log-probabilities under the frozen models and, before a batch's first step, the trainer's own."""
        assert self._run is not None
        model, config = self._run.model, self._place.config
        for name, frozen in self._frozen.items():
            for micro_batch in laid.micro_batches:
                setattr(micro_batch, name, self._logprobs(frozen, micro_batch))
        if config.objective.old_logprobs != "trainer" or batch.old_logprobs is not None:
            return
        for micro_batch in laid.micro_batches:
            assert isinstance(micro_batch, RolloutMicroBatch)
            micro_batch.old_logprobs = self._logprobs(model, micro_batch)
        if config.objective.iterations > 1:
            batch.old_logprobs = _by_rollout(laid, trained)

    def _logprobs(self, model: CausalLM, micro_batch: MicroBatch):
        assert self._run is not None
        config, device = self._place.config, self._run.device
        was_training = model.training
        model.eval()
        found = token_logprobs(model, micro_batch.to(device), config.rl.temperature, config.model.loss_chunk_tokens)
        model.train(was_training)
        return found.to(micro_batch.labels.device)

    def _measures(self, batch: Batch, seconds: float, step: int) -> dict[str, float]:
        found = describe_groups(batch.groups, step)
        if batch.steps == 1:
            tokens = sum(int(r.trained.sum()) for group in batch.groups for r in group.rollouts)
            found |= {"rollout_seconds": seconds, "rollout_tokens_per_second": tokens / max(seconds, 1e-9)}
            found |= {f"filtered/{reason}": count for reason, count in batch.filtered.items()}
            found["stale"] = self.source.buffer.stale
        return found


def _by_rollout(laid: RolloutBatch, trained: Sequence[TrainedRollout]) -> np.ndarray:
    """Returns the micro-batches' old log-probabilities of all ranks, rollout by rollout: float32, one per token. Collective."""
    own = {}
    for micro_batch, places in zip(laid.micro_batches, laid.places, strict=True):
        assert isinstance(micro_batch, RolloutMicroBatch)
        values = micro_batch.old_logprobs.cpu().numpy()
        for rollout, row, first, tokens in places:
            part = np.zeros(tokens, np.float32)
            part[1:] = values[row, first : first + tokens - 1]  # position t speaks of token t + 1
            own[rollout] = part
    everything = {number: part for parts in gather_objects(own) for number, part in parts.items()}
    return np.concatenate([everything[number] for number in range(len(trained))] or [np.empty(0, np.float32)])


def _loss(model: nn.Module, micro_batch: MicroBatch, *, config: Any, temperature: float, chunk_tokens: int | None):
    if isinstance(micro_batch, RolloutMicroBatch):
        return policy_loss(model, micro_batch, config, temperature, chunk_tokens)
    assert isinstance(micro_batch, ExampleMicroBatch)
    return micro_batch.scale * cross_entropy(model, micro_batch, chunk_tokens=chunk_tokens)


@dataclass
class ExampleMicroBatch(MicroBatch):
    """A micro-batch of documents among those of rollouts.

    Attributes:
        scale: of its summed loss, so that the step's denominator makes it `objective.sft` x the mean over its tokens.
    """

    scale: float = 0.0

    def to(self, device: torch.device | str) -> "ExampleMicroBatch":
        moved = super().to(device)
        return ExampleMicroBatch(**vars(moved), scale=self.scale)


def _examples(place: Place[RLConfig]) -> BatchLoader:
    config, world = place.config, place.world
    data = build_data(config.data, tokenizer=place.tokenizer, seed=config.seed, world=world)
    return BatchLoader(
        data.train, config.data, seed=config.seed, rank=world.rank, world_size=world.size, allow=place.allow
    )


def _mix_in(laid: RolloutBatch, examples: GlobalBatch, weight: float) -> None:
    scale = weight * laid.denominator / examples.denominator
    laid.micro_batches += [
        ExampleMicroBatch(**vars(micro_batch), scale=scale) for micro_batch in examples.micro_batches
    ]
    laid.tokens += examples.tokens
    laid.supervised_tokens += examples.supervised_tokens
