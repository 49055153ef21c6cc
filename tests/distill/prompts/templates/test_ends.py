"""Answers: their end tokens, from the model's files and the template, and their reasoning and content."""

import json
import shutil
from typing import Any

import pytest
from chats import POCKET, Family, build, say, tokenizer_of
from workbench import TEMPLATE, make_tokenizer, options_of

from decode.generation.generate import generate
from decode.model.load import file_ends, stop_tokens
from decode.sampling import Sampler
from distill.config.build import TargetSource
from distill.engines.base import SamplingParams
from distill.engines.openai_protocol import with_ids
from distill.prompts.chat_template import Chat
from distill.prompts.templates.clock import now
from distill.prompts.templates.ends import AnswerFrame, find_frame
from distill.prompts.templates.renderer import TemplateRenderer
from distill.prompts.templates.rendering import Rendering

TURN = "{{ '<|' + m.role + '|>' + m.content }}END"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")


def tokenizer_with(end: str, *special: str, eos: str = "<|eos|>") -> Any:
    """A tokenizer whose template ends a message so."""
    return build(Family(LOOP.replace("END", end), (*ROLES, *special, eos), eos), merges=())


def frame(end: str = "", after: str = "", stop: str = "") -> AnswerFrame:
    return AnswerFrame("<|assistant|>", end, after, (stop or end,) if stop or end else ())


ENDINGS = {
    "one": ("<|end|>\n", ["<|end|>"], frame("<|end|>", "\n")),
    "none, so the next turn does": ("", [], frame(stop="<|user|>")),
    "words": ("\n\n", [], frame()),
    "two together": ("<|done|><|end|>", ["<|done|>", "<|end|>"], frame("<|end|>", stop="<|done|>")),
    "two, of which eos is one": ("<|eos|><|end|>", ["<|end|>"], frame("<|eos|>", "<|end|>")),
    "another at the last": (
        "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
        ["<|end|>", "<|return|>"],
        frame("<|return|>", stop="<|end|>"),
    ),
    "one more after the last": (
        "<|end|>\n{% if loop.last and not add_generation_prompt %}<|eos|>{% endif %}",
        ["<|end|>"],
        frame("<|end|>", "\n<|eos|>"),
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_follows_an_answer_is_read_off_two_turns(name):
    end, special, found = ENDINGS[name]
    assert find_frame(TemplateRenderer(Rendering(tokenizer_with(end, *special), {}, now()))) == found


def test_next_turn_ends_answers_and_calls():
    template = LOOP.replace("{{ '<|'", "{% set c = m.tool_calls %}{{ '<|'").replace(
        "m.content", "(c[0].function.name if c else m.content)"
    )
    tokenizer = build(Family(template.replace("END", ""), (*ROLES, "<|eos|>"), "<|eos|>"), merges=())
    ends = Chat(tokenizer).ends([], 10**6)
    assert tokenizer.convert_ids_to_tokens(list(ends.template)) == ["<|user|>", "<|tool|>"]
    ids, mask = Chat(tokenizer).encode_answered(say("a?", "one", "b?", "two"))
    written = [i for i, kept in zip(ids, mask, strict=True) if kept]
    assert tokenizer.decode(written) == "one<|user|>two"


def test_ends_that_only_one_source_knows_are_named():
    tokenizer = tokenizer_with("<|end|>", "<|end|>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eos|>"])
    chat = Chat(tokenizer)
    for files, ids, said in (
        ([eos, end], [eos, end], "None"),
        ([eos], [eos, end], f"its chat template ends answers with '<|end|>' ({end}), and generation_config"),
        ([end], [end, eos], "its tokenizer ends answers with '<|eos|>'"),
        ([], [eos, end], "names no end token"),
    ):
        ends = chat.ends(files, 10**6)
        assert ends.ids == ids
        assert said in str(ends.remark(tokenizer))
    assert Chat(tokenizer, "none").ends([end], 10**6).template == ()
    assert chat.ends([eos], vocabulary=end).ids == [token for token in (eos,) if token < end]


def test_generation_stops_at_an_end_of_the_template(tmp_path, capsys):
    """The bundled target ends its answers with token 3, as files that name 5 and 6 do not say."""
    folder = tmp_path / "target"
    shutil.copytree(POCKET, folder)
    for file, changes in (
        ("generation_config.json", {"eos_token_id": 5}),
        ("config.json", {"eos_token_id": 5}),
        ("tokenizer_config.json", {"eos_token": "<|reserved_1|>"}),
    ):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))
    options = options_of(f"target={folder}", "target.dtype=float32").target
    assert file_ends(str(folder)) == [5]
    chat = TargetSource(options).chat("chat")
    silent = TargetSource(options).load()
    assert stop_tokens(silent) == [5]
    assert "ends answers" not in capsys.readouterr().out
    target = TargetSource(options).load(chat=chat)
    assert stop_tokens(target) == [5, 6, 3]
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "its chat template ends answers with '<|end|>' (3)" in said
    prompt = chat.encode(say("What is 2 + 2?"))
    limits: Any = {"max_new_tokens": 120, "sampler": Sampler(0.0)}
    (output,) = generate(target, None, [prompt], stop=stop_tokens(target), **limits).outputs
    assert output.tokens[-1] == 3
    assert 3 not in output.tokens[:-1]
    (missed,) = generate(silent, None, [prompt], stop=stop_tokens(silent), **limits).outputs
    assert missed.tokens[: len(output.tokens)] == output.tokens
    assert len(missed.tokens) > len(output.tokens)


def test_engines_are_told_every_end():
    assert with_ids(SamplingParams({}, 4, [5, 3]))["stop_token_ids"] == [5, 3]
    assert "stop_token_ids" not in with_ids(SamplingParams({}, 4, []))


# -- reasoning and content -----------------------------------------------------------------------

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


def parts(tokenizer, text, messages=None, tools=()):
    ids = tokenizer.encode(text, add_special_tokens=False)
    message = Chat(tokenizer).read_back(messages or say("Hi"), tools, ids)
    if message is None:
        return None
    assert message.pop("role") == "assistant"
    return message.pop("content"), message.pop("reasoning_content", ""), *message


BETWEEN = "<|end|><|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Think one."
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


def test_answer_without_a_format_is_its_text():
    for name in ("chatml", "llama3", "gemma", "mistral", "pocket"):
        assert parts(tokenizer_of(name), "One <b>and</b> [two].\n") == ("One <b>and</b> [two].\n", "")
    special = parts(make_tokenizer(TEMPLATE), "One<|user|> more")
    assert special == ("One more", ""), "servers leave out special tokens, too"


def test_tool_call_is_not_taken_for_text():
    for tokenizer, call in (
        (tokenizer_of("chatml"), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (tokenizer_of("llama3"), '{"name": "f", "parameters": {}}'),
        (TOKENIZERS["harmony"], " to=functions.f<|channel|>commentary json<|message|>{}"),
    ):
        assert parts(tokenizer, call, tools=[TOOL]) is None
        assert parts(tokenizer, "One.", tools=[TOOL]) == ("One.", "")
