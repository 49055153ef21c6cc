"""Answers that a chat template marks with `{% generation %}` blocks.

A block may begin with text that the answer's prompt already has (`<|start|>assistant`, an empty reasoning
block). Such text is removed, in every turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.ends import MARK, prompt_header
from distill.prompts.templates.faults import REASONING
from distill.prompts.templates.renderer import Answer, Span, TemplateRenderer

TAG = re.compile(rf"{MARK}(\d+){MARK}")


def marked_answers(
    render: TemplateRenderer, messages: Sequence[Message], text: str, prompt: str, blocks: Sequence[Span]
) -> list[Answer]:
    """The marked answers of a conversation, with the last one starting after the prompt.

    Omits earlier answers that do not begin where their prompts end, since the target had another prompt.

    Raises:
        UserError: blocks that belong to no answer.
    """
    last = len(messages) - 1
    blocks, answers, others = filled(blocks), dict[int, list[Span]](), set[int]()
    for owner, block in zip(_owners(render, messages, len(prompt), blocks), blocks, strict=True):
        start = block.start
        if block.end > len(prompt):
            owner, start = last, max(start, len(prompt))
        elif owner not in answers:
            begins = _after_header(text, start, prompt_header(render, messages[:owner]))
            start = block.end if begins is None else min(begins, block.end)
            if begins is None or not owner:  # an opening message answers nothing
                others.add(owner)
        answers.setdefault(owner, []).append(Span(start, block.end))
    return [Answer(number, spans) for number, spans in sorted(answers.items()) if number not in others]


def filled(blocks: Sequence[Span]) -> list[Span]:
    """The blocks that have a text."""
    return [block for block in blocks if block.end > block.start]


def _after_header(text: str, start: int, header: str | None) -> int | None:
    """Start of the answer in a block that begins at `start`; None if the text has no such header there.

    A part of the header may precede the block and the rest be in it.
    """
    if header is None:
        return None
    for outside in range(len(header), -1, -1):
        rest = header[outside:]
        if text.endswith(header[:outside], 0, start) and text.startswith(rest, start):
            return start + len(rest)
    return None


def _owners(
    render: TemplateRenderer, messages: Sequence[Message], prompt: int, blocks: Sequence[Span]
) -> list[int]:
    """Number of the message that each block belongs to."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(blocks) == len(answers):
        return answers
    if len(answers) == 1 and all(block.end > prompt for block in blocks):
        return answers * len(blocks)
    tagged = [_tagged(message, i) for i, message in enumerate(messages)]
    text, spans = render.text(tagged), filled(render.generation_spans(tagged) or [])
    tags = [(match.start(), int(match[1])) for match in TAG.finditer(text)]
    owners: list[int | None] = []
    for span in spans:
        inside = (n for place, n in tags if span.start <= place < span.end and n in answers)
        # A block without text, such as an end token or a header, belongs to the answer before it, or to the
        # next answer after another role.
        before = max((n for place, n in tags if place < span.start), default=-1)
        owners.append(next(inside, next((n for n in answers if n >= before), None)))
    if len(spans) != len(blocks) or None in owners:
        raise UserError(
            "target: its chat template's {% generation %} blocks cannot be assigned to answers, so no loss "
            "mask can be read off them"
        )
    return [owner for owner in owners if owner is not None]


def _tag(number: int) -> str:
    return f"{MARK}{number}{MARK}"


def _tagged(message: Message, number: int) -> Message:
    """The message with its tag instead of each of its texts."""
    tag = _tag(number)
    texts: dict[str, Any] = {key: tag for key in ("content", *REASONING) if message.get(key)}
    if calls := message.get("tool_calls"):
        texts["tool_calls"] = [{**call, "function": {**call["function"], "name": tag}} for call in calls]
    return message | texts
