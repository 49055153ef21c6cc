"""Detect texts of a conversation that a chat template omits or changes.

A message is split into texts: its content, its reasoning, names and arguments of its calls. Each must have
its own place in the rendering. A template may trim or escape a text, and write any text around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distill.prompts.prompt import Message

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys that transformers knows
# Templates rewrite these tags with different white space.
TAGS = re.compile(r"</?think(?:ing)?>")
OPENING, THOUGHT = "<think>", "</think>"
SHOWN = 40  # characters of a text shown in a message


class Part(NamedTuple):
    """A text of a message."""

    what: str  # description with a placeholder for the text
    text: str
    spellings: tuple[str, ...]  # the rendering must contain one of them


def fault_in_answer(message: Message, span: str, before: str) -> str | None:
    """Describe how a template damages an answer; None if it keeps every part.

    Args:
        message: the answer.
        span: the answer's part of the rendering.
        before: the rendering before it.
    """
    return (
        _prints_objects(message, span)
        or _reasons_twice(message, span, before)
        or _leaves_out(list(parts(message)), [], span)
    )


def fault_in_prompt(messages: Sequence[Message], text: str) -> str | None:
    """Name a text of users, tools or the system that a template omits from a prompt; None if all are kept.

    This includes calls in earlier answers; other parts of answers may be changed by the template.
    """
    asked = [part for m in messages if m["role"] != "assistant" for part in parts(m)]
    answers = [m for m in messages if m["role"] == "assistant"]
    if fault := next(filter(None, (_prints_objects(m, text) for m in answers)), None):
        return fault
    calls = [part for m in answers for part in _calls(m)]
    return _leaves_out(asked + calls, [part for m in answers for part in _content_parts(m)], text)


def fault_in_tools(tools: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """Name a tool that a template omits from a prompt; only names are compared, since schemas vary."""
    names = [tool.get("function", tool).get("name") for tool in tools]
    missing = (n for n in names if isinstance(n, str) and _find(_spellings(n), text)[0] < 0)
    return next((f"leaves out the tool {shortened(name)!r}" for name in missing), None)


def parts(message: Message) -> Iterator[Part]:
    """Yield the texts of a message, unordered, without white space around them."""
    yield from _content_parts(message)
    yield from _calls(message)


def _content_parts(message: Message) -> Iterator[Part]:
    role = message["role"]
    content = "the content {}" if role == "assistant" else f"the text {{}} of the {role}"
    yield from _pieces(content, message.get("content"), role == "tool")
    yield from _pieces("the reasoning {}", next((message[key] for key in REASONING if key in message), None))


def _calls(message: Message) -> Iterator[Part]:
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        yield from _pieces("the tool call {}", function.get("name"))
        for spellings in _leaves(as_object(function.get("arguments"))):
            yield Part("the argument {} of a tool call", spellings[0], spellings)


def as_object(arguments: Any) -> Any:
    """Arguments of a call, parsed if they are JSON text."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments


def _pieces(what: str, text: Any, parsed: bool = False) -> Iterator[Part]:
    """Parts of a text that must be kept whole; for a text with reasoning tags, the parts around the tags."""
    if not isinstance(text, str):
        return
    for piece in TAGS.split(text):
        if piece := piece.strip():
            yield Part(what, piece, _spellings(piece, parsed))


def _spellings(text: str, parsed: bool = False) -> tuple[str, ...]:
    """A text unchanged, and escaped as in JSON or Python; with `parsed`, also compact JSON."""
    forms = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], repr(text)[1:-1]]
    if parsed and not isinstance(value := as_object(text), str):
        forms += [json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)]
    return tuple(dict.fromkeys(forms))


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Spellings of each key and value of arguments; null has none, since templates may omit it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield _spellings(str(key))
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, int | float):  # true or True, among others
        yield json.dumps(value), str(value)
    elif isinstance(value, str) and value.strip():
        yield _spellings(value.strip())


def _leaves_out(asked: Sequence[Part], others: Sequence[Part], text: str) -> str | None:
    """Assign each part its own place, the longest first; name the first of `asked` without a place."""
    wanted = [(part, True) for part in asked] + [(part, False) for part in others]
    for part, needed in sorted(wanted, key=lambda pair: -len(pair[0].text)):
        place, spelling = _find(part.spellings, text)
        if place >= 0:
            text = text[:place] + "\0" * len(spelling) + text[place + len(spelling) :]
        elif needed:
            return f"leaves out {part.what.format(repr(shortened(part.text)))}"
    return None


def _find(spellings: Iterable[str], text: str) -> tuple[int, str]:
    found = ((text.find(spelling), spelling) for spelling in spellings)
    return next((pair for pair in found if pair[0] >= 0), (-1, ""))


def _prints_objects(message: Message, span: str) -> str | None:
    """Report arguments that a template prints as a Python object."""
    for call in message.get("tool_calls") or []:
        arguments = as_object(call.get("function", call).get("arguments"))
        if isinstance(arguments, dict) and arguments and str(arguments) in span:
            return f"prints arguments of a tool call as Python does, {shortened(str(arguments))}"
    return None


def _reasons_twice(message: Message, span: str, before: str) -> str | None:
    """Report reasoning in the content that is rendered as text, or text that is rendered as reasoning."""
    content = message.get("content")
    if not isinstance(content, str) or THOUGHT not in content:
        return None
    opened = before.rstrip().endswith(OPENING) or content.lstrip().startswith(OPENING)
    if not opened and not message.keys() & {*REASONING} and content.strip() not in span:
        return f"takes the content before {THOUGHT} for reasoning"
    if span.count(THOUGHT) + before.rstrip().endswith(THOUGHT) > content.count(THOUGHT):
        return f"puts reasoning before the {THOUGHT} of the content, which belongs into reasoning_content"
    return None


def shortened(text: str) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
