"""Export: transformers loads it bit for bit, it is complete, and it appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from support.models import build, loss_sum, packed, save_reference
from support.tokenizers import QWEN, byte_tokenizer
from trainer.core.files import file_hook
from trainer.errors import ModelError
from trainer.models.hf import export_hf
from trainer.models.state import persistent_tensors


def _trained(model_dir: Path, steps: int = 2, **options):
    model = build(model_dir, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss_sum(model, packed([7, 5], tokens=16, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _names(out_dir: Path) -> list[str]:
    with safe_open(out_dir / "model.safetensors", framework="pt") as file:
        return sorted(file.keys())


FAMILIES = [("llama", "native", {}), ("qwen2", "native", {}), ("qwen3", "native", {"head_dim": 16}), ("gpt2", "hf", {})]


@pytest.mark.parametrize(("family", "impl", "changes"), FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_export_bit_for_bit(tmp_path, family, impl, changes, tied):
    save_reference(tmp_path / "source", family, tie_word_embeddings=tied, **changes)
    model = _trained(tmp_path / "source", impl=impl, dtype="bfloat16")
    export_hf(model, tmp_path / "source", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, theirs = persistent_tensors(model), dict(loaded.named_parameters())
    assert set(ours) == set(theirs)
    assert all(theirs[name].dtype == torch.float32 and torch.equal(ours[name], theirs[name]) for name in ours)
    assert (model.output.weight is model.embedding.weight) == tied
    again = build(tmp_path / "out", impl=impl)
    assert all(torch.equal(ours[name], tensor) for name, tensor in persistent_tensors(again).items())
    assert _names(tmp_path / "out") == sorted(ours)


def test_a_tied_weight_is_exported_once_after_training(tmp_path):
    save_reference(tmp_path / "source", tie_word_embeddings=True)
    model = _trained(tmp_path / "source", steps=5)
    assert model.output.weight.data_ptr() == model.embedding.weight.data_ptr()
    export_hf(model, tmp_path / "source", tmp_path / "out")
    assert "lm_head.weight" not in _names(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


def test_tied_values_that_came_apart_are_an_error(tmp_path):
    save_reference(tmp_path / "source", tie_word_embeddings=True)
    model = build(tmp_path / "source")
    model.output.weight = nn.Parameter(model.embedding.weight.detach().clone())
    export_hf(model, tmp_path / "source", tmp_path / "equal")
    assert "lm_head.weight" not in _names(tmp_path / "equal")
    with torch.no_grad():
        model.output.weight[3, 4] += 1
    with pytest.raises(ModelError, match="ties lm_head.weight to model.embed_tokens.weight, but their values differ"):
        export_hf(model, tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_config_tells_the_truth(tmp_path):
    save_reference(tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "my_key": [1, 2]}
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    model = build(tmp_path / "source", vocab_size=101)
    export_hf(model, tmp_path / "source", tmp_path / "out")
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert (exported["dtype"], exported["vocab_size"], exported["tie_word_embeddings"]) == ("float32", 101, False)
    assert "torch_dtype" not in exported
    assert exported["my_key"] == [1, 2] and exported["architectures"] == ["LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.get_input_embeddings().weight.shape == (101, 32) and loaded.dtype == torch.float32


def test_generation_config_and_tokenizer_come_along(tmp_path):
    save_reference(tmp_path / "source", vocab_size=512)
    byte_tokenizer(QWEN).save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text(
        '{"eos_token_id": 2, "temperature": 0.7, "do_sample": true}'
    )
    (tmp_path / "source/pytorch_model.bin").write_bytes(b"old weights")
    model = build(tmp_path / "source")
    for out, tokenizer in (("copied", None), ("given", byte_tokenizer("{{ messages[0].content }}"))):
        export_hf(model, tmp_path / "source", tmp_path / out, tokenizer=tokenizer)
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / out)
        assert loaded.chat_template == (QWEN if tokenizer is None else "{{ messages[0].content }}")
        assert loaded("Hello there").input_ids == byte_tokenizer()("Hello there").input_ids
        assert transformers.GenerationConfig.from_pretrained(tmp_path / out).temperature == 0.7
        assert not (tmp_path / out / "pytorch_model.bin").exists()


@pytest.mark.parametrize("where", ["other", "source"])
def test_the_exported_tokenizer_is_the_one_that_was_trained_with(where, tmp_path):
    """Files of the model's directory that would win over what the tokenizer writes stay behind."""
    save_reference(tmp_path / "source", vocab_size=512)
    byte_tokenizer(QWEN).save_pretrained(tmp_path / "source")
    (tmp_path / "source/vocab.json").write_text("{}")
    own = byte_tokenizer()
    own.eos_token, own.chat_template = "<|im_end|>", None
    own.save_pretrained(tmp_path / where)
    if where == "source":
        (tmp_path / "source/chat_template.jinja").unlink(missing_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / where)
    # From older versions of transformers, which read it only where tokenizer_config.json says less.
    (tmp_path / "source/special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    export_hf(build(tmp_path / "source"), tmp_path / "source", tmp_path / "out", tokenizer=tokenizer)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (exported.eos_token, exported.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template is None
    assert (tmp_path / "out/vocab.json").exists() == (where == "source")


@pytest.mark.parametrize("killed_at", ["before the first rename", "between the two"])
def test_what_a_killed_export_left_behind_goes_with_the_next_one(killed_at, tmp_path):
    save_reference(tmp_path / "source")
    model = build(tmp_path / "source")
    export_hf(model, tmp_path / "source", tmp_path / "out")
    (tmp_path / "source").rename(tmp_path / ".out.tmp-12")
    shutil.copytree(tmp_path / ".out.tmp-12", tmp_path / "source")
    if killed_at == "between the two":
        (tmp_path / "out").rename(tmp_path / ".out.old-12")
    (tmp_path / ".out.old-mine").mkdir()
    export_hf(model, tmp_path / "source", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.old-mine", "out", "source"]


def test_large_models_are_split_with_an_index(tmp_path):
    save_reference(tmp_path / "source")
    model = build(tmp_path / "source")
    export_hf(model, tmp_path / "source", tmp_path / "out", max_file_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[-1].startswith(f"model-{len(files):05d}-of-{len(files):05d}")
    assert all((tmp_path / "out" / file).stat().st_size < 25_000 for file in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_an_earlier_export_is_replaced_whole(tmp_path):
    save_reference(tmp_path / "source")
    model = build(tmp_path / "source")
    export_hf(model, tmp_path / "source", tmp_path / "out", max_file_bytes=20_000)
    export_hf(model, tmp_path / "source", tmp_path / "out")
    assert not list((tmp_path / "out").glob("model-*"))
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("fails", [("rename", ".out.old"), ("rename", "out"), ("fsync", ".out.tmp")])
def test_an_export_that_fails_leaves_the_earlier_one(tmp_path, fails):
    save_reference(tmp_path / "source")
    model = build(tmp_path / "source")
    export_hf(model, tmp_path / "source", tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with torch.no_grad():
        model.embedding.weight += 1

    def hook(operation: str, path: Path) -> None:
        if operation == fails[0] and path.name.split("-")[0] == fails[1]:
            raise OSError("disk full")

    with file_hook(hook), pytest.raises(ModelError, match="cannot be written: disk full"):
        export_hf(model, tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    export_hf(model, tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() != before


def test_a_directory_that_cannot_be_written(tmp_path):
    save_reference(tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        export_hf(build(tmp_path / "source"), tmp_path / "source", tmp_path / "file" / "out")
