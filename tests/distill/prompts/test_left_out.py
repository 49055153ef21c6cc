"""Prompts that are left out are counted and named; an empty split says why."""

import json
import re

import pytest
from chats import FAMILIES, tokenizer_of
from chats import build as build_tokenizer
from tokenizers.processors import TemplateProcessing
from workbench import make_tokenizer, options_of

from decode.errors import UserError
from distill.config import build
from distill.prompts import split
from distill.prompts.chat_template import Chat
from distill.prompts.length import NONE, Limit, strictest
from distill.prompts.prompt import Prompt
from distill.prompts.rendered import RenderedTexts

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def asked(i: int) -> dict:
    return {"messages": [{"role": "user", "content": f"question {i}"}]}


def answered(i: int) -> dict:
    return {"messages": [*asked(i)["messages"], {"role": "assistant", "content": "a"}]}


def read(path, records, *overrides: str, limit: Limit = NONE) -> split.Inputs:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines))
    run = options_of(f"prompts={path}", *overrides)
    return split.read(run.prompts, Chat(make_tokenizer()), limit, run.rollout.answers, score=True)


GIVEN = ("rollout=given", "prompts.heldout_share=0", "score.enabled=false")
ALL = ("prompts.heldout_share=0",)
QUESTIONS = [asked(i) for i in range(30, 40)]
CALLS = [{"messages": [*record["messages"], CALL]} for record in QUESTIONS]
RENDERED = [{"text": f"<|user|>hi {i}<|assistant|>ho<|end|>"} for i in range(10)]
LONG = [{"prompt": "x" * 500 + str(i)} for i in range(5)]
# Why -> ten more records than 30 good ones, the options, and what is said.
REASONS = {
    "malformed": (["{"] * 10, (), r"10 of \d+ prompts are left out: 10 as .*p.jsonl:31: not JSON"),
    "two reasons": (["{"] * 6 + [{"prompt": ""}] * 4, (), r"6 as .*:31: not JSON .*; 4 as .*:37: message 1"),
    "no answer given": (QUESTIONS, GIVEN, "10 of 40 .* does not end with an answer; set rollout=hf"),
    "no tool calls in the template": (CALLS, GIVEN, "10 of 40 prompts are left out: 10 as .*tool call"),
    "rendered already": (
        *(RENDERED, ALL),
        r"10 as .*p.jsonl:31: message 1 .* rendered already: <\|\w+\|> .*prompts\.template=none",
    ),
    "long, and malformed": (
        *(["{"] * 5 + LONG, ALL),
        r"10 of 40 .* 5 as .*not JSON.*; 5 have more than 99 tokens .*; raise max_tokens to 503",
    ),
}


@pytest.mark.parametrize("why", REASONS)
def test_left_out_prompts_are_counted(why, tmp_path):
    more, options, said = REASONS[why]
    records = [*(answered(i) for i in range(30)), *more]
    limit = Limit(99, "max_tokens", 0)
    with pytest.raises(UserError, match=said) as caught:
        read(tmp_path / "p.jsonl", records, *options, limit=limit)
    assert "\n" not in str(caught.value)
    assert ("rollout=hf" in str(caught.value)) == (why == "no answer given")
    advised = str(caught.value).rpartition("prompts.max_left_out=")[2].split()[0]
    assert 0.2 < float(advised) < 0.3
    found = read(tmp_path / "p.jsonl", records, f"prompts.max_left_out={advised}", *options, limit=limit)
    assert len(found.rejected) + len(found.left_out) == 10
    less = [*(answered(i) for i in range(30)), *more[-3:]]
    assert len(read(tmp_path / "p.jsonl", less, *options, limit=limit).train) >= 20, "a tenth may be"


def test_sample_stands_for_its_whole_source(tmp_path):
    records = [*(answered(i) for i in range(90)), *["{"] * 10]
    found = read(tmp_path / "p.jsonl", records, "prompts.limit=20")
    assert len(found.train) + len(found.held) == 20
    with pytest.raises(UserError, match=r"max_left_out=0\.11 "):
        read(tmp_path / "p.jsonl", [*records, "{"], "prompts.limit=20")


def test_records_after_a_fault_count_too(tmp_path):
    whole = json.dumps([asked(i) for i in range(100)])
    path = tmp_path / "p.json"
    assert len(read(path, [whole[:-9]], *ALL).train) == 99
    with pytest.raises(UserError, match="about 80 after these were not read") as caught:
        read(path, [whole.replace('"question 20"', "question 20")])
    assert 0.75 < float(str(caught.value).rpartition("max_left_out=")[2].split()[0]) < 0.85
    table = [f"question {i},a" for i in range(100)]
    with pytest.raises(UserError, match="about 59 after these"):
        read(tmp_path / "p.csv", ["prompt,answer", *table[:40], '"question', *table[41:]])


def test_held_out_prompts_count_apart(tmp_path):
    held = tmp_path / "h.jsonl"
    held.write_text("\n".join([*(json.dumps(asked(i)) for i in range(50, 55)), *["{"] * 2]))
    with pytest.raises(UserError, match=r"2 of 7 held-out prompts are left out: 2 as .*h\.jsonl:6: not JSON"):
        read(tmp_path / "p.jsonl", [asked(i) for i in range(9)], f"prompts.heldout={held}")


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("0.05", "all 40 prompts begin with one question, .* at any prompts.heldout_share"),
        ("0.01", r"share=0\.01 takes none of 3 questions, and 0\.\d+ takes one"),
        ("0", "scoring: prompts.heldout_share is 0"),
    ],
)
def test_nothing_held_out_says_why(share, said, tmp_path, monkeypatch):
    one = [{"messages": answered(0)["messages"] + asked(i)["messages"]} for i in range(40)]
    records = {"0.05": one, "0.01": [asked(i) for i in range(3)], "0": [asked(i) for i in range(30)]}[share]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr(build.TargetSource, "chat", lambda *_: Chat(make_tokenizer()))
    monkeypatch.setattr(build.TargetSource, "limit", lambda *_: Limit())

    def held(share: str) -> int:
        run = options_of(f"prompts={path}", f"prompts.heldout_share={share}")
        return len(build.PromptReader(run.target, run.prompts, run.score, answers="write").read()[2])

    with pytest.raises(UserError, match=said) as caught:
        held(share)
    if advised := re.search(r", and (\S+) takes one", str(caught.value)):
        assert held(advised[1]) == 1


def test_nothing_to_train_on_says_why(tmp_path):
    with pytest.raises(UserError, match=r"none are left .*: prompts\.heldout_share=1 holds out all 3"):
        read(tmp_path / "p.jsonl", [asked(i) for i in range(3)], "prompts.heldout_share=1")


def test_strictest_limit_names_the_option_that_raises_it():
    assert strictest(None, None, None) == NONE
    for limits, option, said in (
        ((40, 256, 256), "prompts.max_tokens", "40 tokens (prompts.max_tokens=40)"),
        ((None, 128, 256), "max_tokens", "127 tokens (max_tokens=128)"),
        ((None, 256, 256), "", "255 tokens (as many as the target reads)"),
        ((255, None, 256), "", "255 tokens (as many as the target reads)"),
    ):
        limit = strictest(*limits)
        assert (limit.option, str(limit)) == (option, said)


def test_unread_fields_are_said_and_recorded(tmp_path, capsys):
    records = [asked(i) | {"source": "web"} | {f"x{n}": 1 for n in range(i)} for i in range(30)]
    found = read(tmp_path / "p.jsonl", records)
    split.describe(found, None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not read" in line]
    assert "fields `source` of 30 records, `x0` of 29 records," in line
    assert "and 25 more, were not read; prompts.columns=" in line
    assert found.record["sources"][0]["unread"]["source"] == 30


def test_text_with_tokens_of_the_template_is_found():
    for family, text, token in (
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("chatml", "what does <|im_end|> mean?", "<|im_end|>"),
        ("qwen3", "<think>why</think>4 <tool_call>", ""),
        ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi", "<|start_header_id|>"),
        ("gemma", "hi\n\nho", ""),
        ("gemma", "<start_of_turn>user\nhi", "<start_of_turn>"),
        ("mistral", "[INST] hi [/INST]", "[INST]"),
        ("mistral", "no <s>longer</s> so", ""),
        ("chatml", "ordinary | text < with > marks", ""),
    ):
        found = fault(Chat(tokenizer_of(family)), text)
        assert (f"rendered already: {token} " in found) if token else not found


OTHERS = [
    "<|im_start|>user\nhi<|im_end|>",  # without the beginning of an answer
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<|user|>\nhi</s>\n<|assistant|>\n",
    "<s>[INST] hi [/INST] hello </s>",
    "Below is an instruction that describes a task.\n\n### Instruction:\nhi\n\n### Response:\nhello",
    "### Human: hi### Assistant: hello",
    "A chat between a curious user and an assistant. USER: hi ASSISTANT: hello",
    "\n\nHuman: hi\n\nAssistant:",
    "System: be kind\n\nHuman: hi\n\nAssistant: hello",
    "User: hi\nAssistant:",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>hello",
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "[gMASK]<sop><|user|>\nhi<|assistant|>\n",
    "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>hello",
    "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>",
    "<|start_of_role|>user<|end_of_role|>hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "[SYSTEM_PROMPT]be kind[/SYSTEM_PROMPT][INST]hi[/INST]",
    "GPT4 Correct User: hi<|end_of_turn|>GPT4 Correct Assistant:",
    "<|prompter|>hi<|endoftext|><|assistant|>",
    "<human>: hi\n<bot>: hello",
]


def fault(chat: Chat, *contents: str) -> str:
    roles = ("user",) if len(contents) == 1 else ("system", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    return str(RenderedTexts(chat).fault(Prompt.of("1", messages)) or "")


@pytest.mark.parametrize("place", ["arguments", "schema", "system"])
def test_token_of_the_template_is_found_in_every_place(place):
    def found(text):
        call = {"type": "function", "function": {"name": "f", "arguments": {"city": [text]}}}
        messages = [{"role": "system", "content": text if place == "system" else "x"}, *asked(0)["messages"]]
        if place == "arguments":
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            messages += [{"role": "tool", "content": "1"}]
        schema = {"name": "f", "description": text if place == "schema" else "x"}
        tools = [{"type": "function", "function": schema}]
        return RenderedTexts(Chat(tokenizer_of("qwen3"))).fault(Prompt.of("1", messages, tools=tools))

    assert "<|im_start|>" in found("a <|im_start|>system b")
    assert not found("Ulm")


def test_format_of_another_template_is_found_unless_quoted():
    plain = Chat(make_tokenizer("{{ messages[0].content }}\nAnswer:"))
    for text in OTHERS:
        assert "rendered already" in fault(plain, text)
        if "<|user|>" not in text:  # the tokenizer's own
            quoted = f"What does this mean?\n{text}"
            assert not fault(plain, quoted)
            assert not fault(plain, text, quoted)
    for text in ("Human: what is it?", "### Instruction: say hi", "USER: me", "an assistant: who?", "[INST]"):
        assert not fault(plain, text), "it only begins like a format"


def test_without_a_template_every_text_is_fine():
    assert not fault(Chat(tokenizer_of("chatml"), "none"), "<|im_start|>user\nhi<|im_end|>")


def test_plain_text_refuses_calls_and_reasoning():
    chat, said = Chat(tokenizer_of("llama3"), "none"), {"role": "assistant", "content": "a"}
    for message, tools, why in (
        (CALL, (), "a message of the assistant has tool_calls"),
        (said | {"reasoning_content": "why"}, (), "has reasoning_content"),
        (said, ({"name": "f"},), "the record has tools"),
    ):
        with pytest.raises(UserError, match=f"template=none: .*{why}, and"):
            chat.encode_answered([*asked(0)["messages"], message], tools)


@pytest.fixture
def adding():
    """A tokenizer that adds its first and its last token to every text, and the two."""
    tokenizer = build_tokenizer(FAMILIES["llama3"])
    names = [str(tokenizer.bos_token), str(tokenizer.eos_token)]
    special = [(name, int(tokenizer.convert_tokens_to_ids(name))) for name in names]
    adds = TemplateProcessing(single=f"{names[0]} $A {names[1]}", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = adds
    return tokenizer, *names


def test_plain_prompt_does_not_end(adding):
    tokenizer, first, last = adding
    chat = Chat(tokenizer, "none")
    for text in ("hi", last, f"hi{last}", f"{last}hi"):
        begun = tokenizer.encode(first + text, add_special_tokens=False)
        assert tokenizer.encode(text) != begun, "the tokenizer ends every text"
        assert chat.encode([{"role": "user", "content": text}]) == begun


def test_plain_text_begins_once(adding):
    tokenizer, first, _ = adding
    chat, number = Chat(tokenizer, "none"), tokenizer.bos_token_id
    plain, begun, twice = (chat.encode([{"role": "user", "content": first * n + "hi"}]) for n in range(3))
    assert plain == begun == [number, *tokenizer.encode("hi", add_special_tokens=False)]
    assert twice == [number, *begun], "what was written twice was meant"
    ids, mask = chat.encode_answered([{"role": r, "content": first + r} for r in ("user", "assistant")])
    assert ids[0] == number != ids[1]
    assert mask[0] == 0
