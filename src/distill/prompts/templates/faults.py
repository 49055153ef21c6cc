"""What a chat template leaves out of a conversation, or writes in a form that nobody meant.

A message is taken apart into texts: its content, its reasoning, names and arguments of its calls. Each of
them has a place of its own in the rendering. A template may trim a text or escape it, and what
stands around it is its own affair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distill.prompts.prompt import Message

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows
# Templates write these tags again, with other white space around them.
TAGS = re.compile(r"</?think(?:ing)?>")
OPENING, THOUGHT = "<think>", "</think>"
SHOWN = 40  # characters of a text in a message


class Part(NamedTuple):
    """A text that a message consists of."""

    what: str  # with a place for the text
    text: str
    spellings: tuple[str, ...]  # of which one has to stand in the rendering


def fault_in_answer(message: Message, span: str, before: str) -> str | None:
    """Say what a template does wrong to an answer; None if it keeps every part.

    Args:
        message: the answer.
        span: its own part of the rendering.
        before: what stands before that.
    """
    return (
        _prints_objects(message, span)
        or _reasons_twice(message, span, before)
        or _leaves_out(list(parts(message)), [], span)
    )


def fault_in_prompt(messages: Sequence[Message], text: str) -> str | None:
    """Say which text of users, tools or the system a template leaves out of a prompt; None if all are there.

    Calls in earlier answers count as such; what else these said may have been changed by the template.
    """
    asked = [part for m in messages if m["role"] != "assistant" for part in parts(m)]
    answers = [m for m in messages if m["role"] == "assistant"]
    if fault := next(filter(None, (_prints_objects(m, text) for m in answers)), None):
        return fault
    calls = [part for m in answers for part in _calls(m)]
    return _leaves_out(asked + calls, [part for m in answers for part in _said(m)], text)


def fault_in_tools(tools: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """Say which tool a template leaves out of a prompt, by its name: schemas are written in many ways."""
    names = [tool.get("function", tool).get("name") for tool in tools]
    missing = (n for n in names if isinstance(n, str) and _find(_spellings(n), text)[0] < 0)
    return next((f"leaves out the tool {shortened(name)!r}" for name in missing), None)


def parts(message: Message) -> Iterator[Part]:
    """The texts of a message, in no order, without white space around them."""
    yield from _said(message)
    yield from _calls(message)


def _said(message: Message) -> Iterator[Part]:
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
    """Arguments of a call, parsed where they are JSON text."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments


def _pieces(what: str, text: Any, parsed: bool = False) -> Iterator[Part]:
    """Parts of a text that has to be there whole; of one with reasoning tags, what stands around them."""
    if not isinstance(text, str):
        return
    for piece in TAGS.split(text):
        if piece := piece.strip():
            yield Part(what, piece, _spellings(piece, parsed))


def _spellings(text: str, parsed: bool = False) -> tuple[str, ...]:
    """A text as it is, and as JSON or Python escapes it; with `parsed`, JSON text in its compact form."""
    forms = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], repr(text)[1:-1]]
    if parsed and not isinstance(value := as_object(text), str):
        forms += [json.dumps(value, ensure_ascii=False), json.dumps(value), str(value)]
    return tuple(dict.fromkeys(forms))


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Spellings of each key and value of arguments; null has none, since templates may leave it out."""
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
    """Give each part a place of its own, the longest first; name the first of `asked` that finds none."""
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
    """Arguments that a template prints as it prints any object, with Python's quotes."""
    for call in message.get("tool_calls") or []:
        arguments = as_object(call.get("function", call).get("arguments"))
        if isinstance(arguments, dict) and arguments and str(arguments) in span:
            return f"prints arguments of a tool call as Python does, {shortened(str(arguments))}"
    return None


def _reasons_twice(message: Message, span: str, before: str) -> str | None:
    """A block of reasoning in the content that a template takes for text, or a text that it takes for one."""
    content = message.get("content")
    if not isinstance(content, str) or THOUGHT not in content:
        return None
    opened = before.rstrip().endswith(OPENING) or content.lstrip().startswith(OPENING)
    if not opened and not message.keys() & {*REASONING} and content.strip() not in span:
        return f"takes what stands before {THOUGHT} in the content for reasoning"
    if span.count(THOUGHT) + before.rstrip().endswith(THOUGHT) > content.count(THOUGHT):
        return f"puts reasoning before the {THOUGHT} of the content, which belongs into reasoning_content"
    return None


def shortened(text: str) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
