"""Rollouts in rows: every token keeps what belongs to it, and how it is cut up changes nothing."""

import numpy as np
import pytest
import torch

from trainer.rl.rows import TrainedRollout, lay_out
from trainer.rl.types import Rollout


def rollout(length: int, prompt: int, seed: int) -> Rollout:
    draw = np.random.default_rng(seed)
    trained = np.arange(length) >= prompt
    return Rollout(
        ids=draw.integers(5, 90, length).astype(np.int32),
        trained=trained,
        logprobs=np.where(trained, -draw.random(length), 0).astype(np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
        finish_reason="stop",
    )


ROLLOUTS = [
    TrainedRollout(f"{n}:0", r, advantage=float(n) - 2, weight=1 / (n + 1), old_logprobs=r.logprobs - np.float32(n))
    for n, r in enumerate(rollout(length, 3, length) for length in (7, 12, 5, 9, 16, 4))
]


def tokens(pack: bool, micro: int, world: int) -> dict[tuple, tuple]:
    """(rollout, position of the target) -> everything the loss sees of it, gathered from all ranks."""
    found = {}
    for rank in range(world):
        batch = lay_out(
            ROLLOUTS,
            index=3,
            seq_len=16,
            pack=pack,
            micro_batch_size=micro,
            total_weight=6.0,
            seed=0,
            rank=rank,
            world_size=world,
        )
        assert batch.denominator == 6.0
        for micro_batch in batch.micro_batches:
            for row, names in enumerate(micro_batch.ids):
                for position in torch.nonzero(micro_batch.labels[row] >= 0).flatten().tolist():
                    document = int(micro_batch.document_ids[row, position])
                    key = (names[document], int(micro_batch.position_ids[row, position]) + 1)
                    assert key not in found
                    fields = (micro_batch.labels, micro_batch.advantages, micro_batch.weights)
                    fields += (micro_batch.old_logprobs, micro_batch.engine_logprobs)
                    found[key] = (int(micro_batch.input_ids[row, position]), *(f[row, position].item() for f in fields))
    return found


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_trained_token_once_with_what_belongs_to_it(pack, micro, world):
    wanted = {}
    for one in ROLLOUTS:
        for place in np.flatnonzero(one.rollout.trained).tolist():
            wanted[one.id, place] = (
                int(one.rollout.ids[place - 1]),
                int(one.rollout.ids[place]),
                np.float32(one.advantage).item(),
                np.float32(one.weight).item(),
                one.old_logprobs[place].item(),
                one.rollout.logprobs[place].item(),
            )
    assert tokens(pack, micro, world) == wanted


def test_places_name_where_each_rollout_lies():
    batch = lay_out(
        ROLLOUTS,
        index=0,
        seq_len=16,
        pack=True,
        micro_batch_size=2,
        total_weight=1.0,
        seed=0,
        rank=0,
        world_size=1,
    )
    seen = set()
    for micro_batch, places in zip(batch.micro_batches, batch.places, strict=True):
        for number, row, first, length in places:
            assert micro_batch.input_ids[row, first : first + length].tolist() == ROLLOUTS[number].rollout.ids.tolist()
            seen.add(number)
    assert seen == set(range(len(ROLLOUTS)))


def test_nothing_to_train_on_is_padding_on_every_rank():
    batch = lay_out(
        [], index=0, seq_len=16, pack=True, micro_batch_size=2, total_weight=1.0, seed=0, rank=1, world_size=2
    )
    (micro_batch,) = batch.micro_batches
    assert (micro_batch.labels == -100).all() and batch.tokens == 0 and batch.denominator == 1.0
