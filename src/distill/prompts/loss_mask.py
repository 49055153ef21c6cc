"""Which tokens of a rendered conversation the target wrote, its end tokens included.

What the target would be given at each answer is rendered (`add_generation_prompt`), and so is the
conversation up to the end of that answer; the answer is what the second has over the first. All of
it is compared again as token ids, since a tokenizer may join characters over a border.
"""

from __future__ import annotations

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
    """Characters `start` to `end` of a text, the latter not included."""

    start: int
    end: int


class Renderer(Protocol):
    """A template with its tokenizer."""

    tokenizer: PreTrainedTokenizerBase

    def ids(self, text: str) -> list[int]:
        """Of a text in which the special tokens are written out."""
        ...

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """A conversation; a `prompt` ends where the assistant's next message begins."""
        ...

    def marked(self, messages: Sequence[Message]) -> list[Span] | None:
        """What the template itself says the assistant wrote; None: it does not say."""
        ...


class Closing(NamedTuple):
    """How the template closes an answer: with the end token, which the target writes, and then with
    a tail (a new line, say), which it does not.
    """

    end: str
    tail: str

    def fit(self, span: Span, text: str) -> Span:
        """The span with the end token and without the tail."""
        start, end = span
        if text[start:end].endswith(self.end + self.tail):
            return Span(start, end - len(self.tail))
        return Span(start, end + len(self.end)) if text.startswith(self.end, end) else span


def supervise(render: Renderer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a conversation that ends with an answer, and 1 where the assistant wrote them.

    The last answer is supervised exactly: its prompt is encoded as the target would be given it, and
    the answer behind that. An earlier answer is supervised where the conversation still holds it as
    the target wrote it: not where the template has dropped its reasoning, say, nor where the
    tokenizer joins its first characters to the prompt's last.

    Raises:
        UserError: the last answer does not extend its prompt, or has none, or calls and reasoning are not
            in it.
    """
    if len(messages) < 2:
        raise UserError("rollout=given: a record of one answer alone has no prompt to train it behind")
    text, prompt = render.text(messages), render.text(messages[:-1], prompt=True)
    if not text.startswith(prompt):
        raise UserError(DIFFERS)
    _check_whole(messages, text, text[len(prompt) :])
    closing = _closing(render, messages)
    blocks = render.marked(messages)
    if blocks is None:
        spans = [*_earlier(render, messages, text, closing), Span(len(prompt), len(text))]
    elif sum(end - start for start, end in blocks) == len(text):
        spans = [Span(0, len(text))]
    else:
        # The prompt may end with what the block begins with: a reasoning block that is empty by order.
        spans = [Span(max(a, len(prompt)) if b > len(prompt) else a, b) for a, b in blocks]
    tokens = Tokens(render, text, len(prompt))
    mask = [0] * len(tokens.ids)
    for span in (closing.fit(s, text) for s in spans if s.end > s.start):
        first, last = tokens.count(span.start), tokens.count(span.end)
        if first is not None and last is not None:
            mask[first:last] = [1] * (last - first)
        elif span.end > len(prompt):
            raise UserError(DIFFERS)
    return tokens.ids, mask


class Tokens:
    """The ids of a text that begins with a prompt, such that they begin with the prompt's.

    Raises:
        UserError: the tokenizer cannot encode what is behind the prompt by itself.
    """

    def __init__(self, render: Renderer, text: str, prompt: int) -> None:
        self._render, self._text, self._prompt = render, text, prompt
        self._head = render.ids(text[:prompt])
        self.ids = whole = render.ids(text)
        self._joined = whole[: len(self._head)] == self._head
        if not self._joined:
            # A token spans the border, which the target cannot write: it begins behind the prompt.
            self.ids = self._head + render.ids(text[prompt:])
            decode = partial(render.tokenizer.decode, clean_up_tokenization_spaces=False)
            if decode(self.ids) != decode(whole):
                raise UserError(
                    "target: its tokenizer joins a prompt and its answer, and writes the answer by itself "
                    "differently, so no loss mask can be read off them"
                )

    def count(self, characters: int) -> int | None:
        """How many ids these first characters are; None where an id spans the border."""
        if self._joined or characters <= self._prompt:
            part = self._render.ids(self._text[:characters])
        else:
            part = self._head + self._render.ids(self._text[self._prompt : characters])
        return len(part) if self.ids[: len(part)] == part else None


def _earlier(render: Renderer, messages: Sequence[Message], text: str, closing: Closing) -> Iterator[Span]:
    """Answers before the last one that the text holds as they were written."""
    for i, message in enumerate(messages[:-1]):
        if message["role"] != "assistant" or not i:  # what opens a conversation answers nothing
            continue
        try:
            before, after = render.text(messages[:i], prompt=True), render.text(messages[: i + 1])
        except UserError:
            continue  # refused by itself, as a system's message without a user's may be
        if after.startswith(before):
            span = closing.fit(Span(len(before), len(after)), after)
            if text.startswith(after[: span.end]):
                yield span


def _closing(render: Renderer, messages: Sequence[Message]) -> Closing:
    """Read off an answer whose text is known."""
    shown = render.text([*messages[:-1], {"role": "assistant", "content": MARK}])
    _, found, after = shown.rpartition(MARK)
    known = {token.content for token in render.tokenizer.added_tokens_decoder.values()}
    known |= set(render.tokenizer.all_special_tokens)
    places = [(after.find(token), -len(token), token) for token in known if token.strip() and token in after]
    if not found or not places:
        return Closing("", "")
    place, _, end = min(places)
    return Closing(end, after[place + len(end) :])


def _check_whole(messages: Sequence[Message], text: str, answer: str) -> None:
    """Refuse a template that leaves out what the target wrote."""
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
