"""Records in the shapes that people bring are read as what they mean, or refused by role and key."""

import json
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from chats import tokenizer_of
from record_shapes import CALL, CALLED, READ, RESULT, TOOL, answer, parts, shared, system, talk, user

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt, opening
from distill.prompts.records.fields import parse_json
from distill.prompts.records.forms import parse_prompt, to_prompt
from distill.prompts.records.messages import conversation
from distill.prompts.sources import Source

SHAPES = READ | {
    "turns": ({"turns": ["q", "r"]}, [user(), user("r")], ""),
    "question before text": ({"question": "q", "answer": "a", "text": "t"}, [user(), answer()], "text"),
    "text": ({"text": "q", "system_prompt": "s"}, [system(), user()], ""),
    "name": (talk(user() | {"name": "Jo"}), [user() | {"name": "Jo"}], ""),
    "both names of speakers": (
        {"conversations": [{"from": "user", "value": "q"}, answer()], "system": "s"},
        [system(), user(), answer()],
        "",
    ),
    **{
        f"messages as text in {asked}": (
            {asked: json.dumps([user()]), given: json.dumps([answer()])},
            [user(), answer()],
            "",
        )
        for asked, given in (("prompt", "completion"), ("question", "answer"), ("text", "output"))
    },
    "a conversation as text": ({"prompt": json.dumps(talk(user()))}, [user()], ""),
    "a list that is no conversation": ({"text": '[{"price": 3}]'}, [user('[{"price": 3}]')], ""),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_read_and_unread_fields_are_named(shape):
    record, messages, rest = SHAPES[shape]
    before = json.dumps(record)
    unread: set[str] = set()
    prompt = to_prompt(record, "7", unread=unread)
    assert list(prompt.messages) == messages
    assert sorted(unread) == rest.split()
    assert json.dumps(record) == before, "the record was changed"
    assert to_prompt(talk(*messages), "1").messages == prompt.messages, "the result is read differently"
    calls = prompt.tools or any("tool_calls" in m for m in messages)
    kept = [m for m in messages if calls or m["role"] != "assistant"]
    assert list(to_prompt(record, "7", "drop").messages) == kept


def test_tools_have_one_form():
    for shape in ("Anthropic's call", "LLaMA-Factory's call", "function_call"):
        assert list(to_prompt(READ[shape][0], "1").tools) == [TOOL]


def test_other_fields():
    prompt = to_prompt({"turns": ["q"], "question_id": 81, "category": "writing", "reward": 0.5}, "1")
    assert (prompt.id, prompt.category, prompt.weight) == ("81", "writing", 0.5)
    other = to_prompt({"prompt": "q", "task_id": "HumanEval/0", "weight": 0}, "1")
    assert (other.id, other.weight) == ("HumanEval/0", 0.0)
    nulls = {"prompt": "q", "id": None, "weight": None, "category": None}
    assert to_prompt(nulls, "1") == Prompt.of("1", (user(),))


def test_result_of_a_call_is_what_is_answered():
    record = talk(user(), CALLED, RESULT)
    assert opening(to_prompt(record, "1", "drop").messages) == (user(), CALLED, RESULT)


def test_nulls_are_dropped_in_rows_of_tables_only():
    filled = {"city": "Ulm", "days": None, "place": {"lat": 1, "lon": None}}
    short = {"city": "Ulm", "place": {"lat": 1}}
    text = json.dumps(filled)  # in which somebody wrote the null
    for arguments, columnar, read in ((filled, True, short), (filled, False, filled), (text, True, filled)):
        called = answer("", tool_calls=[{"function": {"name": "w", "arguments": arguments}}])
        (call,) = to_prompt(talk(user(), called), "1", columnar=columnar).messages[1]["tool_calls"]
        assert call["function"]["arguments"] == read
    tool = {"type": "function", "function": {"name": "w", "parameters": {"a": {"default": None}}}}
    record = {"prompt": "q", "tools": [tool]}
    assert to_prompt(record, "7").tools[0] == tool
    assert to_prompt(record, "7", columnar=True).tools[0]["function"]["parameters"] == {"a": {}}


def test_role_of_a_call_in_any_spelling():
    record = shared(("human", "q"), (" FUNCTION_Call ", '{"name": "f", "arguments": {}}'))
    (call,) = to_prompt(record, "7", answers="drop").messages[1]["tool_calls"]
    assert call["function"]["name"] == "f"


def said(*content, **more) -> dict:
    """A conversation whose last message is this answer."""
    return talk(user(), answer(*content, **more))


def calling(**function) -> dict:
    return said("", tool_calls=[{"function": {"name": "w"} | function}])


def typed(kind: str, **more) -> dict:
    return {"type": kind} | more


TEXT, NOT_FINITE = parts(("text", "a")), "finite number"
REFUSED = {
    "a list": (["q"], "expected an object, got list"),
    "no messages": ({"messages": []}, "needs a non-empty list 'messages'"),
    "messages that are a text": ({"messages": "hello"}, "needs a non-empty list 'messages'"),
    "no form": ({"title": "t", "passage": "p"}, r"it has title, passage; prompts\.columns"),
    "messages of texts": (talk("hi"), "role"),
    "robot": (talk(user(), {"role": "robot", "content": "a"}), "message 2: 'robot' is no role"),
    "no role": (talk(user(), {"content": "a", "who": 1}), "message 2: it has no role"),
    "a speaker that is a list": (shared((["human"], "q")), "role"),
    "an empty message": (talk(user("")), "content"),
    "a message that is a number": (talk(user(3)), "content"),
    "half a surrogate": (talk(user("\ud800")), "content"),
    "empty prompt": ({"prompt": ""}, "content"),
    "null without a call": (said(None), "content"),
    "an answer that is a number": ({"question": "q", "answer": 42}, "'answer' must be a text"),
    "an empty answer": (shared(("human", "q"), ("gpt", "")), "content"),
    "an input that is a list": ({"instruction": "q", "input": ["x"]}, "'instruction' and 'input'"),
    "a name that is none": (talk(user() | {"name": 3}), "'name' must be a text"),
    "only a system text": (talk(system()), "nothing to answer"),
    "only an answer": (talk(answer()), "only the assistant speaks in it"),
    "refusal": (said(None, refusal="no"), r"2 \(assistant\): .* has null; .* refusal"),
    "a result that is an object": (
        talk(user(), CALLED, RESULT | {"content": {"rain": 1}}),
        r"message 3 \(tool\): it needs a text in 'content', and has dict",
    ),
    "picture": (talk(user([typed("image_url", image_url={"url": "x"})])), r"1 \(user\): .*'image_url'"),
    "texts for parts": (talk(user(["q"])), "a part of 'content' is str"),
    "a user's reasoning": (talk(user(parts(("thinking", "why")))), r"\(user\): .*'thinking'"),
    "reasoning after text": (
        talk(user(), answer([*TEXT, *parts(("thinking", "why"))])),
        "'thinking' part follows text",
    ),
    "text after a call": (said([typed("tool_use", name="w", input={}), *TEXT]), "follows a 'tool_use'"),
    "a result after text": (
        talk(user([*TEXT, typed("tool_result", content="x")])),
        "'tool_result' part follows text",
    ),
    "a result that is a picture": (
        talk(user([typed("tool_result", content=[typed("image", source={})])])),
        "part of type 'image'",
    ),
    "two reasonings": (said(thinking="x", reasoning="y"), "'thinking' and 'reasoning'"),
    "reasoning that is none": (said(thinking=True), "'thinking' must be a text"),
    "two kinds of calls": (
        talk(user(), CALLED | {"function_call": CALL["function"]}),
        "'tool_calls', 'function_call'",
    ),
    "calls that are a text": (said(tool_calls="add"), "tool_calls"),
    "a user's call": (talk(user() | {"tool_calls": [CALL]}), r"1 \(user\): 'tool_calls' of the user"),
    "a call of another type": (said("", tool_calls=[typed("custom")]), "type 'custom'"),
    "arguments that are no object": (calling(arguments="[1]"), r"\(assistant\): 'arguments' of a call of w"),
    "arguments that break off": (calling(arguments='{"a": '), "'arguments' of a call of w"),
    "half a weight": (said(weight=0.5), "'weight' of a message must be 0 or 1"),
    "a contradiction": (said(weight=1, masked=True), "'weight' and 'masked' contradict"),
    "embeddings": ({"url": "/v1/embeddings", "body": {"input": "q"}}, "'url' is /v1/embeddings"),
    "OpenAI's preferences": ({"input": talk(user()), "preferred_output": [answer()]}, "content"),
    "printed prompt": ({"prompt": str([user()])}, "messages in Python's notation"),
    "printed answer": ({"prompt": "q", "completion": str([answer()])}, "messages in Python's notation"),
    "NaN": ({"prompt": "q", "weight": float("nan")}, NOT_FINITE),
    "beyond a float": ({"prompt": "q", "weight": 10**400}, NOT_FINITE),
    "negative": ({"prompt": "q", "reward": -0.1}, "'reward' must be a finite number"),
    "a weight that is a text": ({"prompt": "q", "weight": "1"}, NOT_FINITE),
    "an id that is a list": ({"prompt": "q", "id": [1]}, "'id' must be a text"),
    "a category that is an object": ({"prompt": "q", "category": {}}, "'category' must be"),
    "half a surrogate in an id": ({"prompt": "q", "id": "\ud800"}, "UTF-8"),
    "half a surrogate in a tool": ({"prompt": "q", "tools": [{"name": "\udfff"}]}, "UTF-8"),
    "a date in a tool": ({"prompt": "q", "tools": [{"when": object()}]}, "UTF-8 JSON"),
    "tools that are a text": ({"prompt": "q", "tools": "add"}, "'tools' must be a list"),
    "a tool of another type": ({"prompt": "q", "tools": [typed("bash_2025", name="b")]}, "'bash_2025'"),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_unreadable_record_is_refused_by_role_and_key(shape):
    record, said = REFUSED[shape]
    with pytest.raises(UserError, match=said) as caught:
        to_prompt(record, "1")
    assert "\n" not in str(caught.value)


CHAT = Chat(tokenizer_of("chatml"))  # writes calls and tools
GOOD = b'{"prompt": "fine"}'
BROKEN = [
    *(json.dumps(r).encode() for n, (r, _) in REFUSED.items() if n != "a date in a tool"),
    b"\xff",
    b"[" * 900,
]


def check_file(path: Path, line: bytes, broken: bool) -> None:
    """A line between two good ones is a prompt that can be encoded, or it is set aside in one line."""
    path.write_bytes(b"\n".join([GOOD, line, GOOD]))
    source = Source(path=str(path))
    reading = source.read(strict=False)
    assert reading.records == 3
    assert [r.line for r in reading.rejected] in ([[2]] if broken else [[2], []])
    for rejected in reading.rejected:
        assert re.fullmatch(rf"{path}:2: .+", str(rejected))
        assert json.dumps(rejected)
        with pytest.raises(UserError) as caught:
            source.read(strict=True)
        assert str(caught.value) == str(rejected)
    for prompt in reading.prompts:
        assert CHAT.encode(opening(prompt.messages))
        assert pa.array([prompt.id, prompt.category], pa.string())
        assert prompt.weight >= 0
    path.write_bytes(b"[" + b",\n".join([GOOD, line, GOOD]) + b"]")
    reading = source.read(strict=False)
    assert reading.prompts[0].messages == (user("fine"),)
    assert all(2 <= r.line <= 3 and r.reason for r in reading.rejected)


def test_malformed_line_is_set_aside(tmp_path):
    for line in BROKEN:
        check_file(tmp_path / "p.jsonl", line, True)


@pytest.mark.proof
def test_every_line_is_a_prompt_or_is_set_aside(tmp_path):
    draw, records = random.Random(1), [record for record, _, _ in READ.values()]
    for _ in range(1000):
        record = mutated(draw, mutated(draw, draw.choice(records)))
        check_file(tmp_path / "p.jsonl", json.dumps(record).encode(), False)
        check_file(tmp_path / "p.jsonl", draw.randbytes(20).replace(b"\n", b"?") + b"\xff", True)


def test_dropped_answer_may_be_malformed():
    assert to_prompt(REFUSED["an empty answer"][0], "1", "drop").messages == (user(),)


@pytest.fixture
def recursion_limit():
    """Python's own; other libraries raise it in a process that has used them."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


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
def test_line_that_is_not_json_names_its_place(line, said, recursion_limit):
    with pytest.raises(UserError, match=f"f.jsonl:3: .*{said}"):
        parse_prompt(line, "f.jsonl:3", "3")


@pytest.mark.parametrize(
    ("record", "columns", "messages", "rest"),
    [
        ({"prompt": "q", "key": "k"}, {"id": "key"}, [user()], ""),
        (
            {"messages": "no", "query": "q", "gold": "a", "uuid": 5},
            {"prompt": "query", "answer": "gold", "id": "uuid"},
            [user(), answer()],
            "messages",
        ),
        (
            {"q": "q", "gold": "a", "answer": "b", "context": "c", "n": 1},
            {"prompt": "q", "answer": "gold"},
            [user(), answer()],
            "answer context n",
        ),
        ({"q": "q", "r": "r"}, {"prompt": "q", "question": "r"}, [user()], "r"),
        (
            {"input": talk(user(), answer()), "meta": {"id": 7, "lang": "de"}},
            {"messages": "input.messages", "id": "meta.id"},
            [user(), answer()],
            "meta.lang",
        ),
    ],
)
def test_columns_rename_fields_and_name_what_they_hide(record, columns, messages, rest):
    unread: set[str] = set()
    prompt = to_prompt(record, "1", columns=columns, unread=unread)
    assert list(prompt.messages) == messages
    assert prompt.id == {"key": "k", "uuid": "5", "meta.id": "7"}.get(columns.get("id"), "1")
    assert sorted(unread) == rest.split()


def test_column_that_is_missing_is_refused():
    for column in ("quest", "input.talk"):
        with pytest.raises(UserError, match=f"no column '{column}'; it has input, query"):
            to_prompt({"input": {}, "query": "q"}, "1", columns={"prompt": column})


def test_conversation_is_read_as_in_files():
    for prompt in ("q", user(), [user(parts(("text", "q")))], [{"from": "human", "value": "q"}]):
        assert list(conversation(prompt)) == [user()]
    assert list(conversation((user(), answer(), user("r")))) == [user(), answer(), user("r")]
    for prompt, said in (
        ("", "needs a text"),
        (b"q", "give a text, or messages with role and content, not bytes"),
        (None, "not null"),
        ([], "nothing to answer"),
        ([user(), "q"], "message 2: expected an object with role and content, got str"),
        ([user([{"type": "image_url"}])], "image_url"),
        ([user(), answer()], "nothing to answer; the last message has to be a user's"),
        ([user() | {"colour": "red"}], r"nothing reads messages\.colour"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            conversation(prompt)
        assert "\n" not in str(caught.value)


# -- random changes ---------------------------------------------------------------------------------

NAMES = ("thinking", "reasoning", "name", "weight", "train", "extra", "tool_calls", "role", "content")
NAMES += ("value",)
VALUES = ("zebra", "", None, 0, 1, 3.5, True, [], {}, [{}], ["okapi"], {"a": None}, {"b": "gnu"}, "\ud800")
KINDS = ("type", "role", "from", "url", "method")  # fields that say how to read others


def mutated(draw: random.Random, record: dict) -> dict:
    """A record with a field of itself, or of one of its messages, added, dropped, renamed or changed."""
    record = json.loads(json.dumps(record))
    places = [record, *(m for v in record.values() if isinstance(v, list) for m in v if isinstance(m, dict))]
    place = draw.choice(places)
    key = draw.choice([*place]) if place else "prompt"
    kind = draw.choice(("add", "drop", "rename", "change"))
    value = place.pop(key, None) if kind in ("drop", "rename") else draw.choice(VALUES)
    if kind != "drop":
        place[key if kind == "change" else draw.choice(NAMES)] = value
    return record


def leaves(value, path: str = ""):
    """Texts of a value, each with its path, JSON in texts included."""
    value = parse_json(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path)
    elif isinstance(value, str) and value.strip() and path.rpartition(".")[2] not in KINDS:
        yield path, value


def test_texts_of_changed_records_are_read_or_named():
    draw, refused, named = random.Random(0), 0, 0
    for _ in range(1000):
        record, unread = mutated(draw, draw.choice([record for record, _, _ in READ.values()])), set()
        try:
            prompt = to_prompt(record, "1", unread=unread)
        except UserError as error:
            refused += "\n" not in str(error)
            continue
        named += bool(unread)
        said = "\n".join(
            text for _, text in leaves([*prompt.messages, *prompt.tools, prompt.id, prompt.category])
        )
        gone = {name.rpartition(".")[2] for name in unread} | {"answers"}
        for path, text in leaves(record):
            assert text in said or gone & set(path.split(".")), (path, text, record)
        if record.get("extra"):
            assert "extra" in unread
    assert refused > 50
    assert named > 50
