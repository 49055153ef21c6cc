"""Render conversations with a chat template to token ids and loss masks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decode.errors import UserError
from distill.prompts.loss_mask import Span, supervise
from distill.prompts.prompt import Message, unanswered
from distill.utils.provenance import digest

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
CALLS = {"truncation", "padding"}  # parts of a tokenizer's state that its last call has left
Tools = Sequence[dict[str, Any]]


class Chat:
    """A tokenizer's chat template, or plain text for models without one.

    Args:
        tokenizer: of the target.
        template: `chat` renders with the tokenizer's template, `none` joins the messages' text.
        options: passed to the template, as in `{"enable_thinking": False}`.

    Raises:
        UserError: `chat` with a tokenizer without a template, or options with `none`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str = "chat",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if template not in ("chat", "none"):
            raise UserError(f"prompts.template={template}: choose chat or none")
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                "target: its tokenizer has no chat template; base models need prompts.template=none"
            )
        if template == "none" and options:
            raise UserError("prompts.template_options: prompts.template=none has no template to take them")
        self.tokenizer, self.template, self.options = tokenizer, template, dict(options or {})
        self.splits = re.compile("|".join(map(re.escape, _splitting(tokenizer))) or "(?!)")

    def fingerprint(self) -> str:
        """Hash of all that token ids follow from: the tokenizer's rules and vocabulary, template and options."""
        tokenizer = self.tokenizer
        rules = [tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template, self.options]
        # The tokenizers package's own, with merges, normalisation and what is put around a text.
        if (whole := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            state = json.loads(whole.to_str())
            rules.append({name: state[name] for name in state if name not in CALLS})
        return digest(json.dumps(rules, sort_keys=True, default=str))

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids up to where the target's answer begins; a final answer is left out."""
        messages = unanswered(messages)
        if self.template == "none":
            return self._plain_ids("\n".join(_text_of(m) for m in messages))
        return self._ids(TemplateRenderer(self, tools).text(messages, prompt=True))

    def encode_answered(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Token ids of a whole conversation, and 1 where the assistant wrote them.

        With a template, see `loss_mask.supervise`; in plain text the last message is the answer.

        Raises:
            UserError: the mask is all 0 or all 1, or the answer does not extend its prompt.
        """
        if messages[-1]["role"] != "assistant":
            raise UserError("rollout=given: the record does not end with an answer")
        if self.template == "none":
            head = self.encode(messages)
            # Encoded separately, so that no token spans the border.
            answer = self.tokenizer.encode("\n" + _text_of(messages[-1]), add_special_tokens=False)
            ids, mask = head + answer, [0] * len(head) + [1] * len(answer)
        else:
            ids, mask = supervise(TemplateRenderer(self, tools), messages)
        if len(set(mask)) < 2:
            raise UserError(
                f"target: the chat template's loss mask is all {mask[0] if mask else 0}; "
                "nothing (or everything) would be trained on"
            )
        return ids, mask

    def user_turn(self) -> tuple[list[int], list[int]]:
        """Token ids before a user's text, and those after it up to where the answer begins."""
        if self.template == "none":
            start: Any = self.tokenizer.bos_token_id
            return ([] if start is None else [start]), []
        marker = "\u2407"
        text = TemplateRenderer(self).text([{"role": "user", "content": marker}], prompt=True)
        before, _, after = text.partition(marker)
        return self._ids(before), self._ids(after)

    def _plain_ids(self, text: str) -> list[int]:
        """Token ids of a text without a template; one that brings its own beginning token has one."""
        ids, first = self.tokenizer.encode(text), self.tokenizer.bos_token_id
        return ids[1:] if first is not None and ids[:2] == [first, first] else ids

    def _ids(self, text: str) -> list[int]:
        # Templates write the special tokens themselves.
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


class TemplateRenderer:
    """Renders conversations as text, with tools; implements `loss_mask.Renderer`."""

    def __init__(self, chat: Chat, tools: Tools = ()) -> None:
        self.chat, self.tools = chat, list(tools) or None
        self.ids, self.tokenizer, self.splits = chat._ids, chat.tokenizer, chat.splits

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The conversation; a `prompt` ends where the assistant's next message begins."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=self.tools,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=prompt,
                **self.chat.options,
            )
        except (TemplateError, TypeError) as error:  # templates may reject roles, their order, or tools
            start = str(messages[0].get("content") or "")[:60]
            raise UserError(f"target: its chat template refuses the prompt {start!r}: {error}") from None
        assert isinstance(text, str)
        return text

    def generation_spans(self, messages: Sequence[Message]) -> list[Span] | None:
        """Character spans of the template's `{% generation %}` blocks; None if it has no such block."""
        template = self.tokenizer.get_chat_template(None, self.tools)  # pyright: ignore[reportArgumentType]
        if not GENERATION.search(template):
            return None
        # `apply_chat_template` rounds blocks outwards to tokens, and drops them where a character is in
        # no token, so use the character spans.
        _, blocks = render_jinja_template(
            [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            tools=self.tools,  # pyright: ignore[reportArgumentType]
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.chat.options},
        )
        return [Span(int(start), int(end)) for start, end in blocks[0]]


def _splitting(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Added tokens that are found in a text as it is, with any text beside them, longest first."""
    tokens = tokenizer.added_tokens_decoder.values()
    plain = [t for t in tokens if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
    return sorted((t.content for t in plain if t.content), key=len, reverse=True)


def _text_of(message: Message) -> str:
    if not isinstance(message.get("content"), str):
        raise UserError(
            f"prompts.template=none: a message of the {message['role']} has no text, and without a chat "
            "template there is no other way to write it"
        )
    return message["content"]
