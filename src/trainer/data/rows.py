"""From a row's columns to one of three kinds of document, or a reason why not.

Layouts: `messages` (+ `tools`), `prompt` + `completion` (two strings, or two lists of messages), `text`.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
FORMAT_KEYS = {"messages": ("messages",), "completion": ("prompt", "completion"), "text": ("text",)}
COLUMNS = frozenset(("tools", *(key for keys in FORMAT_KEYS.values() for key in keys)))
"""Every column that any format reads."""


class RowError(Exception):
    """What is wrong with one row. Never leaves trainer.data: it is located, then counted or raised as a DataError."""


@dataclass(frozen=True)
class Text:
    """Plain text; the part from character `prompt_chars` on is supervised, the end-of-sequence token too."""

    text: str
    prompt_chars: int = 0


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template; those before `completion_start` are the prompt and not supervised."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    completion_start: int = 0
    supervise_prompt: bool = False


def with_text_arguments(conversation: Conversation) -> Conversation:
    """Returns the conversation with the arguments of tool calls as JSON text, which a few templates (DeepSeek) expect."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        function = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    messages = [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in conversation.messages
    ]
    return replace(conversation, messages=messages)


def detect_format(row: dict[str, Any]) -> str:
    """Returns the format whose columns `row` has, trying messages, completion, text in this order.

    Raises:
        RowError: it has none of them.
    """
    for name, keys in FORMAT_KEYS.items():
        if all(key in row for key in keys):
            return name
    hint = "; ShareGPT's 'conversations' must be renamed to role/content messages" if "conversations" in row else ""
    raise RowError(
        f"cannot tell the format from the keys {sorted(row)}: expected 'messages', 'prompt' and 'completion', or 'text'{hint}"
    )


def parse_row(row: dict[str, Any], row_format: str, *, train_on_prompt: bool) -> Text | Conversation:
    """Returns the document in `row`, checked.

    Raises:
        RowError: a key is missing, a value has the wrong type or is empty, or a role is unknown.
    """
    for key in FORMAT_KEYS[row_format]:
        if row.get(key) is None:
            raise RowError(f"missing key {key!r}")
    if row_format == "text":
        text = _string(row["text"], "text")
        if not text.strip():
            raise RowError("'text' is empty")
        return Text(text)
    if row_format == "messages":
        return Conversation(_messages(row["messages"], "messages"), _tools(row.get("tools")))
    return _parse_completion(row, train_on_prompt)


def _parse_completion(row: dict[str, Any], train_on_prompt: bool) -> Text | Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return Conversation(before + after, _tools(row.get("tools")), len(before), train_on_prompt)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise RowError("'prompt' and 'completion' must be both strings or both lists of messages")
    prompt, completion = _string(prompt, "prompt"), _string(completion, "completion")
    if not completion:
        raise RowError("'completion' is empty")
    return Text(prompt + completion, 0 if train_on_prompt else len(prompt))


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what!r} must be a string, found {type(value).__name__}")
    return _encodable(value, what)


def _encodable(text: str, what: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RowError(f"{what!r} holds half of a surrogate pair, which is not text") from None
    return text


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{key!r} must be a list of messages, found {type(value).__name__}")
    if not value:
        raise RowError(f"{key!r} is empty")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def _message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"{what} must be an object with role and content, found {type(message).__name__}")
    # Parquet gives every message every column; an absent value is a missing key for the template.
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise RowError(f"{what}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    calls = message.pop("tool_calls", None)  # templates test for the key: an empty list must not stay
    if calls:
        message["tool_calls"] = _tool_calls(calls, what)
    if "content" not in message:
        if not (role == "assistant" and calls):
            raise RowError(f"{what}: missing key 'content'")
        message["content"] = ""  # templates join it to text; None would be printed as "None"
    for key in ("content", "reasoning_content"):
        if key in message:
            _string(message[key], f"{what}.{key}")
    return message


def _tool_calls(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{what}.tool_calls must be a list, found {type(value).__name__}")
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{what}.tool_calls: every call needs a function with a name")
        function = {key: part for key, part in function.items() if part is not None}
        if isinstance(function.get("arguments"), str):
            # The API form; templates dump the arguments as JSON, which would quote a string a second time.
            function["arguments"] = _json(function["arguments"], f"{what}.tool_calls: the arguments are")
        call = {key: part for key, part in call.items() if part is not None}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():
        value = _json(value, "'tools' is")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("'tools' must be a list of objects, or the JSON text of one")
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except ValueError as error:  # a number of thousands of digits
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    raise RowError(f"{what} not JSON ({reason})")
