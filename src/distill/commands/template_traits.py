"""What a chat template does with a system prompt, tools, calls and reasoning: small texts are rendered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message
from distill.prompts.templates.faults import REASONING
from distill.prompts.templates.renderer import TemplateRenderer

MARK = "\u2407"
QUESTION: Message = {"role": "user", "content": "?"}
ANSWER: Message = {"role": "assistant", "content": "."}
TOOL = {
    "type": "function",
    "function": {
        "name": MARK,
        "description": "-",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": MARK, "arguments": {"x": "y"}}}
    ],
}
RESULT: Message = {"role": "tool", "name": MARK, "tool_call_id": "abcdefghi", "content": "."}
OPEN_THOUGHT = re.compile(r"<(\w*(?:think|reason)\w*)>|\[(THINK)\]", re.IGNORECASE)
KEPT, DROPPED, REFUSED = "kept", "dropped", "refused"


def traits(chat: Chat) -> dict[str, str]:
    """Traits of a chat template in words, by what they are about.

    Args:
        chat: with a template.
    """
    render = chat.renderer()
    system: Message = {"role": "system", "content": MARK}
    with_tools = chat.renderer([TOOL])
    return {
        "system prompt": _fate(render, [system, QUESTION]),
        "tools": _fate(with_tools, [QUESTION]),
        "tool calls": _fate(with_tools, [QUESTION, CALL, RESULT], of="call"),
        "reasoning": _reasoning(render),
        "prompt ends with": _prompt(render),
        "answer is followed by": _behind(render),
    }


def _text(render: TemplateRenderer, messages: Sequence[Message], prompt: bool) -> str | None:
    """A rendering; None where the template refuses it."""
    try:
        return render.text(messages, prompt=prompt)
    except UserError:
        return None


def _fate(render: TemplateRenderer, messages: Sequence[Message], prompt: bool = True, of: str = "") -> str:
    """What becomes of the marked text; `of` a call, whose mark stands in the list of tools, too."""
    text = _text(render, messages, prompt)
    if text is None:
        return REFUSED
    listed = (_text(render, [QUESTION], prompt) or "").count(MARK) if of else 0
    return KEPT if text.count(MARK) > listed else DROPPED


def _reasoning(render: TemplateRenderer) -> str:
    """Under which key reasoning is read, and in which turns it stays."""
    for key in REASONING:
        answer: Any = {**ANSWER, key: MARK}
        last = _fate(render, [QUESTION, answer], prompt=False)
        earlier = _fate(render, [QUESTION, answer, QUESTION, ANSWER], prompt=False)
        if KEPT in (last, earlier):
            return f"read from {key}; of the last answer {last}, of earlier ones {earlier}"
    inside: Message = {"role": "assistant", "content": f"<think>{MARK}</think>\n\n."}
    last = _fate(render, [QUESTION, inside], prompt=False)
    earlier = _fate(render, [QUESTION, inside, QUESTION, ANSWER], prompt=False)
    return f"no key is read; a think block in an answer: of the last one {last}, of earlier ones {earlier}"


def _behind(render: TemplateRenderer) -> str:
    """What stands behind an answer at the end of a conversation."""
    text = _text(render, [QUESTION, {"role": "assistant", "content": MARK}], prompt=False)
    return REFUSED if text is None else repr(text.rpartition(MARK)[2])


def _prompt(render: TemplateRenderer) -> str:
    """What a prompt adds behind a question, and whether a thinking block is open there."""
    prompt, plain = (_text(render, [QUESTION], prompt) for prompt in (True, False))
    if prompt is None or plain is None:
        return REFUSED
    added = prompt.removeprefix(plain) if prompt.startswith(plain) else prompt[-40:]
    thoughts = list(OPEN_THOUGHT.finditer(added))
    if not thoughts:
        return f"{added!r}"
    thought = thoughts[-1]
    name = thought[1] or thought[2]
    closed = re.search(rf"</{name}>|\[/{name}\]", added[thought.end() :])
    return f"{added!r}, which {'has a closed' if closed else 'opens a'} thinking block"
