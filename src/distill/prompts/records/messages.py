"""Convert messages of common formats to the form that chat templates read.

A converted message has `role` (of ROLES) and a text `content`, and may have `reasoning_content`, `tool_calls`
([{type: function, function: {name, arguments}}], with an optional id), `name`, `tool_call_id`, and `train:
False` for an answer that is not trained on. Sources of the formats: the references of OpenAI's and
Anthropic's chat interfaces, ShareGPT's files, and the documentation of axolotl, LLaMA-Factory and ms-swift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.errors import UserError
from distill.prompts.prompt import Message, turns
from distill.prompts.records.fields import Fields, is_empty, is_text, parse_json, without_null

ROLES = ("system", "developer", "user", "assistant", "tool")
CALL_ROLE = "function_call"  # LLaMA-Factory's: the call as JSON text
ALIASES = {
    alias: role
    for role, aliases in (
        ("user", ("human", "prompter")),
        ("assistant", ("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "model", "ai")),
        ("tool", ("function", "ipython", "observation", "function_response", "tool_response")),
    )
    for alias in aliases
}
PLAIN = {"role", "content"}
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text")
# Keys for whether an answer is trained on: OpenAI's, axolotl's, ms-swift's; and two with inverse meaning.
LEARNED, MASKED = ("weight", "train", "training", "loss"), ("masked", "mask")


@dataclass
class _Content:
    """Parsed content of a message.

    Attributes:
        text: joined text parts.
        reasoning: joined reasoning parts.
        calls: calls of functions.
        results: results of calls, as messages.
    """

    text: Any = None
    reasoning: str = ""
    calls: list[Any] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def to_messages(raw: Sequence[Any], unread: set[str], columnar: bool = False) -> tuple[Message, ...]:
    """Validate messages, and convert them to the form of chat templates.

    Args:
        raw: messages in any known format.
        unread: output set of unread fields, as in `messages.timestamp`.
        columnar: they come from a table, with nulls for absent keys.

    Raises:
        UserError: a malformed message, with its number, role and key.
    """
    messages: list[Message] = []
    for number, value in enumerate(raw, 1):
        if _is_plain(value):
            messages.append(dict(value))
            continue
        value = parse_json(value)
        try:
            messages += _message(value, unread, columnar)
        except UserError as error:
            given = _speaker(value)
            named = f" ({given})" if isinstance(given, str) and given in (*ROLES, *ALIASES) else ""
            raise UserError(f"message {number}{named}: {error}") from None
    return tuple(messages)


def _is_plain(value: Any) -> bool:
    """Whether a message has only a role and a text, which is the common case."""
    plain = isinstance(value, dict) and value.keys() == PLAIN and is_text(value["content"])
    return plain and isinstance(value["role"], str) and value["role"] in ROLES


def role_of(value: Any) -> str | None:
    """Role of a raw message; None if unknown."""
    speaker = _speaker(parse_json(value))
    if not isinstance(speaker, str):
        return None
    name = speaker.strip().lower()
    name = ALIASES.get(name, name)
    return "assistant" if name == CALL_ROLE else name if name in ROLES else None


def uses_tools(value: Any) -> bool:
    """Whether a raw message calls a tool or is a tool's result."""
    value = parse_json(value)
    if not isinstance(value, Mapping):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    return (
        role_of(value) == "tool"
        or _is_call(value)
        or any(not is_empty(value.get(name)) for name in ("tool_calls", "function_call"))
        or any(isinstance(p, Mapping) and p.get("type") in ("tool_use", "tool_result") for p in parts)
    )


def conversation(prompt: Any) -> tuple[Message, ...]:
    """Convert a prompt of the public API to messages: a user's text, a message, or a list of messages.

    Raises:
        UserError: none of these, an unknown field, or nothing to answer.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Mapping):
        prompt = [prompt]
    if not isinstance(prompt, list | tuple):
        raise UserError(f"prompt: give a text, or messages with role and content, not {_kind(prompt)}")
    unread: set[str] = set()
    try:
        messages = to_messages(prompt, unread)
    except UserError as error:
        raise UserError(f"prompt: {error}") from None
    if unread:
        raise UserError(f"prompt: nothing reads {', '.join(sorted(unread))}; leave it out")
    if not turns(messages) or messages[-1]["role"] == "assistant":
        raise UserError("prompt: nothing to answer; the last message has to be a user's or a tool's")
    return messages


def _speaker(value: Any) -> Any:
    """Raw role of a message: OpenAI's `role`, or ShareGPT's `from`."""
    if not isinstance(value, Mapping):
        return None
    return value.get("from") if is_empty(value.get("role")) else value["role"]


def _is_call(value: Any) -> bool:
    """Whether the content of a raw message is a call as JSON text."""
    speaker = _speaker(value)
    return isinstance(speaker, str) and speaker.strip().lower() == CALL_ROLE


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _names(value: Mapping[str, Any]) -> str:
    return ", ".join(map(str, value))


def _message(value: Any, unread: set[str], columnar: bool) -> list[Message]:
    if not isinstance(value, Mapping):
        raise UserError(f"expected an object with role and content, got {_kind(value)}")
    fields = Fields(value)
    speaker, role = fields.get("role") or fields.get("from"), role_of(value)
    if role is None:
        wrong = f"{speaker!r} is no role" if isinstance(speaker, str) else "it has no role"
        raise UserError(f"{wrong}; roles are {', '.join(ROLES)}, and a text 'content' belongs to each")
    given = next((fields.raw(n) for n in ("content", "value") if value.get(n) is not None), None)
    content = _Content(calls=_call_in_text(given)) if _is_call(value) else _content(given, role, unread)
    reasoning = _reasoning(fields, content.reasoning) if role == "assistant" else ""
    calls = _calls(fields, content.calls, role, unread, columnar)
    text = "" if content.text is None and (calls or reasoning) else content.text
    message: Message = {"role": role, "content": text}
    for name in ("name", "tool_call_id")[: 2 if role == "tool" else 1]:
        if (named := fields.get(name)) is not None:
            if not is_text(named):
                raise UserError(f"{name!r} must be a text")
            message[name] = named
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    if not _trained_on(fields, role):
        message["train"] = False
    unread |= fields.unread("messages.")
    if content.results and is_empty(text):
        return content.results
    if not is_text(text, empty=bool(calls or reasoning)):
        found = _kind(text) if not isinstance(text, str) else "half a character" if text.strip() else "none"
        raise UserError(f"it needs a text in 'content', and has {found}; its keys are {_names(value)}")
    return [*content.results, message]


def _content(value: Any, role: str, unread: set[str]) -> _Content:
    """Read a text, or a list of typed parts."""
    content = _Content()
    if not isinstance(value, list) or not value:
        content.text = value
        return content
    texts: list[str] = []
    for part in value:
        fields = Fields(_object(part))
        kind = fields.get("type") or ("text" if "text" in fields.values else None)
        if kind in TEXT_PARTS:
            if content.calls:
                raise UserError("a text follows a 'tool_use' part; no template renders it there")
            texts.append(_part_text(fields, ("text",), kind))
        elif kind in ("thinking", "reasoning") and role == "assistant":
            if content.calls or "".join(texts).strip():
                raise UserError(f"a {kind!r} part follows text or calls; no template renders it there")
            content.reasoning += _part_text(fields, ("text", "content", *REASONING), kind)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": fields.get("name"), "arguments": fields.raw("input")}
            content.calls.append({"id": fields.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role in ("user", "tool"):
            if texts:
                raise UserError("a 'tool_result' part follows text; it must come first")
            content.results.append(_result(fields, unread))
        else:
            raise UserError(f"'content' has a part of type {kind!r}; only text of the {role} is supported")
        unread |= fields.unread("messages.content.")
    content.text = "".join(texts) if texts else None
    return content


def _object(part: Any) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise UserError(f"a part of 'content' is {_kind(part)}; it must be an object with type and text")
    return part


def _part_text(fields: Fields, names: Sequence[str], kind: str) -> str:
    name = fields.first(names)
    text = fields.raw(name) if name else ""
    if not isinstance(text, str):
        raise UserError(f"{name!r} of a {kind!r} part of 'content' must be a text")
    return text


def _result(fields: Fields, unread: set[str]) -> Message:
    """A tool's result, in Anthropic's format."""
    content = _content(fields.get("content"), "tool", unread)
    if content.results or not is_text(content.text):
        raise UserError("'content' of a 'tool_result' part must be a text")
    number = fields.get("tool_use_id")
    if number is not None and not is_text(number):
        raise UserError("'tool_use_id' must be a text")
    return {"role": "tool", "content": content.text} | ({"tool_call_id": number} if number else {})


def _reasoning(fields: Fields, parts: str) -> str:
    """The reasoning of an answer, under whichever name it has."""
    found = {"a part of 'content'": parts} if parts.strip() else {}
    for name in REASONING:
        value = fields.get(name)
        if value is not None and not is_text(value, empty=True):
            raise UserError(f"{name!r} must be a text")
        if value is not None and value.strip():
            found[repr(name)] = value
    if len(set(found.values())) > 1:
        raise UserError(f"two different texts of reasoning, in {' and '.join(found)}; keep one")
    return next(iter(found.values()), "")


def _trained_on(fields: Fields, role: str) -> bool:
    """Whether a message may be trained on, if its role is; only answers can be."""
    flags = {}
    for name in (*LEARNED, *MASKED):
        if is_empty(value := fields.values.get(name)):
            continue
        if value not in (0, 1):  # also True and False, and 1.0
            raise UserError(f"{name!r} of a message must be 0 or 1, true or false")
        flags[name] = bool(value) != (name in MASKED)
    if role == "assistant" or not any(flags.values()):
        for name in flags:
            fields.raw(name)
    if role != "assistant":
        return True  # other roles are never trained on
    if len(set(flags.values())) > 1:
        raise UserError(f"{' and '.join(map(repr, flags))} contradict each other")
    return all(flags.values())


def _call_in_text(value: Any) -> list[Any]:
    calls = parse_json(value)
    if isinstance(calls, Mapping):
        return [calls]
    if not isinstance(calls, list):
        raise UserError("'value' of a function_call must be a call with name and arguments, as JSON")
    return calls


def _calls(
    fields: Fields, parts: list[Any], role: str, unread: set[str], columnar: bool
) -> list[dict[str, Any]]:
    """Tool calls in the form of templates: arguments as an object, where OpenAI has JSON text."""
    given, legacy = parse_json(fields.get("tool_calls")), parse_json(fields.get("function_call"))
    if sum(not is_empty(value) for value in (given, legacy, parts)) > 1:
        raise UserError("calls in more than one of 'tool_calls', 'function_call' and 'content'; keep one")
    calls = ([legacy] if legacy else given) or parts
    if calls and role != "assistant":
        raise UserError(f"'tool_calls' of the {role}; the assistant makes calls")
    if not isinstance(calls, list):
        raise UserError("'tool_calls' must be a list of calls of a 'function' with a name")
    return [_call(call, unread, columnar) for call in calls]


def _call(call: Any, unread: set[str], columnar: bool) -> dict[str, Any]:
    call = parse_json(call)
    outer = Fields(call if isinstance(call, Mapping) else {}, ignored=("index",))
    if (kind := outer.get("type")) not in (None, "function"):
        raise UserError(f"'tool_calls' has a call of type {kind!r}; chat templates write functions only")
    function = outer.get("function")
    inner = Fields(function) if isinstance(function, Mapping) else outer  # also plain {name, arguments}
    name, number = inner.get("name"), outer.get("id")
    if (function is not None and inner is outer) or not is_text(name):
        raise UserError("'tool_calls' must be a list of calls of a 'function' with a name")
    if number is not None and not is_text(number):
        raise UserError("'id' in 'tool_calls' must be a text")
    given = inner.raw("arguments")
    arguments = parse_json(given)
    if not isinstance(given, str) and columnar:
        arguments = without_null(arguments)
    if not is_empty(arguments) and not isinstance(arguments, dict):
        raise UserError(f"'arguments' of a call of {name} must be an object, or the JSON text of one")
    unread |= outer.unread("messages.tool_calls.") | inner.unread("messages.tool_calls.")
    named = {"id": number} if number else {}
    return named | {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
