"""Loss mask of a rendered conversation: 1 for tokens that the target wrote, end tokens included.

For each answer, its prompt (`add_generation_prompt`) and the conversation up to its end are rendered; the
answer is the difference of the two. Borders are checked as token ids too, since a tokenizer may merge
characters across them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.prompts.prompt import Message

MARK = "\u2407"
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows
DIFFERS = (
    "target: its chat template renders an answer differently from its prompt, so no loss mask can be read "
    "off it; give its tokenizer a template whose answers begin where its prompts end"
)


class Span(NamedTuple):
    """Characters `start` (included) to `end` (excluded) of a text."""

    start: int
    end: int


class Renderer(Protocol):
    """A template with its tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    splits: re.Pattern[str]  # tokens that the tokenizer takes out of a text before it splits what is between

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that contains its special tokens."""
        ...

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The rendered conversation; a `prompt` ends where the assistant's next message begins."""
        ...

    def generation_spans(self, messages: Sequence[Message]) -> list[Span] | None:
        """Spans that the template marks as written by the assistant; None if it marks none."""
        ...


class AnswerEnd(NamedTuple):
    """How the template ends an answer: an end token, which the target writes, and an unsupervised tail."""

    end: str
    tail: str

    def fit(self, span: Span, text: str) -> Span:
        """The span, extended to include the end token and shortened to exclude the tail."""
        start, end = span
        if text[start:end].endswith(self.end + self.tail):
            return Span(start, end - len(self.tail))
        return Span(start, end + len(self.end)) if text.startswith(self.end, end) else span


def supervise(render: Renderer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation that ends with an answer, and their loss mask.

    The last answer is supervised exactly: its prompt is encoded as the target would get it, then the
    answer. Earlier answers are supervised if the conversation contains them as the target wrote them: not
    if the template drops their reasoning, or if the tokenizer merges their start with the prompt.

    Raises:
        UserError: the last answer does not extend its prompt, has no prompt, or lacks its tool calls or
            reasoning.
    """
    if len(messages) < 2:
        raise UserError("rollout=given: a record of one answer alone has no prompt to train it behind")
    text, prompt = render.text(messages), render.text(messages[:-1], prompt=True)
    if not text.startswith(prompt):
        raise UserError(DIFFERS)
    _check_whole(messages, text, text[len(prompt) :])
    answer_end = _find_answer_end(render, messages)
    blocks = render.generation_spans(messages)
    if blocks is None:
        spans = [*_earlier(render, messages, text, answer_end), Span(len(prompt), len(text))]
    elif sum(end - start for start, end in blocks) == len(text):
        spans = [Span(0, len(text))]
    else:
        # The prompt may include the start of the block: an empty reasoning block, for example.
        spans = [Span(max(a, len(prompt)) if b > len(prompt) else a, b) for a, b in blocks]
    tokens = Tokens(render, text, len(prompt))
    mask = [0] * len(tokens.ids)
    for span in (answer_end.fit(s, text) for s in spans if s.end > s.start):
        first, last = tokens.count(span.start), tokens.count(span.end)
        if first is not None and last is not None:
            mask[first:last] = [1] * (last - first)
        elif span.end > len(prompt):
            raise UserError(DIFFERS)
    return tokens.ids, mask


class Tokens:
    """Token ids of a text that starts with a prompt, such that the prompt's ids are a prefix.

    Raises:
        UserError: the tokenizer cannot encode the rest of the text separately.
    """

    def __init__(self, render: Renderer, text: str, prompt: int) -> None:
        self._render, self._text, self._prompt = render, text, prompt
        self._head = render.ids(text[:prompt])
        self.ids = whole = render.ids(text)
        self._known = Span(0, 0)  # characters, and ids of them, up to a token that splits the text
        self._prefix_matches = whole[: len(self._head)] == self._head
        if not self._prefix_matches:
            # A token spans the border. The target starts after the prompt, so encode the parts separately.
            self.ids = self._head + render.ids(text[prompt:])
            decode = partial(render.tokenizer.decode, clean_up_tokenization_spaces=False)
            if decode(self.ids) != decode(whole):
                raise UserError(
                    "target: its tokenizer joins a prompt and its answer, and writes the answer by itself "
                    "differently, so no loss mask can be read off them"
                )

    def count(self, characters: int) -> int | None:
        """Number of ids of the first `characters` characters; None if an id spans the border.

        Calls with growing numbers encode each character about once: ids before a token that splits the
        text do not depend on what follows it.
        """
        if not self._prefix_matches and characters > self._prompt:
            part = self._head + self._render.ids(self._text[self._prompt : characters])
            return len(part) if self.ids[: len(part)] == part else None
        if characters < self._known.start:
            self._known = Span(0, 0)
        start, count = self._known
        place = start
        for match in self._render.splits.finditer(self._text, start, characters):
            place = match.start()
        if place > start:
            count += len(self._render.ids(self._text[start:place]))
            self._known = Span(place, count)
        part = self._render.ids(self._text[place:characters])
        return count + len(part) if self.ids[count : count + len(part)] == part else None


def _earlier(
    render: Renderer, messages: Sequence[Message], text: str, answer_end: AnswerEnd
) -> Iterator[Span]:
    """Spans of earlier answers that the text contains unchanged."""
    for i, message in enumerate(messages[:-1]):
        if message["role"] != "assistant" or not i:  # an opening message answers nothing
            continue
        try:
            before, after = render.text(messages[:i], prompt=True), render.text(messages[: i + 1])
        except UserError:
            continue  # templates may reject a partial conversation
        if after.startswith(before):
            span = answer_end.fit(Span(len(before), len(after)), after)
            if text.startswith(after[: span.end]):
                yield span


def _find_answer_end(render: Renderer, messages: Sequence[Message]) -> AnswerEnd:
    """Find the end token and tail, by rendering a marker as the answer."""
    text = render.text([*messages[:-1], {"role": "assistant", "content": MARK}])
    _, marker, after = text.rpartition(MARK)
    ends = {token.content for token in render.tokenizer.added_tokens_decoder.values()}
    ends |= set(render.tokenizer.all_special_tokens)
    places = [(after.find(token), -len(token), token) for token in ends if token.strip() and token in after]
    if not marker or not places:
        return AnswerEnd("", "")
    place, _, end = min(places)
    return AnswerEnd(end, after[place + len(end) :])


def _check_whole(messages: Sequence[Message], text: str, answer: str) -> None:
    """Refuse a template that drops tool calls, or the reasoning of the last answer."""
    for i, message in enumerate(messages):
        last = i == len(messages) - 1
        calls = message.get("tool_calls") or []
        names = [call.get("function", call).get("name", "") for call in calls]
        if any(name not in (answer if last else text) for name in names):
            raise UserError("target: its chat template leaves out tool calls, so they cannot be trained on")
        reasoning = next((str(message[key]) for key in REASONING if message.get(key)), "")
        if last and reasoning.strip() not in answer:
            raise UserError(
                "target: its chat template leaves out the reasoning of an answer, so it cannot be trained on"
            )
