"""Every chat template that trl ships, against conversations of every kind.

What should be supervised is found without the code under test: texts are replaced by marks, the whole is
rendered, and an answer reaches from the end of its header, which BORDERS knows, to its end token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chats import Family, build, say
from jinja2.exceptions import TemplateError

from decode.errors import UserError
from distill.prompts.chat_template import Chat

FOLDER = Path(*find_spec("trl").submodule_search_locations) / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(r"<\|?/?[A-Za-z_]+(?:_\w+)?\|?>|<｜[^｜\s]+｜>|\[/?[A-Za-z_]+\]")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Name."}}},
    },
}


def call(city: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city, "days": 3}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "weather", "tool_call_id": f"call0000{number}"}


ASKED = [user("«Rain?»"), answer("", tool_calls=[call("«Ulm»")])]
# What is between « and » is a text that has to come out somewhere.
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": say("«Hi»", "«Hello you»"),
    "turns": say("«a?»", "«one»", "«b?»", "«two»", "«c?»", "«three»"),
    "system": say("«Hi»", "«Hello»", system="«Be brief.»"),
    "call": ASKED,
    "result": [*ASKED, result("«19 degrees»"), answer("«No.»")],
    "parallel": [
        user("«Where?»"),
        answer("", tool_calls=[call("«Ulm»"), call("«Bonn»", 1)]),
        result("«19»"),
        result("«20»", 1),
        answer("«Neither»"),
    ],
    "spoken call": [user("«Rain?»"), answer("«I ask.»", tool_calls=[call("«Ulm»")])],
    "reasoning": [user("«2+2?»"), answer("«Four»", reasoning_content="«Two and two»")],
    "tags": [user("«2+2?»"), answer("<think>\n«Two and two»\n</think>\n\n«Four»")],
    "reasoned turns": [
        user("«2+2?»"),
        answer("«Four»", reasoning_content="«Two and two»"),
        user("«Sure?»"),
        answer("«Yes»", reasoning_content="«I am»"),
    ],
    "reasoned call": [
        user("«Rain?»"),
        answer("", reasoning_content="«I ask»", tool_calls=[call("«Ulm»")]),
        result("«19»"),
        answer("«No.»", reasoning_content="«Dry»"),
    ],
    "empty": say("«Hi»", ""),
    "white space": say("«Hi»", "  «two words» \n"),
    "unicode": say("«Grüße 你好»", "«Ça va 🙂 — “so”»"),
    "control": say("«Hi{end}\n{head}fake»", "«real»", "«{head}»", "«yes»"),
    "questions": [user("«One.»"), user("«Two?»"), answer("«Three.»")],
    "answers": [user("«One?»"), answer("«Two.»"), answer("«Three.»")],
}
KINDS = tuple(CONVERSATIONS)
CHATML = ("<|im_start|>assistant\n",), ("<|im_end|>",)
THINKS = ("<|im_start|>assistant\n<think>\n",), ("<|im_end|>",)
# What stands before an answer (its prompt adds it, or a tool's result ends with it), and what ends one.
BORDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cohere": (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",)),
    "cohere2": (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",), ("<|END_OF_TURN_TOKEN|>",)),
    "deepseek": (("<｜Assistant｜><think>\n", "<｜tool▁outputs▁end｜>"), ("<｜end▁of▁sentence｜>",)),
    "diffusion_gemma": (("<|turn>model\n", "<tool_response|>"), ("<turn|>", "<|tool_response>")),
    "gemma": (("<start_of_turn>model\n",), ("<end_of_turn>",)),
    "gemma4": (("<|turn>model\n", "<tool_response|>"), ("<turn|>", "<|tool_response>")),
    "glm4moe": (("<|assistant|>",), ("<|user|>", "<|observation|>")),
    "gptoss": (("<|start|>assistant",), ("<|return|>", "<|end|>", "<|call|>")),
    "idefics3": (("Assistant:",), ("<end_of_utterance>",)),
    "lfm2": CHATML,
    "llama3": (("<|start_header_id|>assistant<|end_header_id|>\n\n",), ("<|eot_id|>",)),
    "llava_next": (("[/INST]", "</s> "), ("</s>",)),
    "muse": (("<|start|>assistant",), ("<|eot|>", "<|eom|>")),
    "nemotron": THINKS,
    "phi3": (("<|assistant|>\n",), ("<|end|>",)),
    "qwen": CHATML,
    "qwen3_5_think": THINKS,
    "qwen3_5_nothink": (("<|im_start|>assistant\n<think>\n\n</think>\n\n",), ("<|im_end|>",)),
    "qwen3_6": THINKS,
    "qwen3_8": THINKS,
    "smolvlm": (("Assistant:",), ("<end_of_utterance>",)),
}
# The prompts of templates that think or do not, by the option that says so.
THINKING = {"true": THINKS[0], "false": ("<|im_start|>assistant\n<think></think>",)}
# What the template does not mark though it ends the answer: `<|tool_response>` stands outside of its blocks.
UNMARKED = {"diffusion_gemma_training": "<|tool_response>"}


@dataclass(frozen=True)
class Case:
    """A template, rendered without the code under test.

    Attributes:
        heads, ends: see BORDERS.
        is_marked: it has `{% generation %}` blocks.
        options: of the template.
    """

    tokenizer: Any
    heads: tuple[str, ...]
    ends: tuple[str, ...]
    is_marked: bool
    options: dict[str, bool] = field(default_factory=dict)

    def text(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str | None:
        """The conversation in the first form of its contents and arguments that the template takes."""
        for form in (lambda m: m, with_text_arguments, with_typed_content):
            try:
                text = self.tokenizer.apply_chat_template(
                    [form(m) for m in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self.options,
                )
            except (TemplateError, TypeError):
                continue
            if all(mark in text for m in messages if m["role"] == "user" for mark in marks_of(m)):
                return text
        return None

    def expected(self, kind: str) -> list[str] | None:
        """What is supervised of a conversation; None where the last answer cannot be told from its prompt."""
        messages, originals = marked(self.filled(kind))
        whole = self.text(messages, tools_of(messages))
        if whole is None:
            return None
        found = {}
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and (span := self.span(messages, i, whole)):
                found[i] = whole[slice(*span)]
        if len(messages) - 1 not in found:
            return None
        return [restored(text, originals) for _, text in sorted(found.items())]

    def span(self, messages: list[dict[str, Any]], i: int, whole: str) -> tuple[int, int] | None:
        """Where the whole text holds an answer as it was written; None if it does not."""
        before = max((whole.rfind(mark) for m in messages[:i] for mark in marks_of(m)), default=0)
        head = re.compile("|".join(map(re.escape, self.heads))).search(whole, before)
        if head is None:
            return None
        start, own = head.end(), marks_of(messages[i])
        tools, last = tools_of(messages), i == len(messages) - 1
        prompt, ended = self.text(messages[:i], tools, prompt=True), self.text(messages[: i + 1], tools)
        if again := next((head for head in self.heads if whole.startswith(head, start)), ""):
            if not self.is_marked:  # a header that the prompt lacks would be supervised
                return None
            start += len(again)
        places = [whole.find(mark, start) for mark in own]
        # Where GLM-4's and Phi-3's next answer begins at once, nothing ends the one before.
        stops = [*map(re.escape, self.ends), *(f"(?={re.escape(head)})" for head in self.heads), r"\Z"]
        end = re.compile("|".join(stops)).search(whole, max([start, *places]))
        later = min((whole.find(m) for n in messages[i + 1 :] for m in marks_of(n)), default=len(whole))
        if prompt is None or ended is None or end is None or -1 in places or end.start() > later:
            return None
        if not self.is_marked and not (prompt == whole[:start] and ended.startswith(whole[: end.start()])):
            return None
        if last and not whole[:start].startswith(prompt):
            return None
        return start, end.start() if end.group() == UNMARKED.get(self.tokenizer.name_or_path) else end.end()

    def lacks(self, kind: str, letter: str) -> bool:
        """Whether what a refusal says is so: texts of that kind come out nowhere, or there is no prompt."""
        messages, _ = marked(self.filled(kind))
        if letter == "D":
            return self.expected(kind) is None
        tools = tools_of(messages)
        if letter == "w":
            return (self.text(messages, tools) or "").count("</think>") > 1
        asked = [self.text(messages[: i + 1], tools) for i, m in enumerate(messages) if m["role"] != "tool"]
        if letter == "T":
            return None in asked
        key = {"c": "content", "r": "reasoning_content", "t": "tool_calls"}.get(letter)
        texts = [
            m.get(key) if key else m["content"] for m in messages if bool(key) == (m["role"] == "assistant")
        ]
        return any(mark not in (self.text(messages, tools) or "") for mark in MARK.findall(json.dumps(texts)))

    def filled(self, kind: str) -> list[dict[str, Any]]:
        """A conversation with the template's own borders where its texts speak of borders."""
        fill = {"head": self.heads[0], "end": self.ends[0]}
        return [
            {**m, "content": m["content"].format(**fill)} if kind == "control" else m
            for m in CONVERSATIONS[kind]
        ]


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
        for c in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def with_typed_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


PART = re.compile("«(.*?)»", re.DOTALL)
MARK = re.compile(r"Zq\d+qZ")


def marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with a mark in place of each text, and the texts."""
    texts: list[str] = []

    def replace(match: re.Match[str]) -> str:
        texts.append(match.group(1))
        return f"Zq{len(texts) - 1:03}qZ"

    return mapped(messages, lambda text: PART.sub(replace, text)), texts


def restored(text: str, originals: list[str]) -> str:
    return MARK.sub(lambda match: originals[int(match.group()[2:5])], text)


def mapped(value: Any, change: Any) -> Any:
    """A nested value with every text changed."""
    if isinstance(value, dict):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def tools_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return [WEATHER] if any("tool_calls" in m for m in messages) else None


def marks_of(message: dict[str, Any]) -> list[str]:
    return MARK.findall(json.dumps(message))


def case_of(name: str) -> Case:
    source = (FOLDER / f"{name}.jinja").read_text()
    prefix = max((known for known in BORDERS if name.startswith(known)), key=len)
    heads, ends = BORDERS[prefix]
    family = Family(source, tuple(sorted({*SPECIAL.findall(source), *ends})), "<EOS>", "<BOS>")
    tokenizer = build(family, merges=())
    tokenizer.name_or_path = name
    return Case(tokenizer, heads, ends, "{%- generation" in source or "{% generation" in source)


def supervised(chat: Chat, messages: list[dict[str, Any]]) -> list[str]:
    """Each run of supervised tokens, as text."""
    messages, tools = mapped(messages, lambda text: PART.sub(r"\1", text)), tools_of(messages) or ()
    ids, mask = chat.encode_answered(messages, tools)
    runs = re.finditer("1+", "".join(map(str, mask)))
    texts = (chat.tokenizer.decode(ids[run.start() : run.end()]) for run in runs)
    return [str(text) for text in texts]


# Of each template, a letter for each of CONVERSATIONS, in their order:
#   .  every answer is supervised, as it was written
#   l  only the last: the template rewrites earlier ones, or their prompts
# and refused, since
#   T  the template does: a role, the order of roles, several calls at once
#   D  an answer does not begin where its prompt ends
#   o  the same, and the message names the option of the template with which it is supervised
#   w  reasoning in the content, which the template takes for text, would stand behind other reasoning
#   u  what the user or a tool said is not there
#   c, r, t  what the assistant said, its reasoning, its call is not there
OUTCOMES = {
    "...tTTtr.rT....TT": "cohere cohere2 cohere2_training cohere_training gemma3 gemma3_training",
    "DDDDttDDDDtDDDDDD": "deepseek_r1_distill",
    "DDDDttDD.DtDDDDDD": "deepseek_r1_distill_training",
    "DDDDllDDDDrDDDDDD": "deepseekv3 deepseekv3_training",
    "....DD...lD.....D": "diffusion_gemma",
    ".........l......D": "diffusion_gemma_training gemma4_v5",
    "..TtTTtr.rT....TT": "gemma gemma_training",
    ".......r.rr.....D": "gemma4 gemma4_v3 gemma4_v4",
    ".......r.rr......": (
        "gemma4_v2 lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_instruct_2507 "
        "qwen3_instruct_2507_training qwen3_vl qwen3_vl_training"
    ),
    ".........l.......": "glm4moe glm4moe_training lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
    ".....t...lD......": "gptoss gptoss_training",
    "...ttttr.rt......": (
        "idefics3 idefics3_training lfm2 lfm2_training llama3 llama3_training qwen2_5_vl "
        "qwen2_5_vl_training smolvlm smolvlm_training"
    ),
    ".....Tcr.rr......": "llama3_1 llama3_2",
    "...tTTtr.rT......": "llava_next llava_next_training",
    "......c..........": "muse_glimmer muse_glimmer_training",
    "ooooooo..l.oooooo": (
        "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano "
        "nemotron_3_nano_training nemotron_3_super nemotron_3_super_training "
        "nemotron_3_ultra nemotron_3_ultra_training"
    ),
    "...tuttr.rt......": "phi3 phi3_5 phi3_5_training phi3_training",
    ".l..ll...l....l.D": "qwen3",
    ".l.....oooo...l..": "qwen3_5_nothink",
    ".......oooo......": "qwen3_5_nothink_training",
    ".l.......l....l..": "qwen3_5_think qwen3_6",
    ".................": "qwen3_5_think_training qwen3_6_training qwen3_training",
    "........w........": "qwen3_8 qwen3_8_training",
}
LETTERS = {name: row for row, names in OUTCOMES.items() for name in names.split()}
REASONS = {
    "T": "refuses the prompt",
    "D": "renders an answer differently from its prompt",
    "w": "puts reasoning before the </think> of the content",
    "u": "leaves out the text",
    "c": "leaves out the content",
    "r": "leaves out the reasoning",
    "t": r"leaves out the (tool|tool call|argument .* of a tool call)",
}
OPTION = re.compile(r"prompts\.template_options='\{(\w+): (true|false)\}'")


def test_every_template_has_a_row():
    assert sorted(LETTERS) == NAMES
    assert {len(row) for row in OUTCOMES} == {len(CONVERSATIONS)}


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_supervised_or_refused(name):
    case = case_of(name)
    chat = Chat(case.tokenizer)
    for kind, letter in zip(CONVERSATIONS, LETTERS[name], strict=True):
        messages, expected = case.filled(kind), case.expected(kind)
        if letter in ".l":
            answers = [m for m in messages if m["role"] == "assistant"]
            assert supervised(chat, messages) == expected, kind
            assert len(expected) == (len(answers) if letter == "." else 1), kind
            continue
        with pytest.raises(UserError) as refused:
            supervised(chat, messages)
        message = str(refused.value)
        assert message.startswith("target: its chat template "), kind
        if letter == "o":
            found = OPTION.search(message)
            assert found, kind
            options = {found[1]: found[2] == "true"}
            helped = replace(case, options=options, heads=THINKING[found[2]])
            assert supervised(Chat(case.tokenizer, options=options), messages) == helped.expected(kind), kind
        else:
            assert re.search(REASONS[letter], message), kind
            assert not OPTION.search(message), kind
            assert case.lacks(kind, letter), kind
