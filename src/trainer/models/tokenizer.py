"""The tokenizer of a model directory."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.model import ModelConfig
from trainer.errors import ModelError
from trainer.models.files import resolve_model_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MAX_ROWS = 2**24
"""More tokens than any tokenizer has; a table of that many rows is gigabytes in itself."""


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer of `model.tokenizer` (default: the one beside the model), with `model.chat_template`.

    It always has an end-of-text token: its own, or the `eos_token_id` of the model's config.json. Padding is left as it
    is; batches do not use it.

    Raises:
        ModelError: there is no tokenizer, no end-of-text token, or the template file cannot be read.
    """
    from transformers import AutoTokenizer

    tokenizer_dir = resolve_model_dir(
        config.tokenizer or config.name, "model.tokenizer" if config.tokenizer else "model.name"
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    except Exception as error:  # a damaged file is a bare Exception of tokenizers, or whatever transformers trips over
        raise ModelError(
            f"{tokenizer_dir} holds no tokenizer that transformers can load: {str(error) or type(error).__name__}; "
            "download it again, or set model.tokenizer to a directory that has a sound tokenizer.json"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{tokenizer_dir}: {type(tokenizer).__name__} is not backed by the tokenizers library, which knows where in the "
            "text each token lies; save it once as tokenizer.json (AutoTokenizer with use_fast) and set model.tokenizer"
        )
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(config.chat_template))
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = _eos_of_model(config, tokenizer, tokenizer_dir)
    return tokenizer


def vocabulary_rows(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Returns how many rows an embedding needs: the tokenizer's highest id plus one, for its ids may have holes.

    Raises:
        ModelError: more than any embedding has.
    """
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if highest >= MAX_ROWS:
        raise ModelError(
            f"{tokenizer.name_or_path}: the id of token {token!r} is {highest}, behind the last row of any embedding "
            f"({MAX_ROWS}); tokenizer.json is damaged: download it again"
        )
    return max(len(tokenizer), highest + 1)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"model.chat_template: {path} cannot be read: {error}") from error


def _eos_of_model(config: ModelConfig, tokenizer: "PreTrainedTokenizerFast", tokenizer_dir: Path) -> str:
    from trainer.models.spec import read_config

    eos = read_config(resolve_model_dir(config.name)).get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    token = tokenizer.convert_ids_to_tokens(eos) if isinstance(eos, int) and 0 <= eos < len(tokenizer) else None
    if not isinstance(token, str):
        raise ModelError(
            f"{tokenizer_dir}: the tokenizer has no eos_token and config.json no eos_token_id; "
            "set eos_token in tokenizer_config.json"
        )
    return token
