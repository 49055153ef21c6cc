"""Records in the shapes that people bring, with what they mean."""

import json

ARGUMENTS = {"city": "Ulm"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
NUMBERED = {"id": "c1", **CALL}
CALLED = {"role": "assistant", "content": "", "tool_calls": [NUMBERED]}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "c1"}
SCHEMA = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": SCHEMA}
TEXT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


def user(text="q") -> dict:
    return {"role": "user", "content": text}


def answer(text="a", **more) -> dict:
    return {"role": "assistant", "content": text} | more


def system(text="s") -> dict:
    return {"role": "system", "content": text}


def talk(*messages, **more) -> dict:
    return {"messages": list(messages)} | more


def shared(*turns, **more) -> dict:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]} | more


def parts(*values) -> list:
    return [dict(zip(("type", {"reasoning": "text"}.get(k, k)), (k, v), strict=True)) for k, v in values]


THOUGHT = answer(reasoning_content="why")
# Shape -> record, its messages, and the fields that nothing reads, if any.
_READ = {
    "thinking": (talk(user(), answer(thinking="why")), [user(), THOUGHT]),
    "reasoning": (talk(user(), answer(reasoning="why")), [user(), THOUGHT]),
    "one reasoning, two names": (
        talk(user(), answer(reasoning="why", reasoning_content="why")),
        [user(), THOUGHT],
    ),
    "empty reasoning": (talk(user(), answer(thinking="", reasoning=None)), [user(), answer()]),
    "typed reasoning": (talk(user(), answer(parts(("thinking", "why"), ("text", "a")))), [user(), THOUGHT]),
    "typed reasoning, signed": (
        talk(user(), answer([{"type": "reasoning", "text": "why", "signature": "x"}, *parts(("text", "a"))])),
        [user(), THOUGHT],
        "messages.content.signature",
    ),
    "reasoning before a call": (
        talk(user(), answer(None, tool_calls=[TEXT_CALL], reasoning="why"), RESULT),
        [user(), CALLED | {"reasoning_content": "why"}, RESULT],
    ),
    "reasoning beside an answer": ({"question": "q", "answer": "a", "thinking": "why"}, [user(), THOUGHT]),
    "reasoning of a user": (talk(user() | {"reasoning": "why"}), [user()], "messages.reasoning"),
    "arguments as text": (
        talk(user(), answer(None, tool_calls=[TEXT_CALL]), RESULT),
        [user(), CALLED, RESULT],
    ),
    "arguments as object": (talk(user(), CALLED, RESULT), [user(), CALLED, RESULT]),
    "a call as text": (
        talk(user(), answer(None, tool_calls=json.dumps([TEXT_CALL])), RESULT),
        [user(), CALLED, RESULT],
    ),
    "no arguments": (
        talk(user(), answer("", tool_calls=[{"function": {"name": "now", "arguments": ""}}])),
        [user(), answer("", tool_calls=[{"type": "function", "function": {"name": "now", "arguments": {}}}])],
    ),
    "parallel calls": (
        talk(user(), answer(None, tool_calls=[TEXT_CALL, TEXT_CALL | {"index": 1, "extra": 2}])),
        [user(), answer("", tool_calls=[NUMBERED, NUMBERED])],
        "messages.tool_calls.extra",
    ),
    "a call by itself": (
        talk(user(), answer(None, tool_calls=[{"name": "weather", "arguments": ARGUMENTS}])),
        [user(), answer("", tool_calls=[CALL])],
    ),
    "function_call": (
        talk(
            user(),
            answer(None, function_call={"name": "weather", "arguments": '{"city": "Ulm"}'}),
            {"role": "function", "name": "weather", "content": "rain"},
            functions=[SCHEMA],
        ),
        [user(), answer("", tool_calls=[CALL]), {"role": "tool", "name": "weather", "content": "rain"}],
    ),
    "Anthropic's call": (
        talk(
            user(),
            answer(
                [
                    *parts(("thinking", "why"), ("text", "Let me see.")),
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS},
                ]
            ),
            user([{"type": "tool_result", "tool_use_id": "c1", "content": parts(("text", "rain"))}]),
            system="s",
            tools=[{"name": "weather", "input_schema": SCHEMA["parameters"]}],
        ),
        [system(), user(), answer("Let me see.", reasoning_content="why", tool_calls=[NUMBERED]), RESULT],
    ),
    "a result and a question": (
        talk(
            user(),
            answer([{"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS}]),
            user([{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}, *parts(("text", "so?"))]),
        ),
        [user(), CALLED, RESULT, user("so?")],
    ),
    "LLaMA-Factory's call": (
        shared(
            ("human", "q"),
            ("function_call", '{"name": "weather", "arguments": {"city": "Ulm"}}'),
            ("observation", "rain"),
            system="s",
            tools=json.dumps([SCHEMA]),
        ),
        [system(), user(), answer("", tool_calls=[CALL]), {"role": "tool", "content": "rain"}],
    ),
    "speakers": (
        shared(("System", "s"), ("human", "q"), ("bot", "a"), ("USER", "q"), ("model", "a")),
        [system(), user(), answer(), user(), answer()],
    ),
    "ipython": (
        talk(user(), CALLED, {"role": "ipython", "content": "rain"}),
        [user(), CALLED, {"role": "tool", "content": "rain"}],
    ),
    "developer": (
        talk({"role": "developer", "content": "s"}, user()),
        [{"role": "developer", "content": "s"}, user()],
    ),
    "a system text beside messages": (talk(user(), system="s"), [system(), user()]),
    "two system texts": (talk(system("t"), user(), system="s"), [system("t"), user()], "system"),
    "messages in a text": ({"messages": json.dumps([user(), answer()])}, [user(), answer()]),
    "each message in a text": ({"messages": [json.dumps(user()), json.dumps(answer())]}, [user(), answer()]),
    "conversations in a text": ({"conversations": json.dumps([{"from": "human", "value": "q"}])}, [user()]),
    "one conversation": ({"conversation": [user(), answer()], "turn": 1}, [user(), answer()], "turn"),
    "OpenAI's text parts": (
        talk(user([{"type": "input_text", "text": "q"}]), answer([{"type": "output_text", "text": "a"}])),
        [user(), answer()],
    ),
    "not learned": (
        talk(user(), answer(weight=0), user("r"), answer("b", weight=1)),
        [user(), answer(train=False), user("r"), answer("b")],
    ),
    "train": (
        talk(user() | {"train": False}, answer(train=False), user("r"), answer("b", train=True)),
        [user(), answer(train=False), user("r"), answer("b")],
    ),
    "masked": (
        shared(("human", "q"), ("gpt", "a"), ("human", "r"))
        | {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "masked": True}]},
        [user(), answer(train=False)],
    ),
    "a user's text to be learned": (talk(user() | {"train": True}), [user()], "messages.train"),
    "keys of our own": (
        talk(user() | {"timestamp": 3, "audio": None}, source="web", note=""),
        [user()],
        "messages.timestamp source",
    ),
    "Dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"},
        [user("q\n\nc"), answer()],
    ),
    "SQuAD": (
        {
            "id": "1",
            "title": "t",
            "context": "c",
            "question": "q",
            "answers": {"text": ["a", "b"], "answer_start": [3, 9]},
        },
        [user("c\n\nq"), answer()],
        "title",
    ),
    "SQuAD without an answer": ({"context": "c", "question": "q", "answers": {"text": []}}, [user("c\n\nq")]),
    "several answers": ({"question": "q", "answers": ["a", "b"]}, [user(), answer()]),
    "passages": (
        {"question": "q", "context": {"title": ["t"]}, "answer": "a"},
        [user(), answer()],
        "context",
    ),
    "a prompt with a context": ({"prompt": "q", "context": "c"}, [user()], "context"),
    "Alpaca": (
        {"instruction": "q", "input": "c", "output": "a", "text": "### Instruction: q"},
        [user("q\n\nc"), answer()],
        "text",
    ),
    "history": (
        {"instruction": "r", "input": "", "output": "b", "history": [["q", "a"]], "system": "s"},
        [system(), user(), answer(), user("r"), answer("b")],
    ),
    "input and output": ({"input": "q", "output": "a"}, [user(), answer()]),
    "query": ({"query": "q", "response": "a"}, [user(), answer()]),
    "prompt and completion of messages": (
        {"prompt": [system(), user()], "completion": [answer()]},
        [system(), user(), answer()],
    ),
    "OpenAI's batch": (
        {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": talk(system(), user(), model="m", temperature=0),
        },
        [system(), user()],
        "body.model body.temperature",
    ),
    "OpenAI's responses": (
        {"custom_id": "1", "url": "/v1/responses", "body": {"input": "q", "instructions": "s"}},
        [system(), user()],
    ),
    "Anthropic's batch": ({"custom_id": "1", "params": talk(user(), system="s")}, [system(), user()]),
    "a text called body": ({"prompt": "q", "body": "b"}, [user()], "body"),
    "ultrachat": (
        {"prompt": "q", "prompt_id": "1", "messages": [user(), answer()]},
        [user(), answer()],
        "prompt",
    ),
    "preferences": (
        {"prompt": "q", "chosen": [answer()], "rejected": [answer("b")]},
        [user()],
        "chosen rejected",
    ),
}
READ = {shape: (*entry, "")[:3] for shape, entry in _READ.items()}
