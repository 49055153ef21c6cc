"""Generated answers are split into reasoning and content by the template that they were generated with."""

import pytest
from chats import Family, build, say, tokenizer_of
from workbench import TEMPLATE, make_tokenizer

from distill.prompts.chat_template import Chat

HARMONY = Family(
    """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant' }}
{%- if m.tool_calls %}{{ ' to=functions.' + m.tool_calls[0].function.name + '<|call|>' }}
{%- else %}
{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
""",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|return|>",
)
OPENED = Family(  # as R1-Distill's: the prompt opens what the answer closes, and history has no reasoning
    """
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- else %}{{ '<|user|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}
""",
    ("<|user|>", "<|assistant|>", "<|end|>"),
    "<|end|>",
    plain=("<think>", "</think>"),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BETWEEN = "<|end|><|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Think one."


def parts(tokenizer, text, messages=None, tools=()):
    ids = tokenizer.encode(text, add_special_tokens=False)
    message = Chat(tokenizer).read_back(messages or say("Hi"), tools, ids)
    if message is None:
        return None
    assert message.pop("role") == "assistant"
    return message.pop("content"), message.pop("reasoning_content", ""), *message


CALLED = "<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
ANSWERS = {
    "harmony": [
        (THOUGHT + BETWEEN + "One.", ("One.", "Think one.")),
        ("<|channel|>final<|message|>One.", ("One.", "")),
        ("One.", ("One.", "")),
        (THOUGHT + CALLED, None),
        (THOUGHT + BETWEEN + "One." + BETWEEN + "Two.", None),
        (THOUGHT, None),
    ],
    "qwen3": [
        ("<think>\nWhy?\n</think>\n\nSo.", ("So.", "Why?")),
        ("<think>\n\n</think>\n\nSo.", ("So.", "")),
        ("So.\n", ("So.\n", "")),
        ("So.</think>", None),
        ("<think>\nWhy?\n</think>\n\nSo.</think>", None),
    ],
    "opened": [("Why?\n</think>\n\nSo.", ("So.", "Why?")), ("<think>", None)],
}
TOKENIZERS = {"harmony": build(HARMONY), "opened": build(OPENED), "qwen3": tokenizer_of("qwen3")}


@pytest.mark.parametrize(
    ("name", "text", "wanted"), [(k, *case) for k, cases in ANSWERS.items() for case in cases]
)
def test_answer_is_split_into_reasoning_and_content(name, text, wanted):
    assert parts(TOKENIZERS[name], text) == wanted
    if name == "harmony":
        assert parts(TOKENIZERS[name], text, say("a", "b", "c", system="s")) == wanted


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "pocket"])
def test_answer_without_a_format_is_its_text(name):
    assert parts(tokenizer_of(name), "One <b>and</b> [two].\n") == ("One <b>and</b> [two].\n", "")


def test_special_tokens_are_left_out():
    """As servers do."""
    assert parts(make_tokenizer(TEMPLATE), "One<|user|> more") == ("One more", "")


@pytest.mark.parametrize(
    ("tokenizer", "call"),
    [
        (tokenizer_of("chatml"), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (tokenizer_of("llama3"), '{"name": "f", "parameters": {}}'),
        (TOKENIZERS["harmony"], " to=functions.f<|channel|>commentary json<|message|>{}"),
    ],
    ids=["chatml", "llama3", "harmony"],
)
def test_tool_call_is_not_taken_for_text(tokenizer, call):
    assert parts(tokenizer, call, tools=[TOOL]) is None
    assert parts(tokenizer, "One.", tools=[TOOL]) == ("One.", "")
