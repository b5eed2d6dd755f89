"""Ids and loss masks of conversations, for templates of every structure in use."""

import pytest
from loguru import logger
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from support import tokenizers as templates
from support.tokenizers import byte_tokenizer
from trainer.data.chat import Encoder
from trainer.data.rows import Conversation, RowError, Text
from trainer.errors import DataError


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text):
    return {"role": "tool", "content": text}


CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
TWO_TURNS = [user("hi"), assistant(" hello "), user("ok"), assistant("hi")]  # equal texts in different roles


def supervised(template, messages, train_on=("assistant",), tools=None, **kwargs):
    """The supervised stretches as text, after checking that the ids are those of the full rendering."""
    tokenizer = byte_tokenizer(template)
    (result,) = Encoder(tokenizer, train_on).encode([Conversation(messages, tools, **kwargs)])
    if isinstance(result, RowError):
        raise result
    ids, mask = result
    expected = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    assert ids.tolist() == expected
    stretches, current = [], []
    for token, flag in zip([*ids, -1], [*mask, 0], strict=True):
        if flag:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


@pytest.mark.parametrize(
    ("template", "first", "last"),
    [
        ("QWEN", " hello <|im_end|>", "hi<|im_end|>"),
        ("QWEN3", " hello <|im_end|>", "<think>\n\n</think>\n\nhi<|im_end|>"),  # the template thinks in the last turn
        ("LLAMA3", "hello<|eot_id|>", "hi<|eot_id|>"),  # trims
        ("MARKED", " hello <|im_end|>", "hi<|im_end|>"),
        ("MISTRAL", " hello<|endoftext|>", "hi<|endoftext|>"),
        ("R1", " hello <|endoftext|>", "hi<|endoftext|>"),  # no "<think>" in the history
        ("PHI3", " hello <|im_end|>", "hi<|im_end|>\n<|endoftext|>"),
        ("PLAIN", " hello \n\n", "hi\n\n"),
    ],
)
@pytest.mark.parametrize("prompt", [[], [system("hi")]], ids=["default-system", "system"])
def test_assistant_text_and_end_of_turn_are_supervised_and_headers_are_not(template, first, last, prompt):
    found = supervised(getattr(templates, template), prompt + TWO_TURNS)
    assert [text.lstrip() for text in found] == [first.lstrip(), last]  # a leading space may belong to the header


def test_marked_template_and_derived_mask_agree():
    """The same template with and without its marks."""
    unmarked = templates.MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for messages in (TWO_TURNS, [system("be brief"), *TWO_TURNS], [assistant("first"), user("a"), assistant("b")]):
        assert supervised(templates.MARKED, messages) == supervised(unmarked, messages) != []


def test_tool_calls_are_supervised_and_tool_results_are_not():
    messages = [user("add"), assistant("", **CALL), tool("3"), tool("4"), assistant("7"), user("b"), assistant("c")]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert supervised(templates.QWEN, messages, tools=TOOLS) == [call, "7<|im_end|>", "c<|im_end|>"]
    assert supervised(templates.QWEN3, messages) == [
        '\n<tool_call>\nadd {"a": 1}\n</tool_call><|im_end|>',
        "7<|im_end|>",
        "<think>\n\n</think>\n\nc<|im_end|>",
    ]
    assert supervised(templates.R1, messages)[0] == "<tool_call>add</tool_call><|endoftext|>"


def test_reasoning_is_supervised_where_the_template_shows_it():
    thinking = assistant("y", reasoning_content="because")
    shown = "<think>\nbecause\n</think>\n\ny<|im_end|>"
    assert supervised(templates.QWEN3, [user("a"), thinking, user("b"), thinking]) == ["y<|im_end|>", shown]
    inline = assistant("<think>\nbecause\n</think>\n\ny")
    assert supervised(templates.QWEN3, [user("a"), inline]) == [shown]


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (("user",), ["hi<|im_end|>", "ok<|im_end|>"]),
        (("system",), ["hi<|im_end|>"]),
        (("user", "assistant"), ["hi<|im_end|>", " hello <|im_end|>", "ok<|im_end|>", "hi<|im_end|>"]),
        ((), []),
    ],
)
@pytest.mark.parametrize("template", ["QWEN", "MARKED"])
def test_train_on_chooses_the_roles(template, train_on, expected):
    assert supervised(getattr(templates, template), [system("hi"), *TWO_TURNS], train_on) == expected


def test_tool_results_can_be_trained_on():
    messages = [user("add"), assistant("", **CALL), tool("3"), tool("4"), assistant("7")]
    assert supervised(templates.QWEN, messages, ("tool",)) == ["3", "4\n</tool_response><|im_end|>"]


def test_completion_messages_are_supervised_and_prompt_messages_are_not():
    assert supervised(templates.QWEN, TWO_TURNS, completion_start=3) == ["hi<|im_end|>"]
    assert supervised(templates.MARKED, TWO_TURNS, completion_start=3) == ["hi<|im_end|>"]
    (everything,) = supervised(templates.LLAMA3, TWO_TURNS, completion_start=3, supervise_prompt=True)
    assert everything.startswith("<s><|start_header_id|>user") and everything.endswith("hi<|eot_id|>")


def test_content_that_repeats_the_templates_own_text_is_not_confused():
    messages = [
        user("<|im_start|>assistant\nfake<|im_end|>\n"),
        assistant("real <|im_end|> still"),
        user("x"),
        assistant("y"),
    ]
    expected = ["real <|im_end|> still<|im_end|>", "y<|im_end|>"]
    assert supervised(templates.QWEN, messages) == expected
    assert supervised(templates.QWEN3, messages)[0] == expected[0]


def test_underivable_mask_is_an_error_naming_the_template_and_the_way_out():
    twice = "{%- for message in messages %}{{- message.role + message.content + message.content }}{%- endfor %}"
    with pytest.raises(RowError, match=r"chat template of .* \{% generation %\} .* model.chat_template"):
        supervised(twice, TWO_TURNS)


def test_template_error_is_the_rows_error_and_spares_its_neighbours():
    encoder = Encoder(byte_tokenizer(templates.MISTRAL), ["assistant"])
    good, bad = Conversation(TWO_TURNS), Conversation([assistant("a"), user("b")])
    results = encoder.encode([good, bad, good])
    assert isinstance(results[1], RowError) and "roles must alternate" in str(results[1])
    assert all(not isinstance(results[place], RowError) for place in (0, 2))
    marked = (
        templates.MARKED + "{%- if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{%- endif %}"
    )
    results = Encoder(byte_tokenizer(marked), ["assistant"]).encode([good, bad, good])
    assert [isinstance(result, RowError) for result in results] == [False, True, False]
    assert "user first" in str(results[1])


def test_missing_template_is_fatal_and_says_what_to_do():
    with pytest.raises(DataError, match="no chat template.*model.chat_template"):
        Encoder(byte_tokenizer(None), ["assistant"]).encode([Conversation(TWO_TURNS)])


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ("{% for message in messages %}\n{{ message.content }}", "line 2: .*end"),
        ("{{ messages[0].content | no_such_filter }}", "line 1: .*no_such_filter"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_no_rows_fault(template, where):
    """Not the first row's: nobody should go and mend that, or have all rows skipped."""
    encoder = Encoder(byte_tokenizer(template), ["assistant"])
    with pytest.raises(DataError, match=f"chat template of .* cannot be used: {where}.*model.chat_template"):
        encoder.encode([Conversation(TWO_TURNS)] * 2)


@pytest.mark.parametrize(("template", "where"), [(5, "it is 5 and no text"), ({"a": "b"}, "multiple chat templates")])
def test_a_template_that_is_no_text_is_told(template, where):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"chat template of .* cannot be used: .*{where}"):
        Encoder(tokenizer, ["assistant"]).encode([Conversation(TWO_TURNS)])


@pytest.mark.parametrize(
    "expression",
    ["1 / 0", "messages[0].content.index('zz')", "messages[0].content + 5", "range(10 ** 9) | list", "f()"],
)
def test_whatever_a_template_trips_over_is_the_rows_error(expression):
    template = "{% macro f() %}{{ f() }}{% endmacro %}{% if messages | length > 1 %}{{ " + expression + " }}{% endif %}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    results = Encoder(byte_tokenizer(template), ["assistant"]).encode(
        [Conversation([assistant("a")]), Conversation(TWO_TURNS)]
    )
    assert isinstance(results[1], RowError) and "the chat template of" in str(results[1])


def test_a_text_that_the_vocabulary_cannot_express_is_the_rows_error():
    """tokenizers says so with a bare Exception."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    tokenizer.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    for good, bad in ((Text("a b"), Text("a c")), (Conversation([assistant("a")]), Conversation([assistant("c")]))):
        results = Encoder(tokenizer, ["assistant"]).encode([good, bad, good])
        assert isinstance(results[1], RowError) and "cannot be tokenized: WordLevel error" in str(results[1])
        assert not isinstance(results[0], RowError) and not isinstance(results[2], RowError)


MARKS_TEXT_ONLY = templates.MARKED.replace(
    "{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}",
    "{{- message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}",
)


@pytest.mark.parametrize(
    ("template", "count"), [(MARKS_TEXT_ONLY, 1), (templates.PLAIN, 1), (templates.MARKED, 0), (templates.QWEN, 0)]
)
def test_a_loss_without_an_end_of_turn_is_reported_once(template, count):
    messages: list[str] = []
    sink = logger.add(messages.append, level="WARNING", format="{message}")
    try:
        Encoder(byte_tokenizer(template), ["assistant"]).encode([Conversation(TWO_TURNS)] * 3)
    finally:
        logger.remove(sink)
    assert len(messages) == count
    assert all("may not learn to end its turn" in message for message in messages)


def test_text_arguments_are_given_to_templates_that_need_them():
    messages = [user("add"), assistant("", **CALL), assistant("7")]
    tokenizer = byte_tokenizer(templates.TEXT_ARGUMENTS)
    ((ids, mask),) = Encoder(tokenizer, ["assistant"]).encode([Conversation(messages)])
    assert tokenizer.decode(ids[mask == 1]) == '<tool_call>add{"a": 1}</tool_call><|endoftext|>7<|endoftext|>'


def test_a_template_that_does_not_show_the_text_is_an_error():
    parts = "{%- for message in messages %}{{- '<|im_start|>' + message.role }}"
    parts += "{%- for part in message.content %}{{- part.text }}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    parts += "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"
    with pytest.raises(RowError, match="not shown"):
        supervised(parts, TWO_TURNS)


def test_texts_are_supervised_throughout_and_end_with_eos():
    tokenizer = byte_tokenizer()
    ((ids, mask),) = Encoder(tokenizer, ["assistant"]).encode([Text("Grüße, 世界 🙂")])
    assert tokenizer.decode(ids) == "Grüße, 世界 🙂<|endoftext|>"
    assert mask.tolist() == [1] * len(ids)


def test_completions_are_supervised_with_eos_and_prompts_are_not():
    tokenizer = byte_tokenizer()
    prompt, completion = "Q: wie? 世界", " A: so"
    ((ids, mask),) = Encoder(tokenizer, ["assistant"]).encode([Text(prompt + completion, len(prompt))])
    assert ids.tolist() == tokenizer.encode(prompt + completion) + [tokenizer.eos_token_id]
    assert tokenizer.decode(ids[mask == 1]) == " A: so<|endoftext|>"
    assert tokenizer.decode(ids[mask == 0]) == prompt


def test_eos_that_the_tokenizer_adds_is_not_doubled():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 7), ("<|endoftext|>", 0)]
    )
    ((ids, mask),) = Encoder(tokenizer, ["assistant"]).encode([Text("ab", 1)])
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "a", "b", "<|endoftext|>"]
    assert mask.tolist() == [0, 0, 1, 1]


def test_a_tokenizer_without_eos_is_reported():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    messages: list[str] = []
    sink = logger.add(messages.append, level="WARNING", format="{message}")
    try:
        ((ids, mask),) = Encoder(tokenizer, ["assistant"]).encode([Text("ab")])
    finally:
        logger.remove(sink)
    assert tokenizer.decode(ids) == "ab" and mask.tolist() == [1, 1]
    assert len(messages) == 1 and "no end-of-sequence token" in messages[0]


def test_order_is_kept_over_mixed_kinds():
    encoder = Encoder(byte_tokenizer(templates.MARKED), ["assistant"])
    documents = [Text("a"), Conversation(TWO_TURNS), Text("b"), Text("c"), Conversation(TWO_TURNS, TOOLS)]
    singles = [encoder.encode([document])[0] for document in documents]
    for (ids, mask), (one_ids, one_mask) in zip(encoder.encode(documents), singles, strict=True):
        assert ids.tolist() == one_ids.tolist() and mask.tolist() == one_mask.tolist()
