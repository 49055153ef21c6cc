"""Shapes of records that people bring: read as what they mean, or refused by role and key."""

import json

import pytest
from record_shapes import CALL, CALLED, READ, RESULT, TOOL, answer, parts, shared, system, talk, user

from decode.errors import UserError
from distill.prompts.records.forms import to_prompt
from distill.prompts.records.messages import conversation


@pytest.mark.parametrize("shape", READ)
def test_a_shape_is_read_as_what_it_means_and_the_rest_is_named(shape):
    record, messages, rest = READ[shape]
    before = json.dumps(record)
    unread: set[str] = set()
    prompt = to_prompt(record, "1", unread=unread)
    assert list(prompt.messages) == messages
    assert sorted(unread) == rest.split()
    assert json.dumps(record) == before, "the record was changed"
    assert to_prompt(talk(*messages), "1").messages == prompt.messages, (
        "what is read is not read again as it is"
    )


@pytest.mark.parametrize("shape", ["Anthropic's call", "LLaMA-Factory's call", "function_call"])
def test_tools_are_schemas_of_one_form(shape):
    assert list(to_prompt(READ[shape][0], "1").tools) == [TOOL]


@pytest.mark.parametrize(
    "shape", ["Anthropic's call", "LLaMA-Factory's call", "function_call", "parallel calls"]
)
def test_answers_that_call_tools_are_kept_where_others_are_dropped(shape):
    assert to_prompt(READ[shape][0], "1", "drop").messages == to_prompt(READ[shape][0], "1").messages


def test_nulls_of_tables_are_no_arguments():
    filled = {"city": "Ulm", "days": None, "place": {"lat": 1, "lon": None}}
    called = answer("", tool_calls=[{"type": "function", "function": {"name": "w", "arguments": filled}}])
    (call,) = to_prompt(talk(user(), called), "1", columnar=True).messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Ulm", "place": {"lat": 1}}
    for given in (filled, json.dumps(filled)):
        called["tool_calls"][0]["function"]["arguments"] = given
        (call,) = to_prompt(talk(user(), called), "1", columnar=given is not filled).messages[1]["tool_calls"]
        assert call["function"]["arguments"] == filled, "a null that somebody wrote is gone"


REFUSED = {
    "robot": (
        talk(user(), {"role": "robot", "content": "a"}),
        r"message 2: 'robot' is no role; roles are system",
    ),
    "critic": (shared(("human", "q"), ("critic", "a")), "message 2: 'critic' is no role"),
    "no role": (talk(user(), {"content": "a", "who": 1}), "message 2: it has no role"),
    "picture": (
        talk(user([{"type": "image_url", "image_url": {"url": "x"}}])),
        r"message 1 \(user\): 'content' has a part of type 'image_url'",
    ),
    "texts for parts": (talk(user(["q"])), "a part of 'content' is str; it has to be an object with type"),
    "sound": (talk(user([{"type": "input_audio", "input_audio": {}}])), "part of type 'input_audio'"),
    "hidden reasoning": (
        talk(user(), answer([{"type": "redacted_thinking", "data": "x"}])),
        r"message 2 \(assistant\): .*'redacted_thinking'",
    ),
    "a user's reasoning": (talk(user(parts(("thinking", "why")))), r"\(user\): .*'thinking'"),
    "reasoning behind text": (
        talk(user(), answer(parts(("text", "a"), ("thinking", "why")))),
        "'thinking' part stands behind",
    ),
    "text behind a call": (
        talk(user(), answer([{"type": "tool_use", "name": "w", "input": {}}, *parts(("text", "a"))])),
        "behind a 'tool_use'",
    ),
    "a result behind text": (
        talk(user([*parts(("text", "q")), {"type": "tool_result", "content": "x"}])),
        "'tool_result' part stands behind text",
    ),
    "a result that is a picture": (
        talk(user([{"type": "tool_result", "content": [{"type": "image", "source": {}}]}])),
        "part of type 'image'",
    ),
    "two reasonings": (
        talk(user(), answer(thinking="why", reasoning="because")),
        "two different texts of reasoning, in 'thinking' and 'reasoning'",
    ),
    "reasoning that is none": (talk(user(), answer(thinking=True)), "'thinking' must be a text"),
    "two kinds of calls": (
        talk(user(), CALLED | {"function_call": CALL["function"]}),
        "'tool_calls', 'function_call'",
    ),
    "a user's call": (talk(user() | {"tool_calls": [CALL]}), r"message 1 \(user\): 'tool_calls' of the user"),
    "a call of another type": (
        talk(user(), answer("", tool_calls=[{"type": "custom", "custom": {}}])),
        "call of type 'custom'",
    ),
    "arguments that are no object": (
        talk(user(), answer("", tool_calls=[{"function": {"name": "w", "arguments": "[1]"}}])),
        r"\(assistant\): 'arguments' of a call of w",
    ),
    "arguments that break off": (
        talk(user(), answer("", tool_calls=[{"function": {"name": "w", "arguments": '{"a": '}}])),
        "'arguments' of a call of w",
    ),
    "half a weight": (
        talk(user(), answer(weight=0.5)),
        r"\(assistant\): 'weight' of a message must be 0 or 1",
    ),
    "a contradiction": (talk(user(), answer(weight=1, masked=True)), "'weight' and 'masked' contradict"),
    "an answer that is a number": ({"question": "q", "answer": 42}, "'answer' must be a text"),
    "a refusal": (
        talk(user(), answer(None, refusal="no")),
        r"message 2 \(assistant\): it needs a text in 'content', and has null; its keys .* refusal",
    ),
    "an object of a tool": (
        talk(user(), CALLED, RESULT | {"content": {"rain": 1}}),
        r"message 3 \(tool\): it needs a text in 'content', and has dict",
    ),
    "embeddings": (
        {"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "q"}},
        "'url' is /v1/embeddings",
    ),
    "OpenAI's preferences": (
        {"input": talk(user()), "preferred_output": [answer()]},
        "content",
    ),
    "no field that asks": (
        {"title": "t", "passage": "p"},
        r"it has title, passage; prompts\.columns=\{prompt: \.\.\.\}",
    ),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_cannot_be_read_is_refused_by_role_and_key(shape):
    record, said = REFUSED[shape]
    with pytest.raises(UserError, match=said) as caught:
        to_prompt(record, "1")
    assert "\n" not in str(caught.value)


def test_a_column_may_be_a_path():
    record = {"input": talk(user(), answer()), "meta": {"id": 7, "lang": "de"}}
    unread: set[str] = set()
    prompt = to_prompt(record, "1", columns={"messages": "input.messages", "id": "meta.id"}, unread=unread)
    assert (prompt.id, list(prompt.messages)) == ("7", [user(), answer()])
    assert unread == {"meta.lang"}
    with pytest.raises(UserError, match=r"no column 'input\.talk'"):
        to_prompt(record, "1", columns={"messages": "input.talk"})


def test_columns_name_what_they_hide():
    unread: set[str] = set()
    columns = {"prompt": "q", "answer": "gold"}
    to_prompt(
        {"q": "q", "gold": "a", "answer": "b", "context": "c", "n": 1}, "1", columns=columns, unread=unread
    )
    assert unread == {"answer", "context", "n"}
    unread.clear()
    to_prompt({"q": "q", "r": "r"}, "1", columns={"prompt": "q", "question": "r"}, unread=unread)
    assert unread == {"r"}, "a column of another form was not used"


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("q", [user()]),
        (user(), [user()]),
        ([user(parts(("text", "q")))], [user()]),
        ((user(), answer(), user("r")), [user(), answer(), user("r")]),
        ([{"from": "human", "value": "q"}], [user()]),
    ],
)
def test_the_public_face_reads_what_files_may_have(prompt, messages):
    assert list(conversation(prompt)) == messages


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "needs a text"),
        (b"q", "give a text, or messages with role and content, not bytes"),
        (3, "not int"),
        (None, "not null"),
        ([], "nothing to answer"),
        ([None], "message 1: expected an object"),
        ([user(), "q"], "message 2: expected an object with role and content, got str"),
        ([user([{"type": "image_url"}])], "image_url"),
        ([system()], "nothing to answer"),
        ([user(), answer()], "nothing to answer; the last message has to be a user's"),
        ([user() | {"colour": "red"}], r"nothing reads messages\.colour"),
    ],
)
def test_the_public_face_refuses_what_is_no_conversation(prompt, said):
    with pytest.raises(UserError, match=said) as caught:
        conversation(prompt)
    assert "\n" not in str(caught.value)
