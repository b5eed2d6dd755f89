"""The local engine over sharded parameters: the completions of one process, and no collective while generating."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.models import build, gradients, loss_sum, packed, save_reference
from support.pool import run_on_ranks
from trainer.core.distributed import build_mesh
from trainer.models.base import CausalLM
from trainer.rl.rollout import LocalEngine
from trainer.rl.types import Completion, Request, Sampling

REQUESTS = [Request([5 + i, 6, 7][: 1 + i % 3], 10, seed=i) for i in range(6)]
SAMPLING = Sampling(temperature=0.8)


def _model(model_dir: Path, **options: Any) -> CausalLM:
    mesh = build_mesh("cpu", 1, -1, dist.get_world_size()) if dist.is_initialized() else None
    return build(model_dir, mesh=mesh, **options)


def _train(model: CausalLM) -> dict[str, torch.Tensor]:
    """One step on the same batch on all ranks; returns this rank's part of the gradients."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    batch = packed([9, 12], [24], tokens=24)
    (loss_sum(model, batch) / ranks).backward()
    found = gradients(model)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.zero_grad()
    return {name: getattr(gradient, "_local_tensor", gradient).clone() for name, gradient in found.items()}


def _generate(model_dir: Path, options: dict[str, Any]) -> list[list[Completion]]:
    """Completions before and after a step; rank 1 has more to do than rank 0, which no collective would survive."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = _model(model_dir, **options)
    engine = LocalEngine(model, slots=2)
    results = []
    for version in range(2):
        engine.update(version)
        asked = REQUESTS if rank == 1 or not dist.is_initialized() else REQUESTS[:1]
        results.append(engine.generate(asked, SAMPLING))
        _train(model)
    return results


def _gradients(model_dir: Path, generates: bool) -> dict[str, torch.Tensor]:
    model = _model(model_dir)
    _train(model)
    if generates:
        engine = LocalEngine(model, slots=2)
        engine.update(1)
        engine.generate(REQUESTS[: 1 + dist.get_rank()], SAMPLING)
    return _train(model)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {}), ("qwen3", {"impl": "hf"}), ("llama", {"activation_checkpointing": "full"})],
    ids=["native", "hf", "recomputed"],
)
def test_sharded_weights_give_the_completions_of_one_process(tmp_path, family, options):
    changes = {"head_dim": 16} if family == "qwen3" else {"tie_word_embeddings": True}
    save_reference(tmp_path, family, **changes)
    expected = _generate(tmp_path, options)
    first, second = run_on_ranks(_generate, 2, tmp_path, options)
    for version in range(2):
        for completion, wanted in zip(second[version], expected[version], strict=True):
            assert (completion.ids, completion.versions) == (wanted.ids, wanted.versions)
            assert completion.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert first[version][0].ids == expected[version][0].ids


def test_training_does_not_see_generation(tmp_path):
    save_reference(tmp_path)
    without = run_on_ranks(_gradients, 2, tmp_path, False)
    with_generation = run_on_ranks(_gradients, 2, tmp_path, True)
    for ours, expected in zip(with_generation, without, strict=True):
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
