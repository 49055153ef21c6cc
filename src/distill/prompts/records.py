"""Parse a record of a file or dataset, in any of the common formats, into a Prompt.

A record is one JSON object. Its format is the first key of `FORMS` that it has: OpenAI's `messages`,
MT-Bench's `turns`, ShareGPT's `conversations`, Alpaca's `instruction` (and `input`), or a plain `prompt`,
`question` or `text`, whose answer may stand under one of `ANSWERS`. docs/data.md has a line of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from decode.errors import UserError
from distill.prompts.prompt import Message, Prompt, pack, turns, unanswered

ROLES = ("system", "user", "assistant", "tool")
# ShareGPT's speakers -> roles.
SPEAKERS = {"human": "user", "gpt": "assistant"} | dict.fromkeys(("chatgpt", "bing", "bard"), "assistant")
# Further keys of a message that chat templates use.
EXTRAS = ("name", "tool_call_id", "reasoning_content")

# The first of these keys that a record has determines its format.
FORMS = ("messages", "turns", "conversations", "instruction", "prompt", "question", "text")
ANSWERS = ("answer", "response", "output", "completion")
SYSTEMS = ("system", "system_prompt")
CONTENT = (*FORMS, *ANSWERS, *SYSTEMS, "input")
IDS = ("id", "question_id", "task_id", "prompt_id")
WEIGHTS = ("weight", "reward")
FIELDS = (*CONTENT, *IDS, *WEIGHTS, "category", "tools")  # all keys that are read


def parse_prompt(line: bytes, where: str, default_id: str) -> Prompt:
    """Parse one line of JSON; `where` is the prefix of error messages.

    Raises:
        UserError: malformed record.
    """
    try:
        return to_prompt(parse(line), default_id)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parse(line: bytes) -> Any:
    """Parse a line as JSON.

    Raises:
        UserError: not UTF-8 or not JSON.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))  # skips a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):  # very long numbers, very deep nesting
        raise UserError("not JSON (numbers too long, or nested too deep)") from None


def to_prompt(
    record: Any, default_id: str, answers: str = "keep", columns: Mapping[str, str] | None = None
) -> Prompt:
    """Convert a parsed record to a Prompt.

    Args:
        record: of which FIELDS are used.
        default_id: for records without an id.
        answers: `keep` the record's answers, or `drop` them unless tools are called, so that the target
            writes its own.
        columns: field -> its name in the record. If one of them is a format of FORMS, other content
            fields of the record are ignored.

    Raises:
        UserError: malformed record.
    """
    if not isinstance(record, dict):
        raise UserError(f"expected an object, got {type(record).__name__}")
    record = _rename_columns(record, columns or {})
    tools = _tools(record.get("tools"))
    raw = _conversation(record)
    has_calls = any(isinstance(m, dict) and (m.get("role") == "tool" or m.get("tool_calls")) for m in raw)
    if answers == "drop" and not tools and not has_calls:
        raw = [m for m in raw if not (isinstance(m, dict) and m.get("role") == "assistant")]
    messages = tuple(_message(m) for m in raw)
    if not turns(unanswered(messages)):
        no_user = messages and all(m["role"] == "assistant" for m in messages)
        reason = "only the assistant speaks in it" if no_user else "no user's or tool's message stands last"
        raise UserError(f"{reason}; there is nothing to answer")
    name, category = _string_field(record, IDS) or default_id, _string_field(record, ("category",))
    weight = _weight(record)
    try:  # columns can hold dates or bytes, and any text lone surrogates
        (name + category).encode()
        return Prompt(name, pack(messages, tools), category, weight)
    except (TypeError, ValueError, RecursionError):
        raise UserError("an id, category or tool is no data that UTF-8 JSON can hold") from None


def _rename_columns(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    for column in columns.values():
        if column not in record:
            raise UserError(f"no column {column!r}; it has {', '.join(map(str, record)) or 'none'}")
    names_content = any(field in FORMS for field in columns)
    rest = {k: v for k, v in record.items() if not (names_content and k in CONTENT)}
    return rest | {field: record[column] for field, column in columns.items()}


def _conversation(record: dict[str, Any]) -> Sequence[Any]:
    """Messages of a record of any format, not validated yet."""
    form = next((name for name in FORMS if record.get(name) is not None), "messages")
    content = record.get(form)
    if form in FORMS[:3]:
        if not isinstance(content, list) or not content:
            raise UserError(
                "needs a non-empty list 'messages' (or 'turns', 'conversations'), or a text "
                "'instruction', 'prompt', 'question' or 'text'"
            )
        messages: list[Any] = {"messages": list, "turns": _user_turns, "conversations": _sharegpt}[form](
            content
        )
    else:
        more = record.get("input") if form == "instruction" else None
        messages = _user_turns([_join(content, more) if more else content])
        answer = next((record[name] for name in ANSWERS if record.get(name) not in (None, "")), None)
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    system = next((record[name] for name in SYSTEMS if record.get(name) not in (None, "")), None)
    if form != "messages" and system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _user_turns(texts: Sequence[Any]) -> list[Any]:
    return [{"role": "user", "content": text} for text in texts]


def _sharegpt(turns: Sequence[Any]) -> list[Any]:
    """ShareGPT's turns as messages; turns with OpenAI's keys are left as they are."""
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict) and "from" in turn:
            speaker = turn["from"]
            role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None
            turn = {"role": role, "content": turn.get("value")}
        messages.append(turn)
    return messages


def _join(instruction: Any, more: Any) -> str:
    if not isinstance(instruction, str) or not isinstance(more, str):
        raise UserError("'instruction' and 'input' must be texts")
    return f"{instruction}\n\n{more}"


def _message(value: Any) -> Message:
    has_role = isinstance(value, dict) and value.get("role") in ROLES
    calls = _calls(value.get("tool_calls")) if has_role else []
    content = _content(value.get("content")) if has_role else None
    if content is None and calls:
        content = ""  # OpenAI has null here, which templates treat differently
    if not has_role or not _is_text(content, empty=bool(calls)):
        raise UserError(f"each message needs a role of {', '.join(ROLES)} and a text 'content'")
    message: Message = {"role": value["role"], "content": content}
    for name in EXTRAS:
        if value.get(name) not in (None, ""):
            if not _is_text(value[name]):
                raise UserError(f"a message's {name!r} must be a text")
            message[name] = value[name]
    return message | ({"tool_calls": calls} if calls else {})


def _content(value: Any) -> Any:
    """Join content in parts if all parts are text."""
    texts = isinstance(value, list) and value and all(isinstance(p, dict) and "text" in p for p in value)
    if texts and all(isinstance(part["text"], str) for part in value):
        return "".join(part["text"] for part in value)
    return value


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates expect them: arguments as an object, where OpenAI has a JSON string."""
    if calls is None:
        return []
    parsed: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not _is_text(function.get("name")):
            raise UserError("'tool_calls' must be a list of calls of a 'function' with a name")
        arguments = _parse_json(function.get("arguments"))
        fields = {name: value for name, value in call.items() if value is not None}
        parsed.append(fields | {"function": {"name": function["name"], "arguments": arguments or {}}})
    return parsed


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    tools = _parse_json(tools)  # some datasets store schemas as JSON strings
    if tools is None or tools == "":
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError("'tools' must be a list of schemas")
    try:
        return tuple(_without_null(tool) for tool in tools)
    except RecursionError:
        raise UserError("'tools' is nested too deep") from None


def _parse_json(value: Any) -> Any:
    """The value of a JSON string; anything else unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _without_null(value: Any) -> Any:
    """Drop null entries: columnar files give every schema the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_null(v) for key, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value


def _string_field(record: dict[str, Any], names: Sequence[str]) -> str:
    """The first of these fields that the record has, as a string."""
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
    if not number or not 0 <= value <= 1e300:  # an int may exceed any float
        raise UserError(f"{name!r} must be a finite number that is at least 0")
    return float(value)


def _is_text(value: Any, empty: bool = False) -> bool:
    if not isinstance(value, str) or not (empty or value.strip()):
        return False
    try:
        value.encode()  # JSON can contain lone surrogates, which tokenizers reject
    except UnicodeEncodeError:
        return False
    return True
