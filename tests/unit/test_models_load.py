"""Reading Hugging Face files: which errors, which dtypes, which rows."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.models import build, gradients, loss_sum, packed, save_reference, write_config
from trainer.errors import ModelError
from trainer.models.files import resolve_model_dir
from trainer.models.state import persistent_tensors


def _rewrite(model_dir: Path, change) -> dict[str, Tensor]:
    tensors = load_file(model_dir / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _split(model_dir: Path) -> None:
    """Two files and an index, as large models come."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, model_dir / file)
        weight_map |= dict.fromkeys(names, file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("split", [False, True])
def test_weights_arrive_bit_for_bit_and_nothing_stays_on_meta(tmp_path, impl, split):
    reference = save_reference(tmp_path)
    if split:
        _split(tmp_path)
    model = build(tmp_path, impl=impl)
    wanted = dict(reference.named_parameters())
    found = persistent_tensors(model)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_becomes_a_float32_master(tmp_path, dtype):
    save_reference(tmp_path)
    stored = _rewrite(tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    for name, parameter in build(tmp_path).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())


def test_integer_weights_are_refused(tmp_path):
    save_reference(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)})
    with pytest.raises(ModelError, match=r"lm_head.weight has dtype I8.*not quantized"):
        build(tmp_path)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_a_missing_key_is_named(tmp_path, impl):
    save_reference(tmp_path)
    _rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k})
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight"):
        build(tmp_path, impl=impl)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_a_surplus_key_is_named(tmp_path, impl):
    save_reference(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"model.layers.7.mlp.up_proj.weight"):
        build(tmp_path, impl=impl)


def test_old_rotary_buffers_are_tolerated(tmp_path):
    save_reference(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    build(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    save_reference(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(31,\), but config.json makes it \(32,\)"):
        build(tmp_path)


def test_a_config_with_more_rows_than_the_file_is_an_error_not_a_resize(tmp_path):
    save_reference(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(ModelError, match=r"embed_tokens.weight has shape \(97, 32\).*\(100, 32\)"):
        build(tmp_path, vocab_size=120)


def test_missing_and_damaged_files(tmp_path):
    save_reference(tmp_path)
    _split(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors cannot be read"):
        build(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors is missing"):
        build(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").rename(second)
    with pytest.raises(ModelError, match="model-00001-of-00002.safetensors is missing"):
        build(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not a safetensors index"):
        build(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\n"])
def test_files_that_hold_something_else(tmp_path, content):
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="model.safetensors cannot be read as safetensors.*download it again"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_directories_in_the_place_of_files(tmp_path, name):
    save_reference(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        build(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_no_number_is_found_and_its_tensor_named(tmp_path, value):
    save_reference(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors):
        tensors[name][3, 5] = value

    _rewrite(tmp_path, spoil)
    with pytest.raises(ModelError, match=f"{name} holds NaN or infinite values"):
        build(tmp_path)


def test_a_file_that_lacks_what_its_index_places_there(tmp_path):
    save_reference(tmp_path)
    _split(tmp_path)
    first = tmp_path / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    dropped = sorted(tensors)[0]
    del tensors[dropped]
    save_file(tensors, first)
    with pytest.raises(ModelError, match=f"model-00001-of-00002.safetensors lacks {dropped}"):
        build(tmp_path)


def test_directories_without_weights_or_names_that_are_none(tmp_path):
    write_config(tmp_path)
    with pytest.raises(ModelError, match="neither model.safetensors nor.*random_init"):
        build(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="found pytorch_model.bin: convert them"):
        build(tmp_path)
    with pytest.raises(ModelError, match="is not a directory"):
        build(tmp_path / "nowhere")
    for name in ("x" * 5000, "~nobody-of-this-name/model"):
        with pytest.raises(ModelError, match="cannot be opened: .*correct the path"):
            resolve_model_dir(name)


@pytest.mark.parametrize("keep", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_under_either_name(tmp_path, keep):
    reference = save_reference(tmp_path, tie_word_embeddings=True)
    table = reference.get_input_embeddings().weight.detach()

    def rename(tensors):
        names = ("model.embed_tokens.weight", "lm_head.weight") if keep == "both" else (keep,)
        rest = {key: value for key, value in tensors.items() if key != "model.embed_tokens.weight"}
        return rest | {name: table.clone() for name in names}

    _rewrite(tmp_path, rename)
    model = build(tmp_path)
    assert torch.equal(model.embedding.weight, table)
    assert model.output.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert [name for name, _ in model.named_parameters()].count("lm_head.weight") == 0


def test_tied_by_the_config_but_different_in_the_file_is_an_error(tmp_path):
    save_reference(tmp_path, tie_word_embeddings=True)
    _rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(
        ModelError, match="tie_word_embeddings, but lm_head.weight and model.embed_tokens.weight differ"
    ):
        build(tmp_path)


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_tied_weights_share_storage_and_their_gradient_is_the_sum_of_both_uses(tmp_path, impl):
    save_reference(tmp_path, tie_word_embeddings=True)
    model = build(tmp_path, impl=impl)
    assert model.output.weight.data_ptr() == model.embedding.weight.data_ptr()
    batch = packed([7, 5], tokens=16)
    loss_sum(model, batch).backward()
    tied = gradients(model)["model.embed_tokens.weight"]

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    _rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    untied = build(tmp_path, impl=impl)
    assert untied.output.weight.data_ptr() != untied.embedding.weight.data_ptr()
    loss_sum(untied, batch).backward()
    both = gradients(untied)
    torch.testing.assert_close(tied, both["model.embed_tokens.weight"] + both["lm_head.weight"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_add_rows_and_keep_the_old_ones(tmp_path, impl, tied):
    reference = save_reference(tmp_path, tie_word_embeddings=tied)
    same = build(tmp_path, impl=impl, vocab_size=90)
    assert same.vocab_size == 97 and same.embedding.weight.shape == (97, 32)

    models = [build(tmp_path, impl=impl, vocab_size=101, seed=seed) for seed in (1, 1, 2)]
    for model in models:
        assert model.vocab_size == 101
        for module, old in (
            (model.embedding, reference.get_input_embeddings()),
            (model.output, reference.get_output_embeddings()),
        ):
            assert module.weight.shape == (101, 32)
            assert torch.equal(module.weight[:97], old.weight)
            assert 0.005 < module.weight[97:].std() < 0.05
        assert (model.output.weight.data_ptr() == model.embedding.weight.data_ptr()) == tied
    first, again, other = (model.embedding.weight[97:] for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert models[0](torch.tensor([[100, 3]])).shape == (1, 2, 101)


def test_random_init_really_initialises(tmp_path):
    model = build(write_config(tmp_path, "qwen2", initializer_range=0.05), random_init=True, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            assert 0.04 < parameter.std() < 0.06 and abs(parameter.mean()) < 0.01, name
    again = dict(build(tmp_path, random_init=True, seed=1).named_parameters())
    other = dict(build(tmp_path, random_init=True, seed=2).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(again[name], model.get_parameter(name)) and not torch.equal(other[name], again[name])
    assert not torch.equal(again[name], again["model.layers.0.mlp.up_proj.weight"])
