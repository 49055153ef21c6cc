"""Who ends an answer: the model's files, the tokenizer, the template, and where all of them are heard."""

import json
import shutil
from typing import Any

import pytest
from chats import FAMILIES, POCKET, Family, build, say, tokenizer_of
from workbench import options_of

from decode.generation.generate import generate
from decode.model.load import file_ends, stop_tokens
from decode.sampling import Sampler
from distill.config.build import build_target, read_chat
from distill.engines.base import SamplingParams
from distill.engines.openai_protocol import with_ids
from distill.prompts.chat_template import Chat
from distill.prompts.templates.clock import now
from distill.prompts.templates.ends import AnswerFrame, find_frame
from distill.prompts.templates.renderer import Span, TemplateRenderer
from distill.prompts.templates.rendering import Rendering

TURN = "{{ '<|' + m.role + '|>' + m.content }}"
LOOP = (
    "{% for m in messages %}" + TURN + "END{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")


def tokenizer_with(end: str, *special: str, eos: str = "<|eos|>") -> Any:
    """A tokenizer whose template ends a message so."""
    return build(Family(LOOP.replace("END", end), (*ROLES, *special, eos), eos), merges=())


ENDINGS = {
    "one": ("<|end|>\n", ["<|end|>"], AnswerFrame("<|assistant|>", "<|end|>", "\n", ("<|end|>",))),
    "none, so the next turn does": ("", [], AnswerFrame("<|assistant|>", "", "", ("<|user|>",))),
    "words": ("\n\n", [], AnswerFrame("<|assistant|>")),
    "two together": (
        "<|done|><|end|>",
        ["<|done|>", "<|end|>"],
        AnswerFrame("<|assistant|>", "<|end|>", "", ("<|done|>",)),
    ),
    "two, of which eos is one": (
        "<|eos|><|end|>",
        ["<|end|>"],
        AnswerFrame("<|assistant|>", "<|eos|>", "<|end|>", ("<|eos|>",)),
    ),
    "another at the last": (
        "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
        ["<|end|>", "<|return|>"],
        AnswerFrame("<|assistant|>", "<|return|>", "", ("<|end|>",)),
    ),
    "one more behind the last": (
        "<|end|>\n{% if loop.last and not add_generation_prompt %}<|eos|>{% endif %}",
        ["<|end|>"],
        AnswerFrame("<|assistant|>", "<|end|>", "\n<|eos|>", ("<|end|>",)),
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_a_template_writes_behind_answers_is_read_off_two_turns(name):
    end, special, frame = ENDINGS[name]
    assert find_frame(TemplateRenderer(Rendering(tokenizer_with(end, *special), {}, now()))) == frame


def test_ends_of_answers_and_of_calls_where_the_next_turn_is_what_ends_them():
    template = LOOP.replace("{{ '<|'", "{% set c = m.tool_calls %}{{ '<|'").replace(
        "m.content", "(c[0].function.name if c else m.content)"
    )
    tokenizer = build(Family(template.replace("END", ""), (*ROLES, "<|eos|>"), "<|eos|>"), merges=())
    ends = Chat(tokenizer).ends([], 10**6)
    assert tokenizer.convert_ids_to_tokens(list(ends.template)) == ["<|user|>", "<|tool|>"]
    ids, mask = Chat(tokenizer).encode_answered(say("a?", "one", "b?", "two"))
    written = [i for i, kept in zip(ids, mask, strict=True) if kept]
    assert tokenizer.decode(written) == "one<|user|>two"


@pytest.mark.parametrize(
    ("inner", "text", "span"),
    [
        ("one", "Qone<|end|>\n", "one<|end|>"),  # the block ends before the token
        ("one<|end|>", "Qone<|end|>\n", "one<|end|>"),
        ("one<|end|>\n", "Qone<|end|>\nQ", "one<|end|>"),
        ("one<|end|>\n<|eos|>", "Qone<|end|>\n<|eos|>", "one<|end|>"),
        ("a<|end|>b", "Qa<|end|>b<|end|>", "a<|end|>b<|end|>"),
        ("a<|end|>b", "Qa<|end|>b<|call|>", "a<|end|>b"),
        ("", "Q<|end|>\n", "<|end|>"),
    ],
)
def test_a_span_reaches_to_its_end_token_and_no_further(inner, text, span):
    frame = AnswerFrame("Q", "<|end|>", "\n<|eos|>", ("<|end|>",))
    assert text[slice(*frame.fit(Span(1, 1 + len(inner)), text))] == span


def test_sources_that_agree_are_left_alone_and_others_named():
    tokenizer = tokenizer_with("<|end|>", "<|end|>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eos|>"])
    chat = Chat(tokenizer)
    assert chat.ends([eos, end], 10**6).remark(tokenizer) is None
    assert chat.ends([eos, end], 10**6).ids == [eos, end]
    template = chat.ends([eos], 10**6)
    assert template.ids == [eos, end]
    assert template.remark(tokenizer) == (
        f"target: its chat template ends answers with '<|end|>' ({end}), and generation_config.json names "
        f"'<|eos|>' ({eos}); answers end at all of them here, and an engine may need the same list"
    )
    assert "its tokenizer ends answers with '<|eos|>'" in str(chat.ends([end], 10**6).remark(tokenizer))
    assert "names no end token" in str(chat.ends([], 10**6).remark(tokenizer))
    assert Chat(tokenizer, "none").ends([end], 10**6).template == ()
    assert chat.ends([eos], vocabulary=end).ids == [token for token in (eos,) if token < end]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_end_where_they_say(name):
    tokenizer: Any = tokenizer_of(name)
    ends = Chat(tokenizer).ends([], 10**6).template
    wanted = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}.get(name, "<|im_end|>")
    assert tokenizer.convert_ids_to_tokens(list(ends)) == [wanted]


def test_generation_stops_at_an_end_that_the_template_alone_knows(tmp_path, capsys):
    """The bundled target ends its answers with token 3, as files that name 5 and 6 do not say."""
    folder = tmp_path / "target"
    shutil.copytree(POCKET, folder)
    for file, ends in (("generation_config.json", {"eos_token_id": 5}), ("config.json", {"eos_token_id": 5})):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | ends))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|reserved_1|>"}))
    options = options_of(f"target={folder}", "target.dtype=float32").target
    assert file_ends(str(folder)) == [5]
    chat = read_chat(options, "chat")
    silent = build_target(options)
    assert stop_tokens(silent) == [5]
    assert "ends answers" not in capsys.readouterr().out
    target = build_target(options, chat=chat)
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
