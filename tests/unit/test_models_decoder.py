"""The native decoder against transformers, over packed rows, and under recomputation."""

import pytest
import torch

from support.models import build, gradients, loss_sum, packed, save_reference, write_config

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

MODELS = {
    "llama": ("llama", {}),
    "llama with biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama without GQA, wide heads": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "dynamic rope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": 16,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 with a sliding window, tied": ("qwen2", {**WINDOW, "tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2 yarn, scaled": (
        "qwen2",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases, window, tied": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, **WINDOW},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(tmp_path, name):
    family, changes = MODELS[name]
    reference = save_reference(tmp_path, family, **changes)
    model = build(tmp_path)
    batch = packed([30], [30], tokens=30)
    logits = model(batch["input_ids"])
    expected = reference(batch["input_ids"]).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)

    loss_sum(model, batch).backward()
    labels = batch["labels"].flatten()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels, reduction="sum").backward()
    wanted = dict(reference.named_parameters())
    found = gradients(model)
    assert set(found) == set(wanted)
    for key, grad in found.items():
        scale = wanted[key].grad.abs().max().item()
        torch.testing.assert_close(grad, wanted[key].grad, rtol=0, atol=2e-5 * max(scale, 1.0), msg=key)


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("name", ["llama", "qwen2 with a sliding window, tied", "qwen3", "dynamic rope"])
def test_i6_packed_loss_and_gradients_equal_separate_documents(tmp_path, name, impl):
    if impl == "hf" and name == "dynamic rope":
        pytest.skip("transformers scales by the longest document of the batch")
    family, changes = MODELS[name]
    save_reference(tmp_path, family, **changes)
    model = build(tmp_path, impl=impl)
    together = packed([3, 20, 5], [9, 4], tokens=32)
    whole = loss_sum(model, together)
    whole.backward()
    expected_gradients = gradients(model)
    model.zero_grad()

    total = torch.zeros(())
    for row in range(2):
        documents = together["document_ids"][row]
        for number in range(int(documents.max()) + 1):
            one = {key: value[row][documents == number][None] for key, value in together.items()}
            one["document_ids"].zero_()
            loss = loss_sum(model, one)
            loss.backward()
            total += loss.detach()
    torch.testing.assert_close(whole.detach(), total, rtol=1e-5, atol=0)
    for key, grad in gradients(model).items():
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(expected_gradients[key], grad, rtol=0, atol=2e-5 * scale, msg=key)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_i6_changing_one_document_leaves_the_other_documents_alone(tmp_path, impl):
    save_reference(tmp_path, "qwen2", **WINDOW)
    model = build(tmp_path, impl=impl)
    batch = packed([3, 5, 4], tokens=16)
    changed = dict(batch) | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 3:8] = (changed["input_ids"][0, 3:8] + 1) % 97
    changed["input_ids"][0, 12:] = 5  # padding
    with torch.no_grad():
        before, after = (model(b["input_ids"], b["position_ids"], b["document_ids"])[0] for b in (batch, changed))
    assert torch.equal(before[:3], after[:3]) and torch.equal(before[8:12], after[8:12])
    assert (before[3:8] != after[3:8]).any(dim=-1).all()


def test_i6_boundary_labels_are_ignored_and_positions_restart():
    batch = packed([3, 5], tokens=8)
    assert batch["labels"][0, 2] == -100 and batch["labels"][0, 7] == -100
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_padding_only_rows_are_harmless(tmp_path):
    model = build(write_config(tmp_path), random_init=True)
    batch = packed([4, 4], [], tokens=8)
    loss_sum(model, batch).backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    with_padding = gradients(model)
    model.zero_grad()
    loss_sum(model, {key: value[:1] for key, value in batch.items()}).backward()
    torch.testing.assert_close(with_padding, gradients(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_i8_recomputation_changes_no_bit(tmp_path, impl, dtype, mode):
    write_config(tmp_path, "qwen3", head_dim=16, **({"attention_dropout": 0.3} if impl == "hf" else {}))
    results, calls = [], []
    for setting in ("none", mode):
        model = build(tmp_path, impl=impl, dtype=dtype, activation_checkpointing=setting, random_init=True)
        runs = []
        model.blocks[0].get_submodule("input_layernorm").register_forward_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(7)
        loss = loss_sum(model, packed([7, 5], tokens=16))
        loss.backward()
        results.append([loss.detach(), *gradients(model).values()])
        calls.append(len(runs))
    assert calls[1] == calls[0] + 1  # it really recomputes
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_blocks_give_the_same_gradients(tmp_path):
    from trainer.models.parallelize import compile_blocks

    write_config(tmp_path)
    batch = packed([7, 5], tokens=16)
    results = []
    for compiled in (False, True):
        model = build(tmp_path, random_init=True, activation_checkpointing="full" if compiled else "none")
        if compiled:
            model.static_attention = True
            compile_blocks(model, backend="aot_eager")
        loss_sum(model, batch).backward()
        results.append(gradients(model))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_bfloat16_keeps_float32_masters_and_their_gradients(tmp_path):
    save_reference(tmp_path)
    model = build(tmp_path, dtype="bfloat16")
    batch = packed([7, 5], tokens=16)
    assert model(batch["input_ids"]).dtype == torch.bfloat16
    loss_sum(model, batch).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {grad.dtype for grad in gradients(model).values()} == {torch.float32}
    exact = build(tmp_path)
    loss_sum(exact, batch).backward()
    for key, grad in gradients(exact).items():
        assert (gradients(model)[key] - grad).norm() < 0.1 * grad.norm(), key


def test_small_updates_of_norm_weights_survive(tmp_path):
    """A bfloat16 weight near 1 moves in steps of 0.0078: with lr 1e-4 it would never move at all."""
    model = build(write_config(tmp_path), dtype="bfloat16", random_init=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    norm = dict(model.named_parameters())["model.norm.weight"]
    before = norm.detach().clone()
    for step in range(3):
        loss_sum(model, packed([7, 5], tokens=16, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < (norm - before).abs().max() < 0.0078


def test_token_mean_over_the_global_batch_for_any_split(tmp_path):
    """Documents of 11 and 101 tokens in one micro-batch, or one after the other: the same gradient."""
    model = build(write_config(tmp_path, max_position_embeddings=128), random_init=True)
    batch = packed([11], [101], tokens=101)
    tokens = int((batch["labels"] != -100).sum())
    assert tokens == 110
    (loss_sum(model, batch) / tokens).backward()
    together = gradients(model)
    model.zero_grad()
    for row in range(2):
        (loss_sum(model, {key: value[row : row + 1] for key, value in batch.items()}) / tokens).backward()
    torch.testing.assert_close(gradients(model), together, rtol=1e-5, atol=1e-6)
