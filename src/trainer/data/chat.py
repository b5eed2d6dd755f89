"""From conversations and texts to token ids and a mask of what is supervised.

The ids of a conversation are always the tokenization of the *one* full rendering by the tokenizer's chat template. The
mask covers what the assistant produces: everything after its role header, up to and including the end-of-turn token.
Whitespace that the template puts after that token is not produced by anybody and stays unsupervised.

Where the template marks assistant text with ``{% generation %}``, transformers reports the mask. Elsewhere `spans.py`
derives it, and refuses where it cannot.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray

from trainer.core.log import logger
from trainer.data.rows import Conversation, RowError, Text, with_text_arguments
from trainer.data.spans import TEMPLATE_FAILURES, SpanFinder
from trainer.errors import DataError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Document = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Token ids [tokens] and mask [tokens]: 1 where the token is something the model shall learn to produce."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _NotInVocabulary(ValueError):
    """A text has no tokens in the vocabulary. tokenizers says so with a bare Exception."""


class Encoder:
    """Tokenizes documents with one tokenizer; `train_on` are the supervised roles of conversations.

    Raises:
        DataError: the tokenizer cannot tell which characters a token stands for.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", train_on: Collection[str]):
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not report token offsets, so the loss mask cannot be placed; "
                "use a tokenizer with a tokenizer.json"
            )
        # Rows are tokenized on all cores; loader workers are forked later and never tokenize, so no deadlock lurks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.tokenizer: Any = tokenizer  # what its methods return depends on their flags
        self.train_on = frozenset(train_on)
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._added_tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._spans = SpanFinder(self._render, self._added_tokens)
        self._checked_template = False
        self._checked_end = False
        self._checked_eos = False

    def encode(self, documents: Sequence[Text | Conversation]) -> list[Document | RowError]:
        """Returns ids and mask of each document, or what is wrong with it, in order."""
        results: list[Document | RowError] = []
        for kind, group in groupby(documents, key=self._kind):
            batch = list(group)
            try:
                results += self._encode(kind[0], batch)
            except TemplateSyntaxError as error:  # no row can mend that
                raise self._unusable_template(f"line {error.lineno}: {error.message}") from error
            except TEMPLATE_FAILURES as error:
                if len(batch) == 1:
                    results.append(self._encode_differently(kind[0], batch[0], error))
                else:  # one of them is bad: find out which
                    results += [result for document in batch for result in self.encode([document])]
        return results

    def _encode(self, kind: str, batch: list[Any]) -> list[Document | RowError]:
        encode = {"text": self._encode_texts, "marked": self._encode_marked, "chat": self._encode_chats}[kind]
        try:
            return encode(batch)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise _NotInVocabulary(str(error)) from error

    def _encode_differently(self, kind: str, document: Text | Conversation, error: Exception) -> Document | RowError:
        """The second and last attempt at a document."""
        if isinstance(document, Text) or isinstance(error, _NotInVocabulary):
            return RowError(f"cannot be tokenized: {first_line(error)}")
        if any("tool_calls" in message for message in document.messages):
            with suppress(*TEMPLATE_FAILURES):  # the first error is the one to tell
                return self._encode(kind, [with_text_arguments(document)])[0]
        return RowError(f"the chat template of {self.name} failed: {first_line(error)}")

    def _unusable_template(self, reason: str) -> DataError:
        return DataError(
            f"the chat template of {self.name} cannot be used: {reason}; correct it, or give another one as "
            "model.chat_template"
        )

    def _kind(self, document: Text | Conversation) -> tuple[str, str]:
        """How a document is encoded; neighbours of equal kind are tokenized in one call."""
        if isinstance(document, Text):
            return "text", ""
        marked = _marks_generation(self._template(document.tools))
        if marked and self.train_on == {"assistant"} and not document.completion_start:
            return "marked", json.dumps(document.tools, default=str)
        return "chat", ""

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {self.name} has no chat template, which rows of messages need; "
                "set model.chat_template to a Jinja file, or use an instruction-tuned model's tokenizer"
            )
        try:
            template = self.tokenizer.get_chat_template(None, tools)
        except ValueError as error:  # several ones, and none of them is the default
            raise self._unusable_template(first_line(error)) from error
        if not isinstance(template, str):
            raise self._unusable_template(f"it is {template!r} and no text")
        if not self._checked_template:
            self._checked_template = True
            if "strftime_now" in template:
                logger.warning(
                    "the chat template of {} reads today's date: tokens depend on the day they are made", self.name
                )
        return template

    def _render(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool = False) -> str:
        rendered = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
        assert isinstance(rendered, str)
        return rendered

    def _encode_texts(self, texts: list[Text]) -> list[Document | RowError]:
        eos = self.tokenizer.eos_token_id
        if eos is None and not self._checked_eos:
            logger.warning("the tokenizer {} has no end-of-sequence token: the model will not learn to stop", self.name)
        self._checked_eos = True
        encoded = self._tokenize([text.text for text in texts], add_special_tokens=True)
        results: list[Document | RowError] = []
        for text, (ids, offsets) in zip(texts, encoded, strict=True):
            mask = (
                (offsets[:, 1] > text.prompt_chars).astype(np.uint8)
                if text.prompt_chars
                else np.ones_like(ids, np.uint8)
            )
            if eos is not None:  # some tokenizers add it themselves
                if not ids.size or ids[-1] != eos:
                    ids, mask = np.append(ids, np.int32(eos)), np.append(mask, np.uint8(1))
                mask[-1] = 1
            results.append((ids, mask))
        return results

    def _encode_chats(self, conversations: list[Conversation]) -> list[Document | RowError]:
        rendered = [self._render_with_spans(conversation) for conversation in conversations]
        encoded = self._tokenize([text for text, _ in rendered if text], add_special_tokens=False)
        results: list[Document | RowError] = []
        tokenized = iter(encoded)
        for text, spans in rendered:
            if isinstance(spans, RowError):
                results.append(spans)
                continue
            ids, offsets = next(tokenized) if text else (np.empty(0, np.int32), np.empty((0, 2), np.int64))
            mask = np.zeros(ids.size, np.uint8)
            for start, end in spans:  # a token that reaches over a border counts as inside
                mask |= ((offsets[:, 1] > start) & (offsets[:, 0] < end)).astype(np.uint8)
            results.append((ids, mask))
            self._check_end_of_turn(ids, mask)
        return results

    def _render_with_spans(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]] | RowError]:
        full = self._render(conversation.messages, conversation.tools)
        try:
            return full, self._spans.find(conversation, full, self.train_on)
        except RowError as error:
            return "", RowError(
                f"cannot tell which part of the rendered conversation is supervised ({error}): the chat template of "
                f"{self.name} does not say. Mark the assistant's text in it with {{% generation %}} … "
                "{% endgeneration %} and give the file as model.chat_template"
            )

    def _encode_marked(self, conversations: list[Conversation]) -> list[Document | RowError]:
        encoded = self.tokenizer.apply_chat_template(
            [conversation.messages for conversation in conversations],
            tools=conversations[0].tools,
            return_assistant_tokens_mask=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        documents = [(np.asarray(ids, np.int32), np.asarray(mask, np.uint8)) for ids, mask in pairs]
        self._check_end_of_turn(*documents[0])
        return [*documents]

    def _check_end_of_turn(self, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> None:
        """Warns, once, if what is supervised does not end with a token that could end a turn."""
        supervised = np.flatnonzero(mask)
        if self._checked_end or not supervised.size or "assistant" not in self.train_on:
            return
        self._checked_end = True
        last = self.tokenizer.decode(ids[supervised]).rstrip()
        if not last.endswith(tuple(self._added_tokens)):
            logger.warning(
                "the chat template of {} ends what the assistant says (…{!r}) without a token of its own in the loss: "
                "the model may not learn to end its turn",
                self.name,
                last[-20:],
            )

    def _tokenize(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Returns ids int32 [tokens] and character offsets int64 [tokens, 2] of each text."""
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(np.asarray(ids, np.int32), np.asarray(offsets, np.int64).reshape(-1, 2)) for ids, offsets in pairs]


@lru_cache
def _marks_generation(template: str) -> bool:
    return _GENERATION.search(template) is not None
