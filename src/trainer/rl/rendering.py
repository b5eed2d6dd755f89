"""Between messages and token ids, for conversations that a model continues.

A prompt is the chat template's rendering with the generation prompt. What the environment says later is tokenized as the
part that the template adds after the model's turn: the model's own token ids are never made from text again, because a
text has more than one tokenization and the policy is only responsible for the one that it produced.

A tokenizer without a chat template (a base model's) gets every message as a line of its own and answers on the next one;
in training data for it, a row's `prompt` ends with a newline.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from trainer.errors import ConfigError, DataError
from trainer.rl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARK = "xXturn-end-41c7{}Xx"
_FAILURES = (TemplateError, ValueError, TypeError, KeyError)  # "roles must alternate", "no system role", ...
Tools = list[dict[str, Any]] | None


class Renderer:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self.tokenizer: Any = tokenizer  # what its methods return depends on their flags
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._has_template = bool(tokenizer.chat_template)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Returns the ids of everything before the model's first token.

        Raises:
            DataError: the chat template refuses the messages.
        """
        if self._has_template:
            return self._ids(self._render(messages, tools))
        ids = self.tokenizer(_lines(messages), return_attention_mask=False, verbose=False)["input_ids"]
        # Some tokenizers end every text with it; here the text goes on.
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def continuation_ids(
        self, messages: Sequence[Message], turn: int, last_id: int | None, tools: Tools = None
    ) -> list[int]:
        """Returns the ids between the model's turn `messages[turn]` and its next one.

        Args:
            messages: the conversation, with what followed that turn.
            last_id: the last token of that turn; if the template closes turns with it, it does not come again.

        Raises:
            DataError: the chat template refuses the messages, or does not show that turn.
        """
        if not self._has_template:
            return self._ids("\n" + _lines(messages[turn + 1 :]))
        mark = _unused_mark(messages)
        marked = [*messages]
        marked[turn] = {**messages[turn], "content": mark}
        text = self._render(marked, tools)
        if text.count(mark) != 1:
            raise DataError(
                f"the chat template of {self.name} shows turn {turn} of a conversation {text.count(mark)} times, expected "
                "once: what the environment adds after it cannot be told"
            )
        ids = self._ids_from(text, text.index(mark) + len(mark))
        closing = ids.index(last_id) if last_id in ids else None
        if closing is not None and not self.text(ids[:closing]).strip():
            return ids[closing + 1 :]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Returns what the tokens say, special ones included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def end_of_turn_id(self) -> int | None:
        """Returns the token of its own with which the template closes the model's turns, if there is one."""
        if not self._has_template:
            return None
        mark = _unused_mark([])
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False)
        except _FAILURES:
            return None  # a template that wants more than this; the tokenizer's own token remains
        ids = self._ids_from(text, text.index(mark) + len(mark)) if text.count(mark) == 1 else []
        return ids[0] if ids and ids[0] in self.tokenizer.added_tokens_decoder else None

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [*messages], tools=tools, tokenize=False, add_generation_prompt=True
            )
        except _FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template of {self.name} failed on messages of {roles}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _ids_from(self, text: str, start: int) -> list[int]:
        """The ids of text[start:], tokenized in its place if no token reaches over that border."""
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        offsets = encoded["offset_mapping"]
        if any(first < start < end for first, end in offsets):
            return self._ids(text[start:])
        return [id_ for id_, (first, _) in zip(encoded["input_ids"], offsets, strict=True) if first >= start]


def stop_ids(
    tokenizer: "PreTrainedTokenizerFast", stop: Sequence[str] = (), model_dir: Path | None = None
) -> tuple[int, ...]:
    """Returns the ids of all tokens that end a completion, ascending.

    They are the tokenizer's end-of-sequence token, those of the model's generation_config.json and config.json, the token
    with which the chat template closes a turn, and `stop` (`rl.stop`).

    Args:
        model_dir: the model's directory.

    Raises:
        ConfigError: a text in `stop` is not exactly one token.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]  (one id, despite its declared type)
    closing = Renderer(tokenizer).end_of_turn_id()
    if closing is not None:
        found.add(closing)
    if model_dir is not None:
        found |= _eos_of_model(model_dir, len(tokenizer))
    for text in stop:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not isinstance(ids, list) or len(ids) != 1:
            raise ConfigError(
                f"rl.stop: {text!r} is {len(ids)} tokens of this tokenizer, expected exactly one; a completion ends with a token"
            )
        found.add(int(ids[0]))
    return tuple(sorted(found))


def _eos_of_model(directory: Path, vocabulary: int) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            eos = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{directory / name} cannot be read: {error}") from error
        ids: Collection[Any] = eos if isinstance(eos, list) else [eos]
        found |= {i for i in ids if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary}
    return found


def _lines(messages: Sequence[Message]) -> str:
    return "".join(f"{message['content']}\n" for message in messages)


def _unused_mark(messages: Sequence[Mapping[str, Any]]) -> str:
    said = json.dumps([*messages], default=str)
    number = 0
    while (mark := _MARK.format(number)) in said:
        number += 1
    return mark
