"""The loss of a micro-batch of rollouts on real models: against full logits, however it is cut up, on one rank and two."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from support.models import build, gradients, packed, save_reference, write_config
from support.pool import run_on_ranks
from trainer.config.rl import ObjectiveConfig
from trainer.core.distributed import build_mesh
from trainer.rl.advantages import advantages
from trainer.rl.batch import RolloutMicroBatch
from trainer.rl.loss import policy_loss, token_logprobs
from trainer.rl.objective import TokenBatch, aggregation, objective

ROWS = [[9, 12], [24], [3, 5, 8], [], [20], [6, 6, 6, 6], [7]]
PROMPT = 2
WIDTH = 24


def rollouts(*rows: list[int], extras: bool = False, seed: int = 0) -> RolloutMicroBatch:
    """One document per length; the first two of its tokens are the prompt. Fields hold NaN where nothing is trained."""
    batch = packed(*rows, tokens=WIDTH, seed=seed)
    batch["labels"][batch["position_ids"] < PROMPT - 1] = -100
    generator = torch.Generator().manual_seed(seed + 1)
    trained = batch["labels"] != -100

    def numbers(center: float, spread: float) -> Tensor:
        values = center + spread * torch.randn(trained.shape, generator=generator)
        return torch.where(trained, values, math.nan)

    return RolloutMicroBatch(
        **batch,
        ids=[[""]] * len(rows),
        advantages=numbers(0.0, 1.0),
        old_logprobs=numbers(-4.5, 0.2),
        engine_logprobs=numbers(-4.5, 0.2),
        weights=numbers(1.0, 0.1),
        ref_logprobs=numbers(-4.5, 0.2) if extras else None,
        teacher_logprobs=numbers(-4.5, 0.2) if extras else None,
    )


def some_rows(micro_batch: RolloutMicroBatch, rows: slice) -> RolloutMicroBatch:
    values = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    return RolloutMicroBatch(**{name: None if value is None else value[rows] for name, value in values.items()})


def full_logits_loss(model: Any, micro_batch: RolloutMicroBatch, config: ObjectiveConfig, temperature: float) -> Tensor:
    """The same objective from every logit, one sequence at a time."""
    logits = model(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids).double() / temperature
    total = torch.zeros((), dtype=torch.float64)
    for row, documents in enumerate(micro_batch.document_ids):
        for document in range(int(documents.max()) + 1):
            at = (documents == document) & (micro_batch.labels[row] != -100)
            probs = logits[row, at].softmax(dim=1)
            fields_of = {
                f.name: None if (value := getattr(micro_batch, f.name)) is None else value[row, at].double()
                for f in fields(micro_batch)
                if f.name in TokenBatch.__dataclass_fields__
            }
            tokens = TokenBatch(
                logprobs=probs[torch.arange(len(probs)), micro_batch.labels[row, at]].log(),
                entropy=-(probs * probs.log()).sum(dim=1),
                mask=torch.ones(len(probs), dtype=torch.bool),
                sequence=torch.zeros(len(probs), dtype=torch.long),
                **fields_of,  # type: ignore[arg-type]
            )
            total = total + objective(tokens, config)[0]
    return total


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "gspo"},
        {"loss": "cispo", "kl": 0.2, "entropy": 0.1, "distill": 0.3, "old_logprobs": "trainer"},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_the_full_logits(tmp_path, impl, options):
    model, config = build(write_config(tmp_path), impl=impl, random_init=True), ObjectiveConfig(**options)
    micro_batch = rollouts(*ROWS, extras=True)
    expected = full_logits_loss(model, micro_batch, config, 0.6)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    loss, measures = policy_loss(model, micro_batch, config, 0.6, chunk_tokens=16)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert measures.sums["tokens"].item() == sum(length - PROMPT for row in ROWS for length in row)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_j2_one_temperature_on_both_sides_gives_ratio_one(tmp_path):
    """The sampler's log-probabilities at T = 0.6, from all its logits, against the trainer's; then at T = 1."""
    model = save_reference(tmp_path)
    trained = build(tmp_path)
    micro_batch = rollouts(*ROWS)
    labels = micro_batch.labels.clamp(min=0)[:, :, None]

    def ratio(sampled_at: float, trained_at: float) -> tuple[float, float]:
        with torch.no_grad():
            logits = torch.zeros(*micro_batch.labels.shape, 97)
            for row, documents in enumerate(micro_batch.document_ids):
                for document in range(int(documents.max()) + 1):
                    at = documents == document
                    logits[row, at] = model(micro_batch.input_ids[row, at][None]).logits[0]
        sampled = (logits / sampled_at).log_softmax(dim=2).gather(2, labels).squeeze(2)
        of_engine = replace(micro_batch, old_logprobs=sampled, engine_logprobs=sampled)
        found = policy_loss(trained, of_engine, ObjectiveConfig(), trained_at)[1].over_ranks()
        return found["ratio"], found["ratio_deviation_max"]

    mean, worst = ratio(0.6, 0.6)
    assert abs(mean - 1) < 1e-5 and worst < 1e-4
    mean, worst = ratio(1.0, 0.6)
    assert abs(mean - 1) > 1e-2 and worst > 1e-1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_logprobs_of_the_same_weights_give_ratio_one_to_the_bit(tmp_path, dtype):
    model = build(write_config(tmp_path), random_init=True, dtype=dtype)
    micro_batch = rollouts(*ROWS)
    old = token_logprobs(model, micro_batch, 0.6, chunk_tokens=16)
    assert old.shape == micro_batch.labels.shape and old.dtype == torch.float32 and not old.requires_grad
    assert (old[micro_batch.labels == -100] == 0).all() and (old[micro_batch.labels != -100] < 0).all()
    micro_batch = replace(micro_batch, old_logprobs=old, engine_logprobs=old)
    measures = policy_loss(model, micro_batch, ObjectiveConfig(), 0.6, chunk_tokens=16)[1]
    assert measures.maxima["ratio_deviation_max"] == 0 and measures.maxima["mismatch_max"] == 0


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_rows_add_up_to_the_whole(tmp_path, loss):
    model, config = build(write_config(tmp_path), random_init=True), ObjectiveConfig(loss=loss)
    whole = rollouts(*ROWS)
    value, measures = policy_loss(model, whole, config, 1.0)
    value.backward()
    wanted = gradients(model)
    model.zero_grad()
    total, parts = 0.0, []
    for row in range(len(ROWS)):
        part, own = policy_loss(model, some_rows(whole, slice(row, row + 1)), config, 1.0)
        part.backward()
        total += part.item()
        parts.append(own)
    assert total == pytest.approx(value.item(), rel=1e-5)
    assert sum(parts[1:], parts[0]).over_ranks() == pytest.approx(measures.over_ranks(), rel=1e-5, abs=1e-7)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_nothing_to_train_is_zero_with_zero_gradients(tmp_path):
    model = build(write_config(tmp_path), random_init=True)
    micro_batch = rollouts([9, 12], [20])
    micro_batch.labels.fill_(-100)
    loss, measures = policy_loss(model, micro_batch, ObjectiveConfig(entropy=0.1), 1.0)
    loss.backward()
    assert loss.item() == 0.0 and measures.sums["tokens"].item() == 0
    assert all((grad == 0).all() for grad in gradients(model).values())


def test_j6_the_reward_reaches_the_last_token_of_every_row(tmp_path):
    """Actions of 4 and 6 tokens, the second row full: each has the advantage of its own reward, the last one too."""
    model = build(write_config(tmp_path), random_init=True)
    batch = packed([PROMPT + 4], [PROMPT + 6], tokens=PROMPT + 6)
    batch["labels"][batch["position_ids"] < PROMPT - 1] = -100
    trained = batch["labels"] != -100
    assert trained.sum(dim=1).tolist() == [4, 6]
    (group,) = advantages([[1.0, 0.0]], "dr_grpo")
    weights, denominator = aggregation([4, 6], "token", 6)
    per_token = torch.where(trained, torch.tensor(group)[:, None], math.nan)
    nothing = torch.zeros_like(per_token)
    micro_batch = RolloutMicroBatch(
        **batch,
        ids=[[""], [""]],
        advantages=per_token,
        old_logprobs=nothing,
        engine_logprobs=nothing,
        weights=torch.tensor(weights)[:, None].expand_as(per_token),
    )
    loss, measures = policy_loss(model, micro_batch, ObjectiveConfig(loss="reinforce"), 1.0)
    logprobs = token_logprobs(model, micro_batch, 1.0)
    assert denominator == measures.sums["tokens"].item() == 10
    last = torch.tensor([PROMPT + 4, PROMPT + 6]) - 2  # predicts the row's last token
    assert (logprobs[torch.arange(2), last] < 0).all() and trained[torch.arange(2), last].all()
    by_hand = -0.5 * logprobs[0, PROMPT - 1 :][:4].sum() + 0.5 * logprobs[1, PROMPT - 1 :][:6].sum()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_to_moves_every_tensor_and_keeps_the_type():
    micro_batch = rollouts([9, 12], extras=True)
    moved = micro_batch.to("meta")
    assert isinstance(moved, RolloutMicroBatch) and moved.ids == micro_batch.ids
    tensors = [value for f in fields(moved) if isinstance(value := getattr(moved, f.name), Tensor)]
    assert len(tensors) == 10 and all(value.is_meta for value in tensors)
    assert rollouts([9]).to("cpu").ref_logprobs is None


def _train(model_dir: Path, options: dict[str, Any], loss: str) -> tuple[dict[str, Tensor], dict[str, float], Tensor]:
    """Gradients of a global batch over two micro-steps, its measures, and this rank's log-probabilities."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = build(model_dir, mesh=build_mesh("cpu", 1, -1, ranks), seed=3, random_init=True, **options)
    config = ObjectiveConfig(loss=loss, kl=0.1, entropy=0.1)  # type: ignore[arg-type]
    batch = rollouts(*ROWS, [], extras=True)  # eight rows
    measured, own = [], []
    for micro_step in range(2):
        first = micro_step * 4 + rank * 4 // ranks
        part = some_rows(batch, slice(first, first + 4 // ranks))
        own.append(token_logprobs(model, part, 0.6))
        value, measures = policy_loss(model, part, config, 0.6)
        (value / 80).backward()
        measured.append(measures)
    total = (measured[0] + measured[1]).over_ranks()
    found = {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad) for name, grad in gradients(model).items()
    }
    return found, total, torch.cat(own)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_two_ranks_give_the_gradient_of_one(tmp_path, impl, tied):
    """The last rank's last micro-batch trains little, and one of its rows nothing."""
    write_config(tmp_path, tie_word_embeddings=tied)
    options = {"impl": impl}
    grads, measures, logprobs = _train(tmp_path, options, "gspo")
    results = run_on_ranks(_train, 2, tmp_path, options, "gspo")
    for found, found_measures, _ in results:
        assert found_measures == pytest.approx(measures, rel=1e-5, abs=1e-7)
        assert set(found) == set(grads)
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    together = torch.cat([results[0][2][:2], results[1][2][:2], results[0][2][2:], results[1][2][2:]])
    torch.testing.assert_close(together, logprobs, rtol=1e-5, atol=1e-5)


def test_two_ranks_in_bfloat16_with_recomputation(tmp_path):
    write_config(tmp_path, tie_word_embeddings=True)
    options = {"dtype": "bfloat16", "activation_checkpointing": "full"}
    grads, _, _ = _train(tmp_path, options, "ppo")
    found, _, _ = run_on_ranks(_train, 2, tmp_path, options, "ppo")[0]
    for name, grad in grads.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - grad).norm() < 0.03 * grad.norm(), name
