"""Which characters of a rendered conversation each message produced, for templates that do not mark it.

Templates are programs: they trim content, add a default system prompt, drop earlier reasoning, merge tool results, move
the system prompt. So nothing is searched by its text. Three kinds of evidence are used, each checked against the one
full rendering, in this order:

* **Prefix.** The rendering of messages[:i] (with the generation prompt) is a prefix of the full one: message i starts
  right after it. The rendering of messages[:i+1] is a prefix: message i ends there.
* **Replacement.** Render again with a sentinel as the message's content: what precedes and follows the sentinel, if it
  is a prefix and a suffix of the full rendering, encloses the content. This survives trimming and any rewriting of
  other messages.
* **Closing text.** What follows the content in the rendering of messages[:i+1] and in the full one begins alike: that
  much closes the turn. Without content, the token that ends the shorter rendering is looked for before the next content.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from trainer.data.rows import Conversation, RowError

Span = tuple[int, int]
"""Characters [start, end) of the full rendering."""
_SENTINEL = "xXspan-finder-7f3a9cXx"

TEMPLATE_FAILURES = (
    TemplateError,  # raise_exception: "roles must alternate", "last message must be a user's"
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises over the content of a conversation; it is a program, and sees what others have written."""


class SpanFinder:
    """Finds spans with `render(messages, tools, generation_prompt)`; `tokens` are the tokenizer's added tokens."""

    def __init__(self, render: Callable[[list[dict[str, Any]], Any, bool], str], tokens: Collection[str]):
        self._render = render
        self._tokens = tuple(sorted((token for token in tokens if token.strip()), key=len, reverse=True))
        self._header: str | None = None  # the generation prompt, once it is known; checked at each use

    def find(self, conversation: Conversation, full: str, roles: Collection[str]) -> list[Span]:
        """Returns the supervised spans of `full`, the rendering of the whole conversation.

        Raises:
            RowError: a supervised message cannot be placed.
        """
        work = _Work(self._render, conversation, full)
        spans: list[Span] = []
        for index, message in enumerate(conversation.messages):
            if index < conversation.completion_start or message["role"] not in roles:
                continue
            span = self._assistant(work, index) if message["role"] == "assistant" else self._other(work, index)
            if span is not None:
                spans.append(self._without_trailing_space(full, span))
        if conversation.supervise_prompt and spans:
            spans.insert(0, (0, spans[0][0]))
        return spans

    def _assistant(self, work: "_Work", index: int) -> Span:
        start = self._assistant_start(work, index)
        end = work.prefix(index + 1)
        if end is None:
            end = self._assistant_end(work, index, start)
        if end < start:
            raise RowError(f"message {index} ends before it starts")
        text = work.messages[index]["content"].strip()
        if text[-32:] not in work.full and work.count(index) == 0:
            raise RowError(f"the text of message {index} is not shown")  # templates that expect a list of parts
        return start, end

    def _assistant_start(self, work: "_Work", index: int) -> int:
        """Where the text after the assistant's role header starts."""
        before = work.prefix(index)
        if before is not None and self._header and work.full.startswith(self._header, before):
            return before + len(self._header)
        prompted = work.rendered(index, generation_prompt=True)
        plain = work.rendered(index)
        if prompted and prompted != plain and work.full.startswith(prompted):
            if plain and prompted.startswith(plain):
                self._header = prompted[len(plain) :]
            return len(prompted)
        # The template has no generation prompt, or opens more in it than it keeps ("<think>" of reasoning models).
        starts = [span[0] for key in ("reasoning_content", "content") if (span := work.content(index, key))]
        if starts:
            return min(starts)
        if before is not None and prompted and plain and prompted.startswith(plain):
            shared = self._shared(prompted[len(plain) :], work.full[before:])
            if shared:
                return before + len(shared)
        raise RowError(f"no role header found for message {index}")

    def _assistant_end(self, work: "_Work", index: int, start: int) -> int:
        """Where the turn ends, although messages[:index + 1] alone are rendered differently."""
        alone = work.until(index)
        if alone is None:
            raise RowError(f"the template refuses to end a conversation with message {index}")
        content, content_alone = work.content(index), alone.content(index)
        if content and content_alone:
            closing = self._shared(alone.full[content_alone[1] :], work.full[content[1] :])
            return content[1] + len(closing)
        if alone.full.startswith(work.full[:start]):
            closing = self._shared(alone.full[start:], work.full[start:])
            if closing.rstrip().endswith(self._tokens):
                return start + len(closing)
        ending = alone.full.rstrip()
        token = next((token for token in self._tokens if ending.endswith(token)), None)
        following = work.content(index + 1) if index + 1 < len(work.messages) else None
        if token and following:  # else the token found may belong to a later message
            position = work.full.find(token, start, following[0])
            if position >= 0:
                return position + len(token)
        raise RowError(f"no end found for message {index}")

    def _shared(self, first: str, second: str) -> str:
        """The common beginning, cut back to the end of a token or to whitespace: "<t" of "<think>" and "<tool_call>" is
        common by accident."""
        shared = commonprefix([first, second])
        while shared and not (shared.endswith(self._tokens) or shared[-1].isspace()):
            shared = shared[:-1]
        return shared

    def _other(self, work: "_Work", index: int) -> Span | None:
        """A user's, system's or tool's content and, where the message has its own, the end-of-turn token."""
        content = work.content(index)
        if content is None:
            if work.messages[index]["content"].strip() and work.count(index) > 0:
                raise RowError(f"message {index} cannot be placed")
            return None  # empty, or the template does not show it
        end = work.prefix(index + 1)
        return (content[0], end) if end is not None and end >= content[1] else content

    def _without_trailing_space(self, full: str, span: Span) -> Span:
        """Without the whitespace after a closing token; a template without one may end a turn by whitespace alone."""
        start, end = span
        text = full[start:end].rstrip()
        return (start, start + len(text)) if text.endswith(self._tokens) else span


class _Work:
    """Renderings of one conversation, each made once."""

    def __init__(self, render: Callable[[list[dict[str, Any]], Any, bool], str], conversation: Conversation, full: str):
        self.full = full
        self.messages = conversation.messages
        self._conversation = conversation
        self._renderer = render
        self._rendered: dict[tuple[int, bool], str | None] = {(len(self.messages), False): full}
        self._replaced: dict[tuple[int, str], str | None] = {}

    def rendered(self, count: int, generation_prompt: bool = False) -> str | None:
        """The first `count` messages, or None where the template refuses them."""
        if count == 0:
            return None
        key = (count, generation_prompt)
        if key not in self._rendered:
            self._rendered[key] = self._try(self.messages[:count], generation_prompt)
        return self._rendered[key]

    def until(self, index: int) -> "_Work | None":
        """The conversation that ends with message `index`."""
        full = self.rendered(index + 1)
        if full is None:
            return None
        return _Work(self._renderer, replace(self._conversation, messages=self.messages[: index + 1]), full)

    def prefix(self, count: int) -> int | None:
        """Length of that rendering if the full one starts with it, else None."""
        text = self.rendered(count)
        return len(text) if text is not None and self.full.startswith(text) else None

    def content(self, index: int, key: str = "content") -> Span | None:
        """Where the content of a message ended up, found by replacing it; None if that cannot be told."""
        if not str(self.messages[index].get(key) or "").strip() or self.count(index, key) != 1:
            return None
        before, after = self._replace(index, key).split(_SENTINEL)
        end = len(self.full) - len(after)
        if end < len(before) or not (self.full.startswith(before) and self.full.endswith(after)):
            return None
        return len(before), end

    def count(self, index: int, key: str = "content") -> int:
        """How often the template shows the content."""
        return self._replace(index, key).count(_SENTINEL)

    def _replace(self, index: int, key: str) -> str:
        if (index, key) not in self._replaced:
            messages = list(self.messages)
            messages[index] = {**messages[index], key: _SENTINEL}
            self._replaced[index, key] = self._try(messages, False)
        return self._replaced[index, key] or ""

    def _try(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str | None:
        try:
            return self._renderer(messages, self._conversation.tools, generation_prompt)
        except TEMPLATE_FAILURES:
            return None
