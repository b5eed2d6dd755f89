"""Small tokenizers and chat templates for tests: no download, real behaviour.

`byte_tokenizer` knows all bytes and a few merges, so any text can be encoded and decoded without loss. The templates
copy the structure of ones in use.
"""

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "<think>",
    "</think>",
    "<|user|>",
    "<|assistant|>",
)

# ChatML as in Qwen2.5: a default system prompt, tools in the system turn, tool results inside user turns.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As in Qwen3: the last assistant turn gets an (empty) thinking block, earlier turns lose theirs.
QWEN3 = """\
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + tool_call.function.name + ' ' }}
            {{- (tool_call.function.arguments | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As in Llama 3: begin-of-text once, contents trimmed.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# ChatML with the assistant's text marked.
MARKED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As in Mistral v3: no generation prompt, roles must alternate, the system prompt moves into the *last* user turn.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.index0 >= loop_messages | length - 2 and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# As in DeepSeek-R1: the generation prompt opens a thinking block that the history does not keep.
R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' + message.content.split('</think>')[-1] }}
        {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '<tool_out>' + message.content + '</tool_out>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}
"""

# As in Phi-3: every rendering without a generation prompt ends with the end-of-sequence token.
PHI3 = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# As in DeepSeek-V3: the arguments of a call are expected as JSON text.
TEXT_ARGUMENTS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments + '</tool_call>' }}
    {%- endfor %}
    {%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# No special tokens at all: turns end with a blank line, and the generation prompt flag is ignored.
PLAIN = """\
{%- for message in messages %}{{- message.role | upper + ': ' + message.content + '\\n\\n' }}{%- endfor %}
"""

_TEXT = (
    "Hello there, how are you today? I am fine, thank you. The quick brown fox jumps over the lazy dog.",
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "user assistant system tool user assistant system tool",
)


@lru_cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def byte_tokenizer(
    chat_template: str | None = QWEN, *, bos_token: str = "<s>", eos_token: str = "<|endoftext|>"
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with about 400 ids and the given chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token=bos_token, eos_token=eos_token, pad_token=eos_token
    )
    tokenizer.chat_template = chat_template
    return tokenizer
