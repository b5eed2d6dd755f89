"""What a decoder looks like, read from a Hugging Face config.json.

Only the JSON is read (old `rope_theta`/`rope_scaling` and new `rope_parameters` layouts alike), so that a wrong or
unsupported model is known before transformers is imported.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import ModelError

# What transformers assumes for keys that a config.json leaves out, per family.
_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "qwen2": _COMMON | {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": _COMMON
    | {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding. Fields beyond `theta` matter only for the types that use them."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of pretraining, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DecoderSpec:
    """A Llama, Qwen2 or Qwen3 decoder. Sizes are in elements, lengths in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    """Per layer: how many positions back a token sees, itself included; None = all."""
    init_std: float


def read_config(model_dir: Path) -> dict[str, Any]:
    """Returns the parsed config.json of a model directory.

    Raises:
        ModelError: no config.json, or one that is not a JSON object.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; model.name must be a Hugging Face model directory") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def decoder_spec(config: dict[str, Any], where: str = "config.json") -> DecoderSpec:
    """Returns the native decoder's spec for a parsed config.json; `where` names the file in errors.

    Raises:
        ModelError: a key is missing or has a value that the native decoder does not implement.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        _unsupported(where, "model_type", family, f"one of {', '.join(FAMILIES)}")
    reader = _Reader(config, FAMILIES[family], where)
    _check_features(reader)

    heads = reader.positive("num_attention_heads")
    hidden = reader.positive("hidden_size")
    layers = reader.positive("num_hidden_layers")
    kv_heads = reader.positive("num_key_value_heads", default=heads)
    head_dim = reader.positive("head_dim", default=hidden // heads)
    if heads % kv_heads:
        _unsupported(where, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        _unsupported(where, "head_dim", head_dim, "an even number (rotary embedding turns pairs)")
    attention_bias = reader.flag("attention_bias")
    return DecoderSpec(
        family=family,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", zero=True),
        max_positions=reader.positive("max_position_embeddings"),
        rope=_rope(reader),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and reader.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied=reader.flag("tie_word_embeddings"),
        windows=_windows(reader, layers),
        init_std=reader.number("initializer_range", zero=True),
    )


class _Reader:
    """Typed access to config.json over the family's defaults."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any], where: str):
        self.config, self.defaults, self.where = config, defaults, where

    def get(self, key: str) -> Any:
        value = self.config.get(key)
        return self.defaults.get(key) if value is None else value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.where}: {key} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, *, zero: bool = False) -> float:
        return _number(self.get(key), f"{self.where}: {key}", zero=zero)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} must be true or false, found {value!r}")
        return bool(value)


def _number(value: Any, what: str, *, zero: bool = False) -> float:
    """Returns a positive finite number (`zero`: or 0); a wrong one would become NaN somewhere in the model."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not fits or (value == 0 and not zero):
        raise ModelError(f"{what} must be a {'number >= 0' if zero else 'positive number'}, found {value!r}")
    return float(value)


def _unsupported(where: str, key: str, found: Any, expected: str) -> NoReturn:
    raise ModelError(
        f"{where}: {key} = {found!r} is not supported by the native decoder (expected {expected}); "
        'set model.impl = "hf" to train it through transformers'
    )


def _check_features(reader: _Reader) -> None:
    config, where = reader.config, reader.where
    if reader.get("hidden_act") not in ("silu", "swish"):
        _unsupported(where, "hidden_act", reader.get("hidden_act"), "'silu'")
    if config.get("attention_dropout"):
        _unsupported(where, "attention_dropout", config["attention_dropout"], "0")
    if config.get("pretraining_tp", 1) not in (None, 1):
        _unsupported(where, "pretraining_tp", config["pretraining_tp"], "1")
    if config.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantization_config is set; training needs unquantized weights")


def _rope(reader: _Reader) -> RopeSpec:
    where = reader.where
    # transformers 5 writes one `rope_parameters`; before, theta stood alone and `rope_scaling` held the rest.
    values = reader.config.get("rope_scaling") or reader.config.get("rope_parameters") or {}
    key = "rope_scaling" if reader.config.get("rope_scaling") else "rope_parameters"
    if not isinstance(values, dict):
        raise ModelError(f"{where}: {key} must be an object, found {values!r}")
    if any(isinstance(value, dict) for value in values.values()):
        _unsupported(where, key, values, "one set of parameters for all layers")
    rope_type = values.get("rope_type", values.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        _unsupported(where, f"{key}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    partial = values.get("partial_rotary_factor", reader.config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        _unsupported(where, "partial_rotary_factor", partial, "1.0")

    required = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }[rope_type]
    missing = [name for name in required if values.get(name) is None]
    if missing:
        raise ModelError(f"{where}: {key} of type {rope_type!r} lacks {', '.join(missing)}")

    theta = values.get("rope_theta")
    spec = RopeSpec(
        theta=reader.number("rope_theta") if theta is None else _number(theta, f"{where}: {key}.rope_theta"),
        type=rope_type,
        original_max_positions=_original_positions(reader, values, key),
        **{
            name: _number(values[name], f"{where}: {key}.{name}", zero=name.startswith("mscale"))
            for name in _ROPE_NUMBERS
            if values.get(name) is not None
        },
        truncate=bool(values.get("truncate", True)),
    )
    if spec.theta <= 1:
        raise ModelError(f"{where}: rope_theta must be above 1, found {spec.theta}: it is the base of the wavelengths")
    if rope_type == "llama3" and not spec.low_freq_factor < spec.high_freq_factor:
        raise ModelError(
            f"{where}: {key}.low_freq_factor ({spec.low_freq_factor}) must be below high_freq_factor "
            f"({spec.high_freq_factor})"
        )
    return spec


_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _original_positions(reader: "_Reader", values: dict[str, Any], key: str) -> int:
    # A top-level value wins over the nested one, as in transformers.
    nested = values.get("original_max_position_embeddings")
    original = reader.config.get("original_max_position_embeddings", nested)
    if not original:
        return reader.positive("max_position_embeddings")
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise ModelError(
            f"{reader.where}: {key}.original_max_position_embeddings must be a positive integer, found {original!r}"
        )
    return original


def _windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    config, where = reader.config, reader.where
    if config["model_type"] == "llama":  # its attention has no window, whatever the file says
        return (None,) * layers
    window = None
    # A window of null is none, as in transformers; a file without the key has the family's.
    if reader.flag("use_sliding_window") and config.get("sliding_window", 0) is not None:
        window = reader.positive("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = reader.number("max_window_layers", zero=True)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"{where}: layer_types must be a list of names, found {kinds!r}")
    if len(kinds) != layers:
        raise ModelError(f"{where}: layer_types has {len(kinds)} entries for num_hidden_layers = {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        _unsupported(where, "layer_types", unknown[0], "'full_attention' or 'sliding_attention'")
    if "sliding_attention" in kinds and window is None:
        raise ModelError(f"{where}: layer_types has 'sliding_attention' but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
