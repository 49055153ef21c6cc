"""Records of every form, and what is wrong with those of none."""

import json

import pytest

from decode.errors import UserError
from distill.prompts.prompt import Prompt, opening
from distill.prompts.records.forms import parse_prompt, to_prompt

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"a": {"default": None, "type": "int"}}},
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


FORMS = {
    "messages": ({"messages": [user("q"), answer("a")]}, [user("q"), answer("a")]),
    "more of a message": (
        {"messages": [user("q") | {"extra": 1, "name": "Jo"}]},
        [user("q") | {"name": "Jo"}],
    ),
    "parts": ({"messages": [user([{"type": "text", "text": x} for x in ("a", "b")])]}, [user("ab")]),
    "turns": ({"turns": ["q", "r"]}, [user("q"), user("r")]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [user("q"), answer("a")],
    ),
    "sharegpt's other names": (
        {
            "system": "s",
            "conversations": [{"from": "user", "value": "q"}, {"role": "assistant", "content": "a"}],
        },
        [{"role": "system", "content": "s"}, user("q"), answer("a")],
    ),
    "alpaca": ({"instruction": "do", "input": "this", "output": "a"}, [user("do\n\nthis"), answer("a")]),
    "alpaca without input": ({"instruction": "do", "input": "", "response": "a"}, [user("do"), answer("a")]),
    "prompt": ({"prompt": "q", "completion": "a"}, [user("q"), answer("a")]),
    "question": ({"question": "q", "answer": "a", "text": "t"}, [user("q"), answer("a")]),
    "text": ({"text": "q", "system_prompt": "s"}, [{"role": "system", "content": "s"}, user("q")]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_record_of_any_form_is_a_prompt(form):
    record, messages = FORMS[form]
    assert to_prompt(record, "7") == Prompt.of("7", tuple(messages))
    dropped = to_prompt(record, "7", answers="drop")
    assert dropped.messages == tuple(m for m in messages if m["role"] != "assistant")


def test_the_other_fields():
    prompt = to_prompt({"turns": ["q"], "question_id": 81, "category": "writing", "reward": 0.5}, "1")
    assert (prompt.id, prompt.category, prompt.weight) == ("81", "writing", 0.5)
    other = to_prompt({"prompt": "q", "task_id": "HumanEval/0", "weight": 0}, "1")
    assert (other.id, other.weight) == ("HumanEval/0", 0.0)
    assert to_prompt({"prompt": "q", "id": None, "weight": None, "category": None}, "1") == Prompt.of(
        "1", (user("q"),)
    )


def test_tool_calls_are_kept_as_templates_read_them():
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    talk = {"messages": [user("1 + 2?"), called, result]}
    assert to_prompt(talk, "1", "drop") == to_prompt(talk, "1", "keep")
    record = talk | {"tools": json.dumps([TOOL])}
    for answers in ("keep", "drop"):
        prompt = to_prompt(record, "1", answers)
        _, said, got = prompt.messages
        assert said["content"] == ""
        assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": [2]}}
        assert said["tool_calls"][0]["id"] == got["tool_call_id"] == "c1"
        assert opening(prompt.messages) == prompt.messages, "the result of the call is what is answered"
        assert prompt.tools[0]["function"]["parameters"] == {"a": {"default": None, "type": "int"}}


def test_columns_rename_and_rule():
    record = {"messages": "no", "query": "q", "gold": "a", "uuid": 5, "reward": 2}
    columns = {"prompt": "query", "answer": "gold", "id": "uuid"}
    assert to_prompt(record, "1", columns=columns) == Prompt.of("5", (user("q"), answer("a")), weight=2.0)
    assert to_prompt({"prompt": "q", "key": "k"}, "1", columns={"id": "key"}) == Prompt.of("k", (user("q"),))
    with pytest.raises(UserError, match="no column 'quest'; it has messages, query"):
        to_prompt(record, "1", columns={"prompt": "quest"})


MALFORMED = {
    "no messages": ({"messages": []}, "needs a non-empty list 'messages'"),
    "messages in a text": ({"messages": "hello"}, "needs a non-empty list 'messages'"),
    "no turns": ({"turns": []}, "needs a non-empty list 'messages'"),
    "messages of texts": ({"messages": ["hi"]}, "role"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "hi"}]}, "role"),
    "an empty message": ({"messages": [user("")]}, "content"),
    "a message that is a number": ({"messages": [{"role": "user", "content": 3}]}, "content"),
    "half a surrogate": ({"messages": [user("\ud800")]}, "content"),
    "no form": ({"colour": "red"}, "needs a non-empty list 'messages'"),
    "empty prompt": ({"prompt": ""}, "content"),
    "blank turn": ({"turns": ["q", " \n"]}, "content"),
    "a number": ({"turns": [3]}, "content"),
    "no role": ({"messages": [{"content": "q"}]}, "role"),
    "a role that is a list": ({"messages": [{"role": ["user"], "content": "q"}]}, "role"),
    "a speaker that is a list": ({"conversations": [{"from": ["human"], "value": "q"}]}, "role"),
    "an unknown speaker": ({"conversations": [{"from": "moon", "value": "q"}]}, "role"),
    "conversations of texts": ({"conversations": ["q"]}, "role"),
    "null without a call": ({"messages": [user("q"), {"role": "assistant", "content": None}]}, "content"),
    "pictures": ({"messages": [user([{"type": "image", "url": "x"}])]}, "content"),
    "calls of nothing": ({"messages": [user("q"), answer("a") | {"tool_calls": [{}]}]}, "tool_calls"),
    "calls in a text": ({"messages": [user("q"), answer("a") | {"tool_calls": "add"}]}, "tool_calls"),
    "a name that is none": ({"messages": [user("q") | {"name": 3}]}, "'name' must be a text"),
    "an answer that is a number": ({"question": "q", "answer": 42}, "content"),
    "an input that is a list": ({"instruction": "q", "input": ["x"]}, "'instruction' and 'input'"),
    "only a system text": ({"messages": [{"role": "system", "content": "s"}]}, "nothing to answer"),
    "only an answer": (
        {"messages": [answer("a")]},
        "only the assistant speaks in it; there is nothing",
    ),
    "NaN": ({"prompt": "q", "weight": float("nan")}, "finite number"),
    "infinite": ({"prompt": "q", "weight": float("inf")}, "finite number"),
    "beyond a float": ({"prompt": "q", "weight": 10**400}, "finite number"),
    "negative": ({"prompt": "q", "reward": -0.1}, "'reward' must be a finite number"),
    "true": ({"prompt": "q", "weight": True}, "finite number"),
    "in a text": ({"prompt": "q", "weight": "1"}, "finite number"),
    "an id that is a list": ({"prompt": "q", "id": [1]}, "'id' must be a text"),
    "a category that is an object": ({"prompt": "q", "category": {}}, "'category' must be"),
    "half a surrogate in an id": ({"prompt": "q", "id": "\ud800"}, "UTF-8"),
    "half a surrogate in a tool": ({"prompt": "q", "tools": [{"name": "\udfff"}]}, "UTF-8"),
    "a date in a tool": ({"prompt": "q", "tools": [{"when": object()}]}, "UTF-8 JSON"),
    "tools in a text": ({"prompt": "q", "tools": "add"}, "'tools' must be a list"),
    "a list": (["q"], "expected an object, got list"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_wrong_is_said(case):
    record, said = MALFORMED[case]
    with pytest.raises(UserError, match=said):
        to_prompt(record, "1")


def test_dropped_answers_need_not_be_any():
    conversations = [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]
    record = {"conversations": conversations}
    assert to_prompt(record, "1", "drop").messages == (user("q"),)
    with pytest.raises(UserError, match="content"):
        to_prompt(record, "1", "keep")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff{}", "not UTF-8"),
        (b"{", "not JSON .* at column 2"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON .numbers too long"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"prompt": "q", "tools": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}", "too deep|UTF-8 JSON"),
    ],
)
def test_a_line_that_is_no_json_names_its_place(line, said):
    with pytest.raises(UserError, match=f"f.jsonl:3: .*{said}"):
        parse_prompt(line, "f.jsonl:3", "3")


@pytest.mark.parametrize("fields", [("prompt", "completion"), ("question", "answer"), ("text", "output")])
def test_messages_as_json_text_are_messages_wherever_a_text_may_stand(fields):
    asked, replied = ([user("q")], [answer("a")])
    record = dict(zip(fields, map(json.dumps, (asked, replied)), strict=True))
    assert to_prompt(record, "7") == Prompt.of("7", (user("q"), answer("a")))
    whole = {fields[0]: json.dumps({"messages": asked}), fields[1]: json.dumps(replied)}
    assert to_prompt(whole, "7") == Prompt.of("7", (user("q"), answer("a")))
    assert to_prompt({fields[0]: '[{"price": 3}]'}, "7").messages == (user('[{"price": 3}]'),)


def test_messages_as_python_prints_them_are_named():
    for record in ({"prompt": str([user("q")])}, {"prompt": "q", "completion": str([answer("a")])}):
        with pytest.raises(UserError, match="messages as Python prints them stand where a text belongs"):
            to_prompt(record, "7")


@pytest.mark.parametrize("role", ["function_call", "Function_Call", " FUNCTION_CALL "])
def test_a_call_is_one_however_its_role_is_spelt(role):
    call = {"from": role, "value": '{"name": "f", "arguments": {}}'}
    prompt = to_prompt({"conversations": [{"from": "human", "value": "q"}, call]}, "7", answers="drop")
    assert prompt.messages[1]["tool_calls"][0]["function"]["name"] == "f"


def test_a_null_in_a_schema_is_one_but_in_a_table():
    record = {"prompt": "q", "tools": [TOOL]}
    assert to_prompt(record, "7").tools[0] == TOOL
    assert "default" not in to_prompt(record, "7", columnar=True).tools[0]["function"]["parameters"]["a"]


def test_a_tool_that_is_no_function_is_refused():
    with pytest.raises(UserError, match="a tool of type 'bash_20250124'"):
        to_prompt({"prompt": "q", "tools": [{"type": "bash_20250124", "name": "bash"}]}, "7")
