"""One record of a file or data set, in whichever form it comes, as a Prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from distill.prompts.prompt import Message, Prompt, turns, unanswered

ROLES = ("system", "user", "assistant", "tool")
# Who speaks in ShareGPT's files.
SPEAKERS = {"human": "user", "gpt": "assistant"} | dict.fromkeys(("chatgpt", "bing", "bard"), "assistant")
# What chat templates read of a message besides its role and content.
EXTRAS = ("name", "tool_call_id", "reasoning_content")

# A record is of the first of these forms whose key it has.
FORMS = ("messages", "turns", "conversations", "instruction", "prompt", "question", "text")
ANSWERS = ("answer", "response", "output", "completion")
SYSTEMS = ("system", "system_prompt")
CONTENT = (*FORMS, *ANSWERS, *SYSTEMS, "input")
IDS = ("id", "question_id", "task_id", "prompt_id")
WEIGHTS = ("weight", "reward")
FIELDS = (*CONTENT, *IDS, *WEIGHTS, "category", "tools")  # all that is read


def parse_prompt(line: bytes, where: str, default_id: str) -> Prompt:
    """Read one line of JSON; `where` begins what is said of a malformed one.

    Raises:
        UserError: what is wrong with it.
    """
    try:
        return to_prompt(parse(line), default_id)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parse(line: bytes) -> Any:
    """A line of JSON.

    Raises:
        UserError: it is none.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):  # a number of 5,000 digits, brackets 10,000 deep
        raise UserError("not JSON (numbers too long, or nested too deep)") from None


def to_prompt(
    record: Any, default_id: str, answers: str = "keep", columns: Mapping[str, str] | None = None
) -> Prompt:
    """Read one record.

    Args:
        record: what was read; FIELDS of it are looked at.
        default_id: where it has no id.
        answers: `keep` the answers that it gives, or `drop` them where no tools are called, so that
            the target writes its own.
        columns: field -> what it is called in the record. Where one of them says what is asked,
            nothing else of the record does.

    Raises:
        UserError: what is wrong with it.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object, got {type(record).__name__}")
    record = _renamed(record, columns or {})
    tools = _tools(record.get("tools"))
    given = _conversation(record)
    calls = any(isinstance(m, dict) and (m.get("role") == "tool" or m.get("tool_calls")) for m in given)
    if answers == "drop" and not tools and not calls:
        given = [m for m in given if not (isinstance(m, dict) and m.get("role") == "assistant")]
    messages = tuple(_message(m) for m in given)
    if not turns(unanswered(messages)):
        alone = messages and all(m["role"] == "assistant" for m in messages)
        why = "only the assistant speaks in it" if alone else "no user's or tool's message stands last"
        raise UserError(f"{why}; there is nothing to answer")
    prompt = Prompt(
        _word(record, IDS) or default_id, messages, _word(record, ("category",)), _weight(record), tools
    )
    _check_text(prompt)
    return prompt


def _renamed(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    for theirs in columns.values():
        if theirs not in record:
            raise UserError(f"no column {theirs!r}; it has {', '.join(map(str, record)) or 'none'}")
    ruled = any(ours in FORMS for ours in columns)
    rest = {k: v for k, v in record.items() if not (ruled and k in CONTENT)}
    return rest | {ours: record[theirs] for ours, theirs in columns.items()}


def _conversation(record: dict[str, Any]) -> Sequence[Any]:
    """A record of any form as messages that nobody has checked."""
    form = next((name for name in FORMS if record.get(name) is not None), "messages")
    asked = record.get(form)
    if form in FORMS[:3]:
        if not isinstance(asked, list) or not asked:
            raise UserError(
                "needs a non-empty list 'messages' (or 'turns', 'conversations'), or a text "
                "'instruction', 'prompt', 'question' or 'text'"
            )
        messages: list[Any] = {"messages": list, "turns": _asked, "conversations": _spoken}[form](asked)
    else:
        more = record.get("input") if form == "instruction" else None
        messages = _asked([_joined(asked, more) if more else asked])
        answer = next((record[name] for name in ANSWERS if record.get(name) not in (None, "")), None)
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    system = next((record[name] for name in SYSTEMS if record.get(name) not in (None, "")), None)
    if form != "messages" and system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _asked(texts: Sequence[Any]) -> list[Any]:
    return [{"role": "user", "content": text} for text in texts]


def _spoken(turns: Sequence[Any]) -> list[Any]:
    """ShareGPT's turns; some data sets of that name have OpenAI's keys in them."""
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and "from" in turn:
            who = turn["from"]
            role = SPEAKERS.get(who, who) if isinstance(who, str) else None
            turn = {"role": role, "content": turn.get("value")}
        messages.append(turn)
    return messages


def _joined(instruction: Any, more: Any) -> str:
    if not isinstance(instruction, str) or not isinstance(more, str):
        raise UserError("'instruction' and 'input' must be texts")
    return f"{instruction}\n\n{more}"


def _message(value: Any) -> Message:
    fine = isinstance(value, dict) and value.get("role") in ROLES
    calls = _calls(value.get("tool_calls")) if fine else []
    content = _content(value.get("content")) if fine else None
    if content is None and calls:
        content = ""  # null, as OpenAI has it; templates differ in what they make of null
    if not fine or not _is_text(content, empty=bool(calls)):
        raise UserError(f"each message needs a role of {', '.join(ROLES)} and a text 'content'")
    message: Message = {"role": value["role"], "content": content}
    for name in EXTRAS:
        if value.get(name) not in (None, ""):
            if not _is_text(value[name]):
                raise UserError(f"a message's {name!r} must be a text")
            message[name] = value[name]
    return message | ({"tool_calls": calls} if calls else {})


def _content(value: Any) -> Any:
    """Content in parts is one text, where text is all there is."""
    texts = isinstance(value, list) and value and all(isinstance(p, dict) and "text" in p for p in value)
    if texts and all(isinstance(part["text"], str) for part in value):
        return "".join(part["text"] for part in value)
    return value


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates read them: arguments are an object, where OpenAI has its JSON text."""
    if calls is None:
        return []
    done: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not _is_text(function.get("name")):
            raise UserError("'tool_calls' must be a list of calls of a 'function' with a name")
        arguments = _unpacked(function.get("arguments"))
        kept = {name: value for name, value in call.items() if value is not None}
        done.append(kept | {"function": {"name": function["name"], "arguments": arguments or {}}})
    return done


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    tools = _unpacked(tools)  # data sets of many schemas keep them as text
    if tools is None or tools == "":
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("'tools' must be a list of schemas")
    try:
        return tuple(_without_null(tool) for tool in tools)
    except RecursionError:
        raise UserError("'tools' is nested too deep") from None


def _unpacked(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _without_null(value: Any) -> Any:
    """Columnar files give every schema the keys of all the others, as nulls."""
    if isinstance(value, dict):
        return {key: _without_null(v) for key, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value


def _word(record: dict[str, Any], names: Sequence[str]) -> str:
    """The first of these that is there, as a text."""
    for name in names:
        value = record.get(name)
        if value not in (None, ""):
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise UserError(f"{name!r} must be a text or a whole number")
            return str(value)
    return ""


def _weight(record: dict[str, Any]) -> float:
    name = next((name for name in WEIGHTS if record.get(name) is not None), None)
    if name is None:
        return 1.0
    value = record[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1e300:  # an int may be longer than any float
        raise UserError(f"{name!r} must be a finite number that is at least 0")
    return float(value)


def _is_text(value: Any, empty: bool = False) -> bool:
    if not isinstance(value, str) or not (empty or value.strip()):
        return False
    try:
        value.encode()  # JSON can spell half a surrogate pair, which no tokenizer reads
    except UnicodeEncodeError:
        return False
    return True


def _check_text(prompt: Prompt) -> None:
    """What is no message may be no text either; columns can hold dates or bytes."""
    try:
        json.dumps(prompt, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UserError("an id, category or tool is no data that UTF-8 JSON can hold") from None
