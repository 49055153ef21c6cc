"""Loss mask of a rendered conversation: 1 for tokens that the target wrote, end tokens included.

For each answer, its prompt (`add_generation_prompt`) and the conversation up to its end are rendered; the
answer is the difference. A template may also mark its answers. The mask covers everything written in the
answer, and nothing by users, tools or the system. Borders are also checked as token ids, since a tokenizer
may merge characters across them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.ends import MARK, AnswerFrame
from distill.prompts.templates.faults import (
    fault_in_answer,
    fault_in_prompt,
    fault_in_tools,
    parts,
    shortened,
)
from distill.prompts.templates.marked_answers import marked_answers
from distill.prompts.templates.renderer import Answer, IncompletePromptError, Span, TemplateRenderer

MOST_ANSWERS = 500  # limit per conversation: each is rendered with all messages before it
# Shorter texts may occur in a template's own markup.
SHORT = 12
DIFFERS = (
    "target: its chat template renders an answer differently from its prompt, so no loss mask can be read "
    "off it; give its tokenizer a template with answers that begin where prompts end"
)


def supervise(
    render: TemplateRenderer, messages: Sequence[Message], frame: AnswerFrame
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation that ends with an answer, and their loss mask.

    The last answer is supervised exactly: its prompt is encoded as the target would get it, then the answer.
    Earlier answers are supervised if the conversation contains them as the target wrote them: not if the
    template drops their reasoning, or if the tokenizer merges their start with the prompt. Answers with
    `train: false` are context.

    Raises:
        UserError: the last answer does not extend its prompt or has none; a trained answer lost a part or
            contains an end token; a text of the prompt is missing.
    """
    if len(messages) < 2:
        raise UserError("rollout=given: a record of only an answer has no prompt")
    if (answers := sum(message["role"] == "assistant" for message in messages)) > MOST_ANSWERS:
        raise UserError(
            f"rollout=given: {answers:,} answers in a record; split it, at {MOST_ANSWERS} at most"
        )
    text, prompt = render.text(messages), render.text(messages[:-1], prompt=True)
    check_short_texts(render, messages)
    if not text.startswith(prompt):
        raise UserError(DIFFERS)
    _check_prompt(messages[:-1], prompt)
    if fault := fault_in_tools(render.tools or (), prompt):
        raise UserError(f"target: its chat template {fault}")
    blocks = render.generation_spans(messages)
    if blocks is None:
        last = Answer(len(messages) - 1, [Span(len(prompt), len(text))])
        answers = [*_earlier(render, messages, text, frame), last]
    else:
        asked = [message for message in messages if message["role"] != "assistant"]
        _check_prompt(asked, _blanked(text, blocks), " or marks it as an answer")
        answers = marked_answers(render, messages, text, prompt, blocks)
    answers = [
        Answer(answer.number, [frame.fit(span, text) for span in _joined(answer.spans)])
        for answer in answers
        if messages[answer.number].get("train") is not False
    ]
    if blocks is not None:
        for answer in answers:
            _check_end(render, text, answer, frame, is_last=answer.number == len(messages) - 1)
    answers = [answer for answer in answers if _is_whole(render, messages, text, answer, frame)]
    return _mask(Tokens(render, text, len(prompt)), answers, len(prompt))


def check_short_texts(render: TemplateRenderer, messages: Sequence[Message]) -> None:
    """Reject a short text that the template omits while its own markup has the same characters.

    The conversation is rendered again with marks instead of such texts; marks of earlier answers may be
    missing.

    Raises:
        IncompletePromptError: a mark is missing.
    """
    marks: dict[int, str] = {}
    for number, message in enumerate(messages):
        text = message.get("content")
        text = text.strip() if isinstance(text, str) else ""
        kept = message["role"] != "assistant" or number == len(messages) - 1
        if kept and 0 < len(text) < SHORT and text in render.template:
            marks[number] = f"{MARK}{number}{MARK}"
    if not marks:
        return
    marked = [m | {"content": marks[n]} if n in marks else m for n, m in enumerate(messages)]
    try:
        rendered = render.text(marked)
    except UserError:  # the template depends on the text
        return
    for number, mark in marks.items():
        if mark not in rendered:
            text, role = messages[number]["content"].strip(), messages[number]["role"]
            raise IncompletePromptError(
                f"target: its chat template leaves out the text {text!r} of the {role}"
            )


def _check_end(
    render: TemplateRenderer, text: str, answer: Answer, frame: AnswerFrame, is_last: bool
) -> None:
    """Reject a marked answer that does not end with its end token.

    Raises:
        UserError: the block ends before the token, or includes text of others after it.
    """
    start, end = answer.spans[-1]
    expected = ((frame.token,) if frame.token else ()) if is_last else frame.tokens
    if not expected or text[start:end].endswith(expected):
        return
    place = max(text.rfind(token, start, end) + len(token) for token in expected)
    if text.endswith(expected, start, place) and render.added.any.search(text, place, end):
        fault = "reach beyond"
    elif text[end:].lstrip().startswith(expected):
        fault = "end before"
    else:  # an answer without an end, such as a call followed by its result
        return
    raise UserError(
        f"target: its chat template's {{% generation %}} blocks {fault} the token that ends an answer"
    )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join adjacent spans."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.start:
            span = Span(joined.pop().start, span.end)
        joined.append(span)
    return joined


def _mask(tokens: Tokens, answers: Sequence[Answer], prompt: int) -> tuple[list[int], list[int]]:
    mask = [0] * len(tokens.ids)
    for span in (span for answer in answers for span in answer.spans):
        first, last = tokens.count(span.start), tokens.count(span.end)
        if first is not None and last is not None:
            mask[first:last] = [1] * (last - first)
        elif span.end > prompt:
            raise UserError(DIFFERS)
    return tokens.ids, mask


class Tokens:
    """Token ids of a text that starts with a prompt, with the prompt's ids as a prefix.

    Raises:
        UserError: the tokenizer cannot encode the rest of the text separately.
    """

    def __init__(self, render: TemplateRenderer, text: str, prompt: int) -> None:
        self._render, self._text, self._prompt = render, text, prompt
        self._head = render.ids(text[:prompt])
        self.ids = whole = render.ids(text)
        self._known = Span(0, 0)  # characters, and their ids, up to a token that splits the text
        self._prefix_matches = whole[: len(self._head)] == self._head
        if not self._prefix_matches:
            # A token spans the border. The target starts after the prompt, so encode both separately.
            self.ids = self._head + render.ids(text[prompt:])
            decode = partial(render.tokenizer.decode, clean_up_tokenization_spaces=False)
            if decode(self.ids) != decode(whole):
                raise UserError(
                    "target: its tokenizer joins a prompt and its answer, and writes the answer by itself "
                    "differently, so no loss mask can be read off them"
                )

    def count(self, characters: int) -> int | None:
        """Number of ids of the first `characters` characters; None if an id spans the border.

        Calls with growing numbers encode each character about once, since ids before a token that splits the
        text do not depend on later text.
        """
        if not self._prefix_matches and characters > self._prompt:
            part = self._head + self._render.ids(self._text[self._prompt : characters])
            return len(part) if self.ids[: len(part)] == part else None
        if characters < self._known.start:
            self._known = Span(0, 0)
        start, count = self._known
        place = start
        for match in self._render.added.splits.finditer(self._text, start, characters):
            place = match.start()
        if place > start:
            count += len(self._render.ids(self._text[start:place]))
            self._known = Span(place, count)
        part = self._render.ids(self._text[place:characters])
        return count + len(part) if self.ids[count : count + len(part)] == part else None


class _FinalAnswer(NamedTuple):
    """An answer that ends its conversation: its span and the rendered text."""

    span: Span
    text: str

    @property
    def parts(self) -> tuple[str, str]:
        """The answer, and the text before it."""
        return self.text[self.span.start :], self.text[: self.span.start]


def _final_answer(render: TemplateRenderer, messages: Sequence[Message]) -> _FinalAnswer | None:
    """Span of the last message; None if the template refuses the conversation or rewrites the prompt."""
    try:
        before, after = render.text(messages[:-1], prompt=True), render.text(messages)
    except UserError:  # templates may reject a partial conversation
        return None
    return _FinalAnswer(Span(len(before), len(after)), after) if after.startswith(before) else None


def _earlier(
    render: TemplateRenderer, messages: Sequence[Message], text: str, frame: AnswerFrame
) -> Iterator[Answer]:
    """Yield earlier answers that the text contains unchanged, except for their end token."""
    for i, message in enumerate(messages[:-1]):
        if message["role"] != "assistant" or not i:  # an opening message answers nothing
            continue
        if (final := _final_answer(render, messages[: i + 1])) is None:
            continue
        start, stop = frame.fit(*final)
        if text.startswith(final.text[:stop]):
            yield Answer(i, [Span(start, stop)])
        elif frame.token and final.text[start:stop].endswith(frame.token):
            stop -= len(frame.token)
            if text.startswith(final.text[:stop]) and text.startswith(frame.between or "\0", stop):
                yield Answer(i, [Span(start, stop)])


def _is_whole(
    render: TemplateRenderer, messages: Sequence[Message], text: str, answer: Answer, frame: AnswerFrame
) -> bool:
    """Whether the text contains an answer with all its parts; if not, it is context.

    Raises:
        UserError: it contains an end token; or a part is missing even if the answer ends the conversation.
    """
    message = messages[answer.number]
    ends = {*frame.tokens, str(render.tokenizer.eos_token or frame.token)} - {""}
    for part in parts(message):
        if found := next((token for token in ends if token in part.text), None):
            raise UserError(
                f"rollout=given: {part.what.format(repr(shortened(part.text)))} has {found!r} in it, at "
                "which the target ends its answers"
            )
    own, is_last = "\0".join(text[a:b] for a, b in answer.spans), answer.number == len(messages) - 1
    if frame.header and own.startswith(frame.header):
        if is_last:
            raise UserError(DIFFERS)
        return False
    if not (fault := fault_in_answer(message, own, text[: answer.spans[0].start])):
        return True
    if not is_last:
        final = _final_answer(render, messages[: answer.number + 1])
        fault = final and fault_in_answer(message, *final.parts)
    if fault:
        raise UserError(f"target: its chat template {fault}, so the answer cannot be trained on")
    return False


def _check_prompt(messages: Sequence[Message], text: str, more: str = "") -> None:
    """Raise if a text of users, tools or the system is missing."""
    if fault := fault_in_prompt(messages, text):
        raise IncompletePromptError(f"target: its chat template {fault}{more}")


def _blanked(text: str, spans: Sequence[Span]) -> str:
    """The text with blanks instead of its spans."""
    for start, end in spans:
        text = text[:start] + "\0" * (end - start) + text[end:]
    return text
