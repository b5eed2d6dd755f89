import json

import pytest

from support.models import SIZES, write_config
from trainer.errors import ModelError
from trainer.models.spec import decoder_spec, read_config


def _spec(family: str = "llama", **changes):
    return decoder_spec({"model_type": family} | SIZES | changes, where="m/config.json")


def test_old_and_new_rope_layouts_read_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = _spec(rope_theta=5e5, rope_scaling={"type": "llama3"} | scaling)
    new = _spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | scaling)
    assert old == new
    assert (new.rope.theta, new.rope.factor, new.rope.original_max_positions) == (5e5, 8.0, 32)


def test_missing_keys_take_the_defaults_of_transformers():
    assert _spec().rope.theta == 10_000.0 and _spec().norm_eps == 1e-6 and not _spec().tied
    config = {"model_type": "llama"} | {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    assert decoder_spec(config).num_kv_heads == 4
    assert _spec("qwen3").head_dim == 128 and _spec("qwen2").head_dim == 8


def test_biases_and_norms_follow_the_family():
    assert _spec("qwen2").qkv_bias and not _spec("qwen2").output_bias and not _spec("qwen2").qk_norm
    assert _spec("qwen3").qk_norm and not _spec("qwen3").qkv_bias
    with_bias = _spec(attention_bias=True, mlp_bias=True)
    assert with_bias.qkv_bias and with_bias.output_bias and with_bias.mlp_bias


def test_sliding_window_layers():
    window = {"sliding_window": 5, "use_sliding_window": True}
    assert _spec("qwen2", **window, max_window_layers=1).windows == (None, 5)
    assert _spec("qwen2", **window, layer_types=["sliding_attention", "full_attention"]).windows == (5, None)
    assert _spec("qwen2", sliding_window=5).windows == (None, None)
    assert _spec("qwen2", **window | {"sliding_window": None}, max_window_layers=0).windows == (None, None)
    assert _spec("qwen2", use_sliding_window=True, max_window_layers=0).windows == (4096, 4096)
    assert _spec("llama", sliding_window=5, use_sliding_window=True).windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"m/config.json: model_type = 'gpt2'.*llama, qwen2, qwen3.*model.impl = \"hf\""),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3.*divisor of num_attention_heads \(4\)"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, found '32'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"model_type": ["llama"]}, r"model_type = \"\['llama'\]\""),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number >= 0, found 'small'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number >= 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number >= 0, found nan"),
        ({"initializer_range": -0.02}, "initializer_range must be a number >= 0"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number, found 'x'"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
            "rope_parameters.rope_theta must be a positive",
        ),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "rope_scaling.factor must be a positive number, found 0",
        ),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_scaling.rope_type = \['linear'\]"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"low_freq_factor \(4.0\) must be below high_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings must be a positive integer, found 'x'",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0}}, "beta_fast must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, found 'yes'"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"model_type": "qwen2", "layer_types": 5}, "layer_types must be a list of names, found 5"),
        ({"model_type": "qwen2", "layer_types": [["a"], ["b"]]}, "layer_types must be a list of names"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": "8"},
            "sliding_window must be a positive",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers must be a number >= 0"),
    ],
)
def test_what_is_not_supported_is_an_error_naming_the_key(changes, message):
    with pytest.raises(ModelError, match=message):
        _spec(**changes)


def test_layer_types_must_fit():
    with pytest.raises(ModelError, match="layer_types has 1 entries for num_hidden_layers = 2"):
        _spec("qwen2", layer_types=["full_attention"])
    with pytest.raises(ModelError, match="'chunked_attention'"):
        _spec("qwen2", layer_types=["full_attention", "chunked_attention"])


def test_unreadable_configs(tmp_path):
    with pytest.raises(ModelError, match="config.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    assert read_config(write_config(tmp_path)) == json.loads((tmp_path / "config.json").read_text())
