"""impl = "hf": what the wrapper refuses, and that it casts as FSDP would."""

import pytest
import torch

from support.models import SIZES, build, gradients, loss_sum, packed, save_reference
from trainer.errors import ModelError


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_architectures_train_on_packed_rows(tmp_path, family):
    reference = save_reference(tmp_path, family)
    model = build(tmp_path, impl="hf")
    assert len(model.blocks) == 2
    ids = packed([9], tokens=9)["input_ids"]
    torch.testing.assert_close(model(ids), reference(ids).logits, rtol=0, atol=1e-5)
    batch = packed([4, 5], tokens=12)
    whole = loss_sum(model, batch)
    parts = [{k: v[:, s] for k, v in batch.items()} for s in (slice(0, 4), slice(4, 9))]
    parts[1]["document_ids"] = parts[1]["document_ids"] - 1
    torch.testing.assert_close(whole, loss_sum(model, parts[0]) + loss_sum(model, parts[1]), rtol=1e-5, atol=0)
    whole.backward()
    assert set(gradients(model)) == {name for name, _ in model.named_parameters()}


def test_parameter_names_are_those_of_the_files(tmp_path):
    reference = save_reference(tmp_path, "qwen3", head_dim=16)
    names = [name for name, _ in reference.named_parameters()]
    for impl in ("native", "hf"):
        assert [name for name, _ in build(tmp_path, impl=impl).named_parameters()] == names


def test_bfloat16_casts_weights_at_use_and_keeps_float32_masters(tmp_path):
    save_reference(tmp_path, tie_word_embeddings=True)
    batch = packed([7, 5], tokens=16)
    wrapped, native = (build(tmp_path, impl=impl, dtype="bfloat16") for impl in ("hf", "native"))
    losses = []
    for model in (wrapped, native):
        loss = loss_sum(model, batch)
        loss.backward()
        losses.append(loss.detach())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.output.weight is model.embedding.weight
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    for name, grad in gradients(native).items():
        assert (gradients(wrapped)[name] - grad).norm() < 0.05 * grad.norm(), name
    assert wrapped(batch["input_ids"]).dtype == torch.bfloat16


def test_logits_that_are_not_a_plain_product_are_refused(tmp_path):
    save_reference(tmp_path, "gemma2", head_dim=8)
    model = build(tmp_path, impl="hf")
    with pytest.raises(ModelError, match="Gemma2ForCausalLM does more to its logits"):
        model(torch.tensor([[1, 2]]))


def test_models_without_positions_are_refused_on_packed_rows_only(tmp_path):
    save_reference(tmp_path, "bloom", n_layer=2, n_head=4)
    model = build(tmp_path, impl="hf")
    single, two = packed([9], tokens=9), packed([4, 5], tokens=9)
    assert loss_sum(model, single).isfinite()
    with pytest.raises(ModelError, match="takes no position_ids.*data.pack = false"):
        loss_sum(model, two)


def test_files_in_an_older_layout_go_through_transformers(tmp_path):
    """GPT-2 on the hub has no `transformer.` prefix."""
    from safetensors.torch import load_file, save_file

    reference = save_reference(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    model = build(tmp_path, impl="hf")
    wanted = dict(reference.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in model.named_parameters())


def test_an_unknown_model_type_is_a_model_error(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="no_such_model"):
        build(tmp_path, impl="hf", random_init=True)
