"""Sharded models on gloo ranks against a single process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support.models import build, gradients, loss_sum, packed, save_reference, write_config
from support.pool import run_on_ranks
from trainer.core.distributed import build_mesh
from trainer.models.base import CausalLM
from trainer.models.state import ModelState

LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, replica groups
ROWS = [[9, 12], [24], [3, 5, 8], [24], [1, 2, 3], [], [20], [6, 6, 6, 6]]


def _whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def _train(model_dir: Path, replicas: int, options: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], bool]:
    """[weights at start, gradients of a global batch over two micro-steps, weights after an update], still tied?"""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = build_mesh("cpu", replicas, -1, ranks)
    model = build(model_dir, mesh=mesh, seed=3, **options)
    state = ModelState(model)
    start = _whole(state.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = packed(*ROWS, tokens=24)
    tokens = int((batch["labels"] != -100).sum())
    per_step = len(ROWS) // 2
    for micro_step in range(2):
        if ranks > 1:
            model.set_requires_all_reduce(micro_step == 1)  # type: ignore[attr-defined]
        first = micro_step * per_step + rank * per_step // ranks
        rows = slice(first, first + per_step // ranks)
        (loss_sum(model, {name: value[rows] for name, value in batch.items()}) / tokens).backward()
    grads = _whole(gradients(model))
    optimizer.step()
    with torch.no_grad():  # what an evaluation leaves behind must not change what is saved
        model(batch["input_ids"][:1])
    assert [id(tensor) for tensor in state.state_dict().values()] == [id(p) for p in model.parameters()]
    return [start, grads, _whole(state.state_dict())], model.output.weight is model.embedding.weight


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "replicas"), LAYOUTS)
def test_gradients_are_the_sum_over_ranks_and_micro_steps(tmp_path, impl, tied, ranks, replicas):
    write_config(tmp_path, tie_word_embeddings=tied)
    options = {"impl": impl, "random_init": True}
    (start, grads, end), still_tied = _train(tmp_path, 1, options)
    for (found_start, found_grads, found_end), found_tied in run_on_ranks(_train, ranks, tmp_path, replicas, options):
        assert found_tied == still_tied == tied
        assert set(found_start) == set(start) and set(found_grads) == set(grads)
        for name in start:
            assert torch.equal(found_start[name], start[name]), name
            torch.testing.assert_close(found_grads[name], grads[name], rtol=1e-4, atol=1e-7, msg=name)
            torch.testing.assert_close(found_end[name], end[name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_bfloat16_gathers_in_bfloat16_and_reduces_in_float32(tmp_path, impl):
    write_config(tmp_path)
    options = {"impl": impl, "random_init": True, "dtype": "bfloat16"}
    (_, grads, _), _ = _train(tmp_path, 1, options)
    (_, found, _), _ = run_on_ranks(_train, 2, tmp_path, 1, options)[0]
    for name, grad in grads.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - grad).norm() < 0.02 * grad.norm(), name


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_recomputation_changes_no_bit_when_sharded(tmp_path, impl, mode):
    write_config(tmp_path, tie_word_embeddings=True)
    options = {"impl": impl, "random_init": True, "dtype": "bfloat16"}
    plain, _ = run_on_ranks(_train, 2, tmp_path, 1, options)[0]
    recomputed, _ = run_on_ranks(_train, 2, tmp_path, 1, options | {"activation_checkpointing": mode})[0]
    for expected, found in zip(plain, recomputed, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _load(model_dir: Path, impl: str, vocab_size: int) -> tuple[dict[str, torch.Tensor], bool, int]:
    mesh = build_mesh("cpu", 1, -1, dist.get_world_size())
    model = build(model_dir, mesh=mesh, impl=impl, vocab_size=vocab_size)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    held = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    return _whole(ModelState(model).state_dict()), model.output.weight is model.embedding.weight, held


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [0, 98, 110])
def test_each_rank_loads_its_rows(tmp_path, impl, tied, vocab_size):
    """97, 98 and 110 rows over 4 ranks: uneven shards, and added rows on the last rank, or on more than one."""
    reference = save_reference(tmp_path, tie_word_embeddings=tied)
    alone = build(tmp_path, impl=impl, vocab_size=vocab_size)
    results = run_on_ranks(_load, 4, tmp_path, impl, vocab_size)
    for weights, still_tied, _ in results:
        assert still_tied == tied
        assert all(torch.equal(weights[name], parameter) for name, parameter in alone.named_parameters())
    assert torch.equal(results[0][0]["model.norm.weight"], reference.model.norm.weight)
    assert sum(held for *_, held in results) == sum(parameter.numel() for parameter in alone.parameters())


def _load_error(model_dir: Path) -> str:
    try:
        _load(model_dir, "native", 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_bad_file_is_an_error_on_every_rank(tmp_path):
    save_reference(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    for message in run_on_ranks(_load_error, 2, tmp_path):
        assert message.startswith("ModelError") and "mlp.gate_proj.weight has shape (48, 32)" in message


def _export(model_dir: Path, out_dir: Path, replicas: int) -> None:
    from trainer.models.hf import export_hf

    mesh = build_mesh("cpu", replicas, -1, dist.get_world_size())
    model = build(model_dir, mesh=mesh, dtype="bfloat16")
    loss_sum(model, packed([9], tokens=9)).backward()
    export_hf(model, model_dir, out_dir, max_file_bytes=30_000)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sharded_export_equals_the_source(tmp_path, replicas):
    import transformers

    reference = save_reference(tmp_path / "source", tie_word_embeddings=True)
    run_on_ranks(_export, 4, tmp_path / "source", tmp_path / "out", replicas)
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in reference.named_parameters())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def _export_into_a_file(model_dir: Path, out_dir: Path) -> str:
    try:
        _export(model_dir, out_dir, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_an_export_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    save_reference(tmp_path / "source")
    (tmp_path / "file").touch()
    for message in run_on_ranks(_export_into_a_file, 2, tmp_path / "source", tmp_path / "file/out"):
        assert message.startswith("ModelError") and "cannot be written" in message


def _export_onto_a_full_disk(model_dir: Path, out_dir: Path) -> str:
    from trainer.models import hf

    calls = []
    save_file = hf.save_file

    def fails_on_the_second(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no space left")
        save_file(*args, **kwargs)

    hf.save_file = fails_on_the_second
    try:
        return _export_into_a_file(model_dir, out_dir)
    finally:
        hf.save_file = save_file  # the pool's processes live on


def test_a_disk_that_fills_up_is_an_error_on_every_rank_and_leaves_no_export(tmp_path):
    save_reference(tmp_path / "source")
    main, other = run_on_ranks(_export_onto_a_full_disk, 2, tmp_path / "source", tmp_path / "out")
    assert main.startswith("ModelError") and "cannot be written: no space left" in main
    assert "rank 0" in other and "no space left" in other
    assert not (tmp_path / "out").exists()


def _generated(model_dir: Path) -> list[int]:
    from trainer.models.generate import generate

    mesh = build_mesh("cpu", 1, -1, dist.get_world_size())
    model: CausalLM = build(model_dir, mesh=mesh)
    return generate(model, [5, 6], max_new_tokens=4, temperature=2.0, seed=1)


def test_sharded_generation_equals_one_process(tmp_path):
    from trainer.models.generate import generate

    save_reference(tmp_path)
    expected = generate(build(tmp_path), [5, 6], max_new_tokens=4, temperature=2.0, seed=1)
    assert run_on_ranks(_generated, 2, tmp_path) == [expected, expected]
