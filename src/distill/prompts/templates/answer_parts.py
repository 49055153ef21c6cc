"""Split a generated answer into reasoning and content, using the chat template that rendered its prompt.

Reasoning models have their own answer formats; the history of a conversation holds the parts, as servers with
a reasoning parser return them. The format is inferred by rendering markers as reasoning and content: the text
around them splits the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.renderer import TemplateRenderer

REASONING, CONTENT, NAME = "\u2407r\u2407", "\u2407c\u2407", "\u2407n\u2407"
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # parts of formats that are not added tokens
OPENED = re.compile(r"<(\w+)>\s*\Z")  # at the end of a prompt


def answer_parts(
    render: TemplateRenderer, messages: Sequence[Message], answer: Sequence[int]
) -> Message | None:
    """Parse an answer into a message with separate reasoning.

    Args:
        render: the template, with the tools of the conversation.
        messages: messages before the answer.
        answer: its tokens, without the end token.

    Returns:
        The message; None if the answer has marks of the format in invalid places, or calls tools.
    """
    tokenizer = render.tokenizer
    written = str(tokenizer.decode(list(answer), skip_special_tokens=False))
    prompt = render.text(messages, prompt=True)
    reasoned = _around(render, messages, prompt, {"reasoning_content": REASONING, "content": CONTENT})
    plain = _around(render, messages, prompt, {"content": CONTENT})
    forms = [
        _pattern(form) for form in (reasoned, plain) if form and form[0][0].strip() + form[-1][0].strip()
    ]
    marks = {mark for form in (reasoned, plain) for literal, _ in form for mark in _marks(render, literal)}
    if opened := OPENED.search(prompt):
        close = f"</{opened[1]}>"
        forms.append(re.compile(rf"\s*(?P<r>.*?)\s*{re.escape(close)}\s*(?P<c>.*)", re.DOTALL))
        marks |= {close, opened[0].strip()}
    marks |= _call_marks(render, messages, prompt)
    for form in forms:
        if not (found := form.fullmatch(written)):
            continue
        parts = {name: _without_special(render, text) for name, text in found.groupdict().items()}
        if not any(mark in text for mark in marks for text in found.groupdict().values()):
            return _message(parts.get("r", ""), parts["c"])
    if any(mark in written for mark in marks):
        return None
    return _message("", str(tokenizer.decode(list(answer), skip_special_tokens=True)))


def _message(reasoning: str, content: str) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def _around(
    render: TemplateRenderer, messages: Sequence[Message], prompt: str, parts: Message
) -> list[tuple[str, str]]:
    """Text before each marker of an answer, with the marker; empty unless the template writes both."""
    try:
        text = render.text([*messages, {"role": "assistant", **parts}])
    except UserError:
        return []
    markers = [str(marker) for marker in parts.values()]
    if not text.startswith(prompt) or any(text.count(marker) != 1 for marker in markers):
        return []
    found, rest = [], text[len(prompt) :]
    for marker in sorted(markers, key=rest.index):
        before, _, rest = rest.partition(marker)
        found.append((before, marker))
    return found


def _pattern(form: list[tuple[str, str]]) -> re.Pattern[str]:
    """Pattern of a whole answer in this form, with any white space around the template's text."""
    names = {REASONING: "r", CONTENT: "c"}
    pattern = ""
    for number, (literal, marker) in enumerate(form, 1):
        anything = ".*" if number == len(form) else ".*?"
        pattern += rf"\s*{re.escape(literal.strip())}\s*(?P<{names[marker]}>{anything})"
    return re.compile(pattern, re.DOTALL)


def _marks(render: TemplateRenderer, literal: str) -> set[str]:
    """Tokens and tags that a template writes around the parts of an answer."""
    added = {token.content for token in render.tokenizer.added_tokens_decoder.values()}
    return {*TAG.findall(literal), *(token for token in added if token.strip() and token in literal)}


def _call_marks(render: TemplateRenderer, messages: Sequence[Message], prompt: str) -> set[str]:
    """Marks of an answer that calls a tool, if there are tools."""
    if not render.tools:
        return set()
    call = {"type": "function", "id": "call00000", "function": {"name": NAME, "arguments": {}}}
    try:
        text = render.text([*messages, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except UserError:
        return set()
    if not text.startswith(prompt) or NAME not in text:
        return set()
    before = text[len(prompt) : text.index(NAME, len(prompt))]
    return _marks(render, before) or ({before.strip()} if before.strip() else set())


def _without_special(render: TemplateRenderer, text: str) -> str:
    for token in render.tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text
