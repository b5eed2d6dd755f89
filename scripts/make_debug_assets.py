"""Write configs/debug/assets: a tiny Llama's config and byte-level tokenizer, and 200 short conversations; and for
reinforcement learning a Llama whose tokens are characters, and sloppy examples of texts reversed.

    python scripts/make_debug_assets.py [DIRECTORY]

No downloads and no clock: the same files every time.
"""

import json
import os
import random
import sys
from pathlib import Path
from string import ascii_lowercase

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the order of equally frequent merges depends on threads

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.rl.builtin_envs import ReverseText

CONVERSATIONS = 200
VOCABULARY = 384
REVERSED, WRONG_SHARE = 4000, 0.12
END, START, STOP, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# For a model whose tokens are characters every word of a template is ten tokens.
SHORT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_start|>' }}{% endif %}"
    "{% endfor %}"
)

WORDS = "apple river stone cloud bread light horse green paper music winter garden silver window button candle".split()
COLOURS = {"grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red"}


def conversation(draw: random.Random) -> list[dict[str, str]]:
    messages = []
    if draw.random() < 0.2:
        messages.append({"role": "system", "content": "Answer in few words."})
    for _ in range(draw.choice([1, 1, 2])):
        question, answer = draw.choice([_sum, _spell, _colour, _count])(draw)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randrange(20), draw.randrange(20)
    return f"What is {a} plus {b}?", f"{a + b}."


def _spell(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(WORDS)
    return f"Spell {word} backwards.", f"{word[::-1]}."


def _colour(draw: random.Random) -> tuple[str, str]:
    thing = draw.choice(list(COLOURS))
    return f"What colour is {thing}?", f"It is {COLOURS[thing]}."


def _count(draw: random.Random) -> tuple[str, str]:
    start = draw.randrange(50)
    return f"Count on from {start}.", ", ".join(str(start + step) for step in (1, 2, 3)) + "."


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def character_tokenizer() -> Tokenizer:
    """Every printable ASCII character is a token."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: place for place, token in enumerate([END, START, STOP, UNKNOWN, "\n", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, START, STOP, UNKNOWN])
    return tokenizer


def reversed_texts() -> list[list[dict[str, str]]]:
    """The environment's own training prompts, answered by somebody sloppy: a model that learns from this knows the task
    and does it badly, which rewards can mend."""
    env, draw, rows = ReverseText(), random.Random(1), []
    for index in range(REVERSED):
        question, info = env.prompt(index, "train")
        letters = [draw.choice(ascii_lowercase) if draw.random() < WRONG_SHARE else c for c in info["answer"]]
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": "".join(letters)}])
    return rows


def main(directory: Path) -> None:
    draw = random.Random(0)
    conversations = [conversation(draw) for _ in range(CONVERSATIONS)]
    _write_rows(directory / "chat.jsonl", conversations)
    tokenizer = train_tokenizer([message["content"] for messages in conversations for message in messages])
    _write_model(directory / "tiny-llama", tokenizer, CHAT_TEMPLATE, hidden_size=64, layers=2, max_length=256)
    _write_rows(directory / "reverse.jsonl", reversed_texts())
    letters = character_tokenizer()
    _write_model(directory / "letters-llama", letters, SHORT_TEMPLATE, hidden_size=128, layers=3, max_length=128)


def _write_model(
    model_dir: Path, tokenizer: Tokenizer, chat_template: str, *, hidden_size: int, layers: int, max_length: int
) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    token_id = {token: tokenizer.token_to_id(token) for token in (END, STOP)}
    _write(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "bos_token": None,
            "eos_token": STOP,
            "pad_token": END,
            "unk_token": UNKNOWN if tokenizer.token_to_id(UNKNOWN) is not None else None,
            "additional_special_tokens": [START],
            "chat_template": chat_template,
        },
    )
    _write(
        model_dir / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size * (2 if hidden_size < 128 else 4),
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden_size // 4,
            "hidden_act": "silu",
            "max_position_embeddings": max_length,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": token_id[END],
            "eos_token_id": token_id[STOP],
            "pad_token_id": token_id[END],
            "torch_dtype": "float32",
        },
    )


def _write_rows(path: Path, conversations: list[list[dict[str, str]]]) -> None:
    rows = [json.dumps({"messages": messages}) for messages in conversations]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "configs" / "debug" / "assets")
