"""Traits of a chat template: treatment of system prompt, tools, calls and reasoning, by rendering samples."""

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
    """Describe a chat template, as text by topic.

    Args:
        chat: a chat with a template.
    """
    render = chat.renderer()
    system: Message = {"role": "system", "content": MARK}
    with_tools = chat.renderer([TOOL])
    return {
        "system prompt": _effect(render, [system, QUESTION]),
        "tools": _effect(with_tools, [QUESTION]),
        "tool calls": _effect(with_tools, [QUESTION, CALL, RESULT], of="call"),
        "reasoning": _reasoning(render),
        "prompt ends with": _prompt_suffix(render),
        "answer is followed by": _suffix(render),
    }


def _text(render: TemplateRenderer, messages: Sequence[Message], prompt: bool) -> str | None:
    """Render messages; None if the template refuses them."""
    try:
        return render.text(messages, prompt=prompt)
    except UserError:
        return None


def _effect(render: TemplateRenderer, messages: Sequence[Message], prompt: bool = True, of: str = "") -> str:
    """Whether the marked text is kept, dropped or refused; `of` a call, tools contain the mark too."""
    text = _text(render, messages, prompt)
    if text is None:
        return REFUSED
    listed = (_text(render, [QUESTION], prompt) or "").count(MARK) if of else 0
    return KEPT if text.count(MARK) > listed else DROPPED


def _reasoning(render: TemplateRenderer) -> str:
    """Describe the key that reasoning is read from, and the turns that keep it."""
    for key in REASONING:
        answer: Any = {**ANSWER, key: MARK}
        last = _effect(render, [QUESTION, answer], prompt=False)
        earlier = _effect(render, [QUESTION, answer, QUESTION, ANSWER], prompt=False)
        if KEPT in (last, earlier):
            return f"read from {key}; of the last answer {last}, of earlier ones {earlier}"
    inside: Message = {"role": "assistant", "content": f"<think>{MARK}</think>\n\n."}
    last = _effect(render, [QUESTION, inside], prompt=False)
    earlier = _effect(render, [QUESTION, inside, QUESTION, ANSWER], prompt=False)
    return f"no key is read; a think block in an answer: of the last one {last}, of earlier ones {earlier}"


def _suffix(render: TemplateRenderer) -> str:
    """Text that follows an answer at the end of a conversation."""
    text = _text(render, [QUESTION, {"role": "assistant", "content": MARK}], prompt=False)
    return REFUSED if text is None else repr(text.rpartition(MARK)[2])


def _prompt_suffix(render: TemplateRenderer) -> str:
    """Describe the text added after a question, and whether it leaves a thinking block open."""
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
