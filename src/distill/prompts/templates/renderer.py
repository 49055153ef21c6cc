"""A chat template with its tokenizer: renders conversations in a form that the template accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.faults import as_object
from distill.prompts.templates.rendering import RefusedByTemplateError, Rendering, Tools

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
OURS = ("train",)  # our own keys of a message, hidden from templates


class IncompletePromptError(UserError):
    """The rendered prompt lacks a text of users, tools or the system."""


class Span(NamedTuple):
    """Characters `start` (included) to `end` (excluded) of a text."""

    start: int
    end: int


class Answer(NamedTuple):
    """Spans of a rendered conversation that belong to one message of the assistant."""

    number: int  # number of the message
    spans: list[Span]


class AddedTokens(NamedTuple):
    """Patterns of a tokenizer's added tokens."""

    any: re.Pattern[str]
    splits: re.Pattern[str]  # tokens that split a text before it is tokenized

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Patterns for a tokenizer, without tokens of white space."""
        tokens = list(tokenizer.added_tokens_decoder.values())
        plain = [t for t in tokens if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
        names = {t.content for t in tokens} | set(tokenizer.all_special_tokens)
        return cls(_any_of(n for n in names if n.strip()), _any_of(t.content for t in plain))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern of any of these texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or "(?!)")


@dataclass(frozen=True)
class Form:
    """Form of messages that a template expects.

    Attributes:
        text_arguments: arguments of calls as JSON text, as in OpenAI's API (DeepSeek-V3's template).
        typed_content: contents as a list of typed parts (templates of vision models).
    """

    text_arguments: bool = False
    typed_content: bool = False

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Convert messages to this form."""
        return [self._message(message) for message in messages]

    def changes(self, messages: Sequence[Message]) -> bool:
        """Whether this form differs from the plain one for these messages."""
        calls = any(message.get("tool_calls") for message in messages)
        return self == Form() or self.typed_content or (self.text_arguments and calls)

    def printed(self, messages: Sequence[Message], text: str) -> bool:
        """Whether a template that does not support this form has printed its objects."""
        objects: list[Any] = []
        for message in self.apply(messages):
            if self.typed_content and message.get("content"):
                objects.append(message["content"])
            if self.text_arguments:
                objects += [
                    call.get("function", call)["arguments"] for call in message.get("tool_calls") or []
                ]
        spellings = [json.dumps(thing, ensure_ascii=False) for thing in objects]
        spellings += [str(thing) for thing in objects if not isinstance(thing, str)]
        return any(spelling in text for spelling in spellings)

    def _message(self, message: Message) -> Message:
        message = {key: value for key, value in message.items() if key not in OURS}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in calls]
        if self.typed_content and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = as_object(function.get("arguments"))
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function


# Tried in this order; the first one that loses nothing is used.
FORMS = (Form(), Form(text_arguments=True), Form(typed_content=True), Form(True, True))


class TemplateRenderer:
    """Renders conversations as text.

    Args:
        rendering: the template with its options.
        tools: schemas of functions that may be called.
        form: form of the messages.
        added: the tokenizer's added tokens; None: read them.

    Attributes:
        template: source of the template.
    """

    def __init__(
        self,
        rendering: Rendering,
        tools: Tools = (),
        form: Form = FORMS[0],
        added: AddedTokens | None = None,
    ) -> None:
        self.rendering, self.tokenizer, self.form = rendering, rendering.tokenizer, form
        self.tools = list(tools) or None
        self.added = added or AddedTokens.of(self.tokenizer)
        self.template = rendering.template(self.tools)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text; templates write the special tokens themselves."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Render the conversation; a `prompt` ends where the assistant's next message begins.

        Raises:
            RefusedByTemplateError: see `Rendering.text`; or the template prints the objects of this form.
        """
        text = self.rendering.text(self.form.apply(messages), self.tools, prompt)
        if self.form.printed(messages, text):
            raise RefusedByTemplateError("target: its chat template reads contents only as text")
        return text

    def generation_spans(self, messages: Sequence[Message]) -> list[Span] | None:
        """Character spans of the template's `{% generation %}` blocks; None if there are none."""
        if not GENERATION.search(self.template):
            return None
        return [Span(*block) for block in self.rendering.blocks(self.form.apply(messages), self.tools)]


def common_start(one: str, other: str) -> str:
    """Longest common prefix of two texts."""
    differs = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differs, min(len(one), len(other)))]
