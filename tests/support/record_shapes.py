"""Records in the shapes that people bring, with what they mean."""

import json
from copy import deepcopy

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


PAIR, ASKED, RAIN = [user(), answer()], [user(), CALLED, RESULT], {"role": "tool", "content": "rain"}
THOUGHT = [user(), answer(reasoning_content="why")]
CALLING = answer("", tool_calls=[CALL])
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGUMENTS}
SIGNED = {"type": "reasoning", "text": "why", "signature": "x"}
FUNCTION_CALL = {"name": "weather", "arguments": '{"city": "Ulm"}'}
NAMED = {"role": "function", "name": "weather", "content": "rain"}
NOW, NO_ARGUMENTS = ({"name": "now", "arguments": empty} for empty in ("", {}))
SQUAD = {"context": "c", "question": "q"}
BATCHED = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
MASKED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "masked": True}]


def result(content, **more) -> dict:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content} | more


# Shape -> record, its messages, and the fields that nothing reads, if any.
_READ = {
    "thinking": (talk(user(), answer(thinking="why")), THOUGHT),
    "reasoning": (talk(user(), answer(reasoning="why")), THOUGHT),
    "one reasoning, two names": (talk(user(), answer(reasoning="why", reasoning_content="why")), THOUGHT),
    "empty reasoning": (talk(user(), answer(thinking="", reasoning=None)), PAIR),
    "typed reasoning": (talk(user(), answer(parts(("thinking", "why"), ("text", "a")))), THOUGHT),
    "typed reasoning, signed": (
        talk(user(), answer([SIGNED, *parts(("text", "a"))])),
        THOUGHT,
        "messages.content.signature",
    ),
    "reasoning before a call": (
        talk(user(), answer(None, tool_calls=[TEXT_CALL], reasoning="why"), RESULT),
        [user(), CALLED | {"reasoning_content": "why"}, RESULT],
    ),
    "reasoning beside an answer": ({"question": "q", "answer": "a", "thinking": "why"}, THOUGHT),
    "reasoning of a user": (talk(user() | {"reasoning": "why"}), [user()], "messages.reasoning"),
    "arguments as text": (talk(user(), answer(None, tool_calls=[TEXT_CALL]), RESULT), ASKED),
    "arguments as object": (talk(*ASKED), ASKED),
    "a call as text": (talk(user(), answer(None, tool_calls=json.dumps([TEXT_CALL])), RESULT), ASKED),
    "no arguments": (
        talk(user(), answer("", tool_calls=[{"function": NOW}])),
        [user(), answer("", tool_calls=[{"type": "function", "function": NO_ARGUMENTS}])],
    ),
    "parallel calls": (
        talk(user(), answer(None, tool_calls=[TEXT_CALL, TEXT_CALL | {"index": 1, "extra": 2}])),
        [user(), answer("", tool_calls=[NUMBERED, NUMBERED])],
        "messages.tool_calls.extra",
    ),
    "a call by itself": (
        talk(user(), answer(None, tool_calls=[{"name": "weather", "arguments": ARGUMENTS}])),
        [user(), CALLING],
    ),
    "function_call": (
        talk(user(), answer(None, function_call=FUNCTION_CALL), NAMED, functions=[SCHEMA]),
        [user(), CALLING, RAIN | {"name": "weather"}],
    ),
    "Anthropic's call": (
        talk(
            user(),
            answer([*parts(("thinking", "why"), ("text", "Let me see.")), USE]),
            user([result(parts(("text", "rain")))]),
            system="s",
            tools=[{"name": "weather", "input_schema": SCHEMA["parameters"]}],
        ),
        [system(), user(), answer("Let me see.", reasoning_content="why", tool_calls=[NUMBERED]), RESULT],
    ),
    "a result and a question": (
        talk(user(), answer([USE]), user([result("rain"), *parts(("text", "so?"))])),
        [*ASKED, user("so?")],
    ),
    "LLaMA-Factory's call": (
        shared(
            *(("human", "q"), ("function_call", json.dumps(CALL["function"])), ("observation", "rain")),
            system="s",
            tools=json.dumps([SCHEMA]),
        ),
        [system(), user(), CALLING, RAIN],
    ),
    "speakers": (
        shared(("System", "s"), ("human", "q"), ("bot", "a"), ("USER", "q"), ("model", "a")),
        [system(), *PAIR, *PAIR],
    ),
    "ipython": (talk(user(), CALLED, RAIN | {"role": "ipython"}), [user(), CALLED, RAIN]),
    "developer": (talk(system() | {"role": "developer"}, user()), [system() | {"role": "developer"}, user()]),
    "a system text beside messages": (talk(user(), system="s"), [system(), user()]),
    "two system texts": (talk(system("t"), user(), system="s"), [system("t"), user()], "system"),
    "messages in a text": ({"messages": json.dumps(PAIR)}, PAIR),
    "each message in a text": ({"messages": [json.dumps(message) for message in PAIR]}, PAIR),
    "conversations in a text": ({"conversations": json.dumps(MASKED[:1])}, [user()]),
    "one conversation": ({"conversation": PAIR, "turn": 1}, PAIR, "turn"),
    "OpenAI's text parts": (
        talk(user([{"type": "input_text", "text": "q"}]), answer([{"type": "output_text", "text": "a"}])),
        PAIR,
    ),
    "not learned": (
        talk(user(), answer(weight=0), user("r"), answer("b", weight=1)),
        [user(), answer(train=False), user("r"), answer("b")],
    ),
    "train": (
        talk(user() | {"train": False}, answer(train=False), user("r"), answer("b", train=True)),
        [user(), answer(train=False), user("r"), answer("b")],
    ),
    "masked": ({"conversations": MASKED}, [user(), answer(train=False)]),
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
        SQUAD | {"id": "1", "title": "t", "answers": {"text": ["a", "b"], "answer_start": [3, 9]}},
        [user("c\n\nq"), answer()],
        "title",
    ),
    "SQuAD without an answer": (SQUAD | {"answers": {"text": []}}, [user("c\n\nq")]),
    "several answers": ({"question": "q", "answers": ["a", "b"]}, PAIR),
    "passages": ({"question": "q", "context": {"title": ["t"]}, "answer": "a"}, PAIR, "context"),
    "a prompt with a context": ({"prompt": "q", "context": "c"}, [user()], "context"),
    "Alpaca": (
        {"instruction": "q", "input": "c", "output": "a", "text": "### Instruction: q"},
        [user("q\n\nc"), answer()],
        "text",
    ),
    "history": (
        {"instruction": "r", "input": "", "output": "b", "history": [["q", "a"]], "system": "s"},
        [system(), *PAIR, user("r"), answer("b")],
    ),
    "input and output": ({"input": "q", "output": "a"}, PAIR),
    "query": ({"query": "q", "response": "a"}, PAIR),
    "prompt and completion of messages": (
        {"prompt": [system(), user()], "completion": [answer()]},
        [system(), *PAIR],
    ),
    "OpenAI's batch": (
        BATCHED | {"body": talk(system(), user(), model="m", temperature=0)},
        [system(), user()],
        "body.model body.temperature",
    ),
    "OpenAI's responses": (
        {"custom_id": "1", "url": "/v1/responses", "body": {"input": "q", "instructions": "s"}},
        [system(), user()],
    ),
    "Anthropic's batch": ({"custom_id": "1", "params": talk(user(), system="s")}, [system(), user()]),
    "a text called body": ({"prompt": "q", "body": "b"}, [user()], "body"),
    "ultrachat": ({"prompt": "q", "prompt_id": "1", "messages": PAIR}, PAIR, "prompt"),
    "preferences": (
        {"prompt": "q", "chosen": [answer()], "rejected": [answer("b")]},
        [user()],
        "chosen rejected",
    ),
}
READ = {shape: (deepcopy(record), *rest, "")[:3] for shape, (record, *rest) in _READ.items()}
