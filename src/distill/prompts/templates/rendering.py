"""Render conversations with transformers' chat templates, within limits and at a fixed moment."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.clock import NAME, Clock, KnownFormats, coarsest, use_clock
from distill.prompts.templates.faults import REASONING, shortened
from distill.prompts.templates.limits import TooMuchWork, render_within_limits

Tools = Sequence[dict[str, Any]]
# Conversations that show whether a template reads the clock.
PROBES: list[list[Message]] = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class RefusedByTemplateError(UserError):
    """The template refuses a conversation: a role, the order of roles, tools, a type."""


class Rendering:
    """Renders with a tokenizer's template.

    Args:
        tokenizer: tokenizer with the template.
        options: options of the template.
        moment: date and time for the template; parts that it does not render are removed.

    Attributes:
        moment: ISO; "" if the template renders no date or time.

    Raises:
        UserError: the template renders no conversation within the limits.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], moment: datetime
    ) -> None:
        self.tokenizer, self.options = tokenizer, dict(options)
        clock = Clock(moment)
        self._clock: Clock = clock
        for messages in PROBES if NAME in str(tokenizer.chat_template) else PROBES[:1]:
            for tools in (None, [TOOL]):
                self._probe(messages, tools)
        self.moment = coarsest(moment, clock.asked).isoformat() if clock.asked else ""
        self._clock = KnownFormats(
            datetime.fromisoformat(self.moment) if self.moment else moment, clock.asked
        )

    def having(self, options: Mapping[str, Any]) -> Self:
        """The same template and moment with additional options."""
        other = copy.copy(self)
        other.options = self.options | dict(options)
        return other

    def _probe(self, messages: list[Message], tools: Tools | None) -> None:
        try:
            self._text(messages, tools, prompt=True)
        except TooMuchWork as error:
            raise UserError(f"target: its chat template cannot be used: {error}") from None
        except Exception:  # templates may reject roles or tools; rejected prompts are omitted
            return

    def text(self, messages: Sequence[Message], tools: Tools | None, prompt: bool = False) -> str:
        """Render the conversation; a `prompt` ends where the assistant's next message begins.

        Raises:
            RefusedByTemplateError: the template refuses it, fails, exceeds a limit, or renders it differently
                each time.
        """
        try:
            return self._text(messages, tools, prompt)
        except Exception as error:  # a template is a program that may raise anything
            raise RefusedByTemplateError(_refusal(messages, error)) from None

    def _text(self, messages: Sequence[Message], tools: Tools | None, prompt: bool) -> str:
        template = self.template(tools)
        seen = {
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        names = {**self.tokenizer.special_tokens_map, **self.options}
        counted = render_within_limits(template, names | seen, self._clock)
        text = self._rendered(template, messages, tools, prompt)
        # Transformers may preprocess messages in unknown ways; then compare two of its renderings.
        if text != counted and text != self._rendered(template, messages, tools, prompt):
            raise jinja2.TemplateError("it renders the same conversation differently each time")
        return text

    def _rendered(self, template: str, messages: Sequence[Message], tools: Tools | None, prompt: bool) -> str:
        with use_clock(template, self._clock):
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=prompt,
                **self.options,
            )
        assert isinstance(text, str)
        return text

    def template(self, tools: Tools | None) -> str:
        """Source of the template for these tools; some models have a separate one for tools."""
        try:
            return self.tokenizer.get_chat_template(None, tools)  # pyright: ignore[reportArgumentType]
        except ValueError:  # several templates without a default
            named = ", ".join(sorted(map(str, self.tokenizer.chat_template or ())))
            raise UserError(
                f"target: of its chat templates ({named}) none is the default; call one 'default'"
            ) from None

    def blocks(self, messages: Sequence[Message], tools: Tools | None) -> list[tuple[int, int]]:
        """Start and end characters of a rendered conversation's `{% generation %}` blocks.

        `apply_chat_template` rounds blocks outwards to tokens and drops those with a character outside of
        tokens; these are the characters.
        """
        template = self.template(tools)
        try:
            with use_clock(template, self._clock):
                _, blocks = render_jinja_template(
                    [[{k: v for k, v in message.items() if v is not None} for message in messages]],
                    tools=tools,  # pyright: ignore[reportArgumentType]
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **{**self.tokenizer.special_tokens_map, **self.options},
                )
        except Exception as error:  # a template may raise anything
            raise RefusedByTemplateError(_refusal(messages, error)) from None
        return [(int(start), int(end)) for start, end in blocks[0]]


def _normalized(message: Message) -> Message:
    """A message without null fields, with its reasoning under the keys that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _refusal(messages: Sequence[Message], error: Exception) -> str:
    start = shortened(str(messages[0].get("content") or "")) if messages else ""
    reason = (str(error).splitlines() or [""])[0][:200]
    if not isinstance(error, jinja2.TemplateError | TypeError):
        reason = f"{type(error).__name__}: {reason}"
    return f"target: its chat template refuses the prompt {start!r}: {reason}"
