"""What is left out counts, for whichever reason; and why nothing is held out or left to train on."""

import json

import pytest
from chats import FAMILIES, tokenizer_of
from chats import build as build_tokenizer
from tokenizers.processors import TemplateProcessing
from workbench import make_tokenizer, options_of

from decode.errors import UserError
from distill.config import build
from distill.prompts import split as inputs
from distill.prompts.chat_template import Chat
from distill.prompts.length import NONE, Limit
from distill.prompts.prompt import Prompt
from distill.prompts.rendered import RenderedTexts

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def asked(i: int) -> dict:
    return {"messages": [{"role": "user", "content": f"question {i}"}]}


def answered(i: int) -> dict:
    return {"messages": [*asked(i)["messages"], {"role": "assistant", "content": "a"}]}


def read(path, records, *overrides: str, limit: Limit = NONE) -> inputs.Inputs:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines))
    run = options_of(f"prompts={path}", *overrides)
    return inputs.read(run.prompts, Chat(make_tokenizer()), limit, run.rollout.answers, score=True)


GIVEN = ("rollout=given", "prompts.heldout_share=0", "score.enabled=false")
# Why -> records beside 30 good ones, the options, and what is said.
REASONS = {
    "malformed": (["{"] * 10, (), r"10 of \d+ prompts are left out: 10 as .*p.jsonl:31: not JSON .*; set"),
    "two reasons": (
        ["{"] * 6 + [{"prompt": ""}] * 4,
        (),
        r"6 as .*:31: not JSON .*; 4 as .*:37: message 1 \(user\)",
    ),
    "no answer given": (
        [asked(i) for i in range(30, 40)],
        GIVEN,
        "10 of 40 prompts are left out: 10 as .*does not end with an answer; set rollout=hf, .* or set",
    ),
    "a call that the template has not": (
        [{"messages": [*asked(i)["messages"], CALL]} for i in range(30, 40)],
        GIVEN,
        "10 of 40 prompts are left out: 10 as .*tool call",
    ),
    "rendered already": (
        [{"text": f"<|user|>hi {i}<|assistant|>ho<|end|>"} for i in range(10)],
        ("prompts.heldout_share=0",),
        r"10 as .*p.jsonl:31: message 1 \(user\): .* rendered already: <\|\w+\|> .*prompts\.template=none",
    ),
    "long, and malformed": (
        ["{"] * 5 + [{"prompt": "x" * 500 + str(i)} for i in range(5)],
        ("prompts.heldout_share=0",),
        r"10 of 40 .* 5 as .*not JSON.*; 5 have more than 99 tokens .*; raise max_tokens to 503, or set",
    ),
}


@pytest.mark.parametrize("why", REASONS)
def test_all_that_is_left_out_counts_and_the_share_that_is_advised_is_enough(why, tmp_path):
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


def test_nothing_left_is_one_line_with_its_count(tmp_path):
    with pytest.raises(
        UserError, match=r"3 of 3 prompts are left out: 3 as .*does not end .*; set rollout=hf"
    ):
        read(tmp_path / "p.jsonl", [asked(i) for i in range(3)], *GIVEN)


def test_a_sample_stands_for_all_that_it_is_drawn_from(tmp_path):
    records = [*(answered(i) for i in range(90)), *["{"] * 10]
    found = read(tmp_path / "p.jsonl", records, "prompts.limit=20")
    assert len(found.train) + len(found.held) == 20
    with pytest.raises(UserError, match=r"max_left_out=0\.11 "):
        read(tmp_path / "p.jsonl", [*records, "{"], "prompts.limit=20")


def test_what_cannot_be_read_behind_a_fault_counts_too(tmp_path):
    whole = json.dumps([asked(i) for i in range(100)])
    broken = tmp_path / "p.json"
    for text, least, most in (
        (whole.replace('"question 20"', "question 20"), 0.75, 0.85),
        (whole[:-9], 0, 0),
    ):
        if not most:
            assert len(read(broken, [text], "prompts.heldout_share=0").train) == 99
            continue
        with pytest.raises(UserError, match="about 80 stand behind these and were not read") as caught:
            read(broken, [text])
        assert least < float(str(caught.value).rpartition("max_left_out=")[2].split()[0]) < most
    table = [f"question {i},a" for i in range(100)]
    with pytest.raises(UserError, match="about 59 stand behind these"):
        read(tmp_path / "p.csv", ["prompt,answer", *table[:40], '"question', *table[41:]])


def test_held_out_prompts_count_apart(tmp_path):
    held = tmp_path / "h.jsonl"
    held.write_text("\n".join([*(json.dumps(asked(i)) for i in range(50, 55)), *["{"] * 2]))
    with pytest.raises(UserError, match=r"2 of 7 held-out prompts are left out: 2 as .*h\.jsonl:6: not JSON"):
        read(tmp_path / "p.jsonl", [asked(i) for i in range(9)], f"prompts.heldout={held}")


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        (
            [{"messages": answered(0)["messages"] + asked(i)["messages"]} for i in range(40)],
            ["prompts.heldout_share=0.05"],
            "all 40 prompts begin with one question, .* at any prompts.heldout_share; set",
        ),
        (
            [asked(i) for i in range(3)],
            ["prompts.heldout_share=0.01"],
            r"share=0\.01 takes none of 3 questions, and 0\.\d+ takes one",
        ),
        (
            [asked(i) for i in range(30)],
            ["prompts.heldout_share=0"],
            "scoring: prompts.heldout_share is 0; set",
        ),
    ],
)
def test_a_split_that_holds_out_nothing_says_why(records, options, said, tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr(build, "read_chat", lambda *_: Chat(make_tokenizer()))
    monkeypatch.setattr(build, "read_limit", lambda *_: Limit())
    run = options_of(f"prompts={path}", *options)
    with pytest.raises(UserError, match=said) as caught:
        build.read_inputs(run.target, run.prompts, run.score, answers="write")
    if share := str(caught.value).partition(", and ")[2].split()[:1] * ("takes one" in str(caught.value)):
        run = options_of(f"prompts={path}", f"prompts.heldout_share={share[0]}")
        assert len(build.read_inputs(run.target, run.prompts, run.score, answers="write")[2]) == 1


def test_a_split_that_leaves_nothing_to_train_on_says_why(tmp_path):
    with pytest.raises(
        UserError, match=r"none are left to train on: prompts\.heldout_share=1 holds out all 3"
    ):
        read(tmp_path / "p.jsonl", [asked(i) for i in range(3)], "prompts.heldout_share=1")


def test_fields_that_are_not_read_are_said_and_recorded(tmp_path, capsys):
    records = [asked(i) | {"source": "web"} | {f"x{n}": 1 for n in range(i)} for i in range(30)]
    found = read(tmp_path / "p.jsonl", records)
    inputs.describe(found, None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not read" in line]
    assert "fields `source` of 30 records, `x0` of 29 records," in line
    assert "and 25 more, were not read; prompts.columns=" in line
    assert found.record["sources"][0]["unread"]["source"] == 30


@pytest.mark.parametrize(
    ("family", "text", "token"),
    [
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("chatml", "4<|im_end|>", "<|im_end|>"),
        ("chatml", "what does <|im_end|> mean?", "<|im_end|>"),
        ("chatml", "<think>why</think>4", ""),
        ("qwen3", "<think>why</think>4 <tool_call>", ""),
        ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi", "<|start_header_id|>"),
        ("gemma", "<bos>hi", "<bos>"),
        ("gemma", "hi\n\nho", ""),
        ("gemma", "<start_of_turn>user\nhi", "<start_of_turn>"),
        ("mistral", "[INST] hi [/INST]", "[INST]"),
        ("mistral", "no <s>longer</s> so", ""),
        ("mistral", "yes</s>", "</s>"),
        ("chatml", "ordinary | text < with > marks", ""),
    ],
)
def test_a_text_with_the_templates_own_tokens_is_found(family, text, token):
    found = RenderedTexts(Chat(tokenizer_of(family))).fault(
        Prompt.of("1", [{"role": "user", "content": text}])
    )
    assert (f"rendered already: {token} " in found) if token else not found


OTHERS = [
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


@pytest.mark.parametrize("place", ["arguments", "schema", "system"])
def test_a_token_of_the_template_is_found_wherever_a_text_stands(place):
    def fault(text):
        call = {"type": "function", "function": {"name": "f", "arguments": {"city": [text]}}}
        asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
        if place == "system":
            asked[0]["content"] = text
        if place == "arguments":
            asked += [{"role": "assistant", "content": "", "tool_calls": [call]}]
            asked += [{"role": "tool", "content": "1"}]
        schema = {"name": "f", "description": text if place == "schema" else "x"}
        tools = [{"type": "function", "function": schema}]
        return RenderedTexts(Chat(tokenizer_of("qwen3"))).fault(Prompt.of("1", asked, tools=tools))

    assert "<|im_start|>" in fault("a <|im_start|>system b")
    assert not fault("Ulm")


@pytest.mark.parametrize("text", OTHERS)
def test_a_conversation_in_the_format_of_another_template_is_found(text):
    found = RenderedTexts(Chat(make_tokenizer("{{ messages[0].content }}\nAnswer:")))
    assert "rendered already" in found.fault(Prompt.of("1", [{"role": "user", "content": text}]))


@pytest.mark.parametrize("text", [text for text in OTHERS if "<|user|>" not in text])  # the tokenizer's own
def test_a_conversation_that_is_quoted_is_a_text(text):
    found = RenderedTexts(Chat(make_tokenizer("{{ messages[0].content }}\nAnswer:")))
    quoted = [{"role": "user", "content": f"What does this mean?\n{text}"}]
    assert not found.fault(Prompt.of("1", quoted))
    assert not found.fault(Prompt.of("1", [{"role": "system", "content": text}, *quoted]))


def test_a_text_that_only_begins_like_a_format_is_fine():
    found = RenderedTexts(Chat(make_tokenizer("{{ messages[0].content }}\nAnswer:")))
    for text in ("Human: what is it?", "### Instruction: say hi", "USER: me", "an assistant: who?", "[INST]"):
        assert not found.fault(Prompt.of("1", [{"role": "user", "content": text}]))


def test_without_a_template_every_text_is_fine():
    chat = Chat(tokenizer_of("chatml"), "none")
    text = "<|im_start|>user\nhi<|im_end|>"
    assert not RenderedTexts(chat).fault(Prompt.of("1", [{"role": "user", "content": text}]))


@pytest.mark.parametrize(
    ("message", "tools", "said"),
    [
        (CALL, (), "a message of the assistant has tool_calls, and without a chat template"),
        ({"role": "assistant", "content": "a", "reasoning_content": "why"}, (), "has reasoning_content, and"),
        ({"role": "assistant", "content": "a"}, ({"name": "f"},), "the record has tools, and"),
    ],
)
def test_plain_text_has_no_room_for_calls_and_reasoning(message, tools, said):
    chat = Chat(tokenizer_of("llama3"), "none")
    with pytest.raises(UserError, match=f"template=none: .*{said}"):
        chat.encode_answered([*asked(0)["messages"], message], tools)


def test_a_plain_prompt_has_no_end_behind_it():
    tokenizer = build_tokenizer(FAMILIES["llama3"])
    special = [
        (str(token), int(tokenizer.convert_tokens_to_ids(token)))
        for token in (tokenizer.bos_token, tokenizer.eos_token)
    ]
    (first, number), (last, _) = special
    adds = TemplateProcessing(single=f"{first} $A {last}", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = adds
    chat = Chat(tokenizer, "none")
    for text in ("hi", last, f"hi{last}", f"{last}hi"):
        own = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) != [number, *own], "the tokenizer ends every text"
        assert chat.encode([{"role": "user", "content": text}]) == [number, *own]


def test_a_plain_text_has_one_beginning():
    tokenizer = build_tokenizer(FAMILIES["llama3"])
    first, number = str(tokenizer.bos_token), int(tokenizer.bos_token_id)  # pyright: ignore[reportArgumentType]
    adds = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, number)])
    tokenizer.backend_tokenizer.post_processor = adds
    chat = Chat(tokenizer, "none")
    plain, begun, twice = (chat.encode([{"role": "user", "content": first * n + "hi"}]) for n in range(3))
    assert plain == begun == [number, *tokenizer.encode("hi", add_special_tokens=False)]
    assert twice == [number, *begun], "what was written twice was meant"
    ids, mask = chat.encode_answered([*({"role": r, "content": first + r} for r in ("user", "assistant"))])
    assert ids[0] == number != ids[1]
    assert mask[0] == 0
