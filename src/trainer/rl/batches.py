"""Batches in rows, from groups of rollouts: advantages, weights, log-probabilities of other models, mixed-in examples."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.run import RLConfig
from trainer.core.distributed import gather_objects
from trainer.core.log import logger
from trainer.data.batch import GlobalBatch, MicroBatch
from trainer.data.loader import BatchLoader
from trainer.models.base import CausalLM
from trainer.rl.advantages import advantages
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.loss import token_logprobs
from trainer.rl.objective import aggregation
from trainer.rl.records import write_rollouts
from trainer.rl.rendering import Renderer
from trainer.rl.report import describe_groups
from trainer.rl.rows import RolloutBatch, TrainedRollout, lay_out
from trainer.rl.source import Batch, RolloutSource
from trainer.train.run import Run
from trainer.train.supply import Place


class RolloutBatches:
    """Batches in rows, from the groups of a `RolloutSource`, whose state is theirs."""

    def __init__(
        self,
        source: RolloutSource,
        place: Place[RLConfig],
        renderer: Renderer,
        names: Sequence[str],
        examples: BatchLoader | None = None,
    ):
        self.source, self.examples, self._place = source, examples, place
        self._renderer, self._names = renderer, names
        self.make_room, self.settle = source.make_room, source.settle
        self._run: Run | None = None
        self._frozen: dict[str, CausalLM] = {}

    def attach(self, run: Run, frozen: dict[str, CausalLM]) -> None:
        """Called once before the first batch; `frozen`: models by the field of a micro-batch that they fill."""
        self._run, self._frozen = run, frozen

    def next_batch(self) -> RolloutBatch:
        """Returns this rank's part of the next batch, generated if need be. Collective."""
        assert self._run is not None
        started = time.perf_counter()
        step = self._run.progress.step
        batch = self.source.next_groups(step)
        seconds = time.perf_counter() - started
        trained, total_weight, values = self._prepare(batch)
        if not trained:
            _warn_of_nothing(batch, step + 1)
        config = self._place.config
        laid = lay_out(
            trained,
            index=self.source.taken - 1,
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
            write_rollouts(
                self._place.run_dir,
                step + 1,
                batch.groups,
                renderer=self._renderer,
                names=self._names,
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
        rewards = [[r.reward_under(config.objective.overlong) for r in group.rollouts] for group in groups]
        values = advantages(rewards, config.objective.advantage)
        members = [
            (f"{group.number}:{sample}", rollout, value)
            for group, known, of_group in zip(groups, rewards, values, strict=True)
            for sample, (rollout, reward, value) in enumerate(zip(group.rollouts, known, of_group, strict=True))
            if reward is not None and rollout.trained.any()
        ]
        lengths = [int(rollout.trained.sum()) for _, rollout, _ in members]
        weights, total = aggregation(lengths, config.objective.aggregate, config.rl.max_new_tokens)
        trained = [
            TrainedRollout(name, rollout, value, weight, rollout.logprobs)
            for (name, rollout, value), weight in zip(members, weights, strict=True)
        ]
        if batch.old_logprobs is not None:
            ends = np.cumsum([t.rollout.ids.size for t in trained], dtype=np.int64)
            for member, end in zip(trained, ends, strict=True):
                member.old_logprobs = batch.old_logprobs[end - member.rollout.ids.size : end]
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

    def _logprobs(self, model: CausalLM, micro_batch: MicroBatch) -> Tensor:
        assert self._run is not None
        config, device = self._place.config, self._run.device
        was_training = model.training
        model.eval()
        found = token_logprobs(model, micro_batch.to(device), config.rl.temperature, config.model.loss_chunk_tokens)
        model.train(was_training)
        return found.to(micro_batch.labels.device)

    def _measures(self, batch: Batch, seconds: float, step: int) -> dict[str, float]:
        found = describe_groups(batch.groups, step, self._place.config.objective.overlong)
        if batch.steps == 1:
            tokens = sum(int(r.trained.sum()) for group in batch.groups for r in group.rollouts)
            found |= {"rollout_wait_seconds": seconds, "rollout_seconds": batch.generating_seconds}
            if batch.generating_seconds:  # else it was generated before the resume
                found["rollout_tokens_per_second"] = tokens / batch.generating_seconds
            found |= {f"filtered/{reason}": count for reason, count in batch.filtered.items()}
            found["stale"] = self.source.buffer.stale
        return found


def _warn_of_nothing(batch: Batch, step: int) -> None:
    """A run that learns nothing shall not look like one that does."""
    why = [f"{count} groups were left out as {reason!r}" for reason, count in batch.filtered.items()]
    if masked := sum(len(group.rollouts) for group in batch.groups):
        why.append(f"{masked} rollouts were cut or not scored")
    logger.warning("step {} has nothing to train on: {}", step, ", ".join(why) or "no rollouts came")


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


def _mix_in(laid: RolloutBatch, examples: GlobalBatch, weight: float) -> None:
    scale = weight * laid.denominator / examples.denominator
    laid.micro_batches += [
        ExampleMicroBatch(**vars(micro_batch), scale=scale) for micro_batch in examples.micro_batches
    ]
    laid.tokens += examples.tokens
    laid.supervised_tokens += examples.supervised_tokens
