"""How a conversation becomes token ids, and which of them the target wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.prompts import Message
from distill.provenance import digest


class Chat:
    """A tokenizer's chat template, or plain text where there is none.

    Args:
        tokenizer: of the target.
        template: `chat` renders with the tokenizer's template, `none` joins the messages' text.

    Raises:
        UserError: `chat` asked of a tokenizer without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "chat") -> None:
        if template not in ("chat", "none"):
            raise UserError(f"prompts.template={template}: choose chat or none")
        if template == "chat" and not tokenizer.chat_template:
            raise UserError(
                "target: its tokenizer has no chat template; base models need prompts.template=none"
            )
        self.tokenizer, self.template = tokenizer, template

    def fingerprint(self) -> str:
        """Tells this vocabulary and template from another's."""
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return digest(vocabulary + str(self.tokenizer.chat_template))

    def encode(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids up to where the target's answer begins; an answer that ends them is left out."""
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if self.template == "none":
            return self.tokenizer.encode("\n".join(m["content"] for m in messages))
        return self._render(messages, tools, add_generation_prompt=True)["input_ids"]

    def encode_answered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], list[int]]:
        """Token ids of a whole conversation, and 1 where the assistant wrote them.

        The mask is the template's `{% generation %}` blocks; where it has none, what rendering
        without the last answer lacks.

        Raises:
            UserError: the mask came out all 0 or all 1, or the answer does not extend its prompt.
        """
        if messages[-1]["role"] != "assistant":
            raise UserError("rollout=given: the last message of every record must be the answer")
        if self.template == "none":
            head = self.encode(messages)
            # On its own, lest a token spans the border.
            answer = self.tokenizer.encode("\n" + messages[-1]["content"], add_special_tokens=False)
            ids, mask = head + answer, [0] * len(head) + [1] * len(answer)
        elif re.search(r"\{%-?\s*generation", str(self.tokenizer.chat_template)):
            out = self._render(messages, tools, return_assistant_tokens_mask=True)
            ids, mask = out["input_ids"], out["assistant_masks"]
        else:
            head, ids = self.encode(messages, tools), self._render(messages, tools)["input_ids"]
            if ids[: len(head)] != head:
                raise UserError(
                    "target: its chat template renders an answer differently from its prompt, so no "
                    "loss mask can be read off it; add {% generation %} marks to the template"
                )
            mask = [0] * len(head) + [1] * (len(ids) - len(head))
        if len(set(mask)) < 2:
            raise UserError(
                f"target: the chat template's loss mask is all {mask[0] if mask else 0}; "
                "nothing (or everything) would be trained on"
            )
        return [int(i) for i in ids], [int(m) for m in mask]

    def user_turn(self) -> tuple[list[int], list[int]]:
        """Ids before a user's text and ids after it, up to where the answer begins."""
        if self.template == "none":
            start: Any = self.tokenizer.bos_token_id
            return ([] if start is None else [start]), []
        marker = "\u2407"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(text).partition(marker)
        encode = self.tokenizer.encode
        return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=True, return_dict=True, **options
            )
        except TemplateError as error:  # templates may refuse roles, or their order
            start = messages[0]["content"][:60]
            raise UserError(f"target: its chat template refuses the prompt {start!r}: {error}") from None
