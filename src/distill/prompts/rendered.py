"""Texts that are rendered already: a chat template would write its tokens about them a second time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message, Prompt

OPTIONAL = re.compile("think|reason")  # tokens that a text may have: reasoning stands between them
# Beginnings of whole conversations in the formats of other templates, up to where an answer begins.
FORMATS = (
    r"<\|im_start\|>.*<\|im_start\|>\s*assistant",
    r"<\|start_header_id\|>.*<\|start_header_id\|>\s*assistant",
    r"<start_of_turn>.*<start_of_turn>\s*model",
    r"<\|(?:user|system)\|>.*<\|assistant\|>",
    r"\[INST\].*\[/INST\]",
    r"(?:Below is an instruction\b.*)?### Instruction:.*### Response:",
    r"### (?:Human|User):.*### Assistant:",
    r"(?:A chat between\b.*)?USER:.*\bASSISTANT:",
    r"Human:.*\n\s*Assistant:",
)
BEGUN = re.compile(rf"(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(?:{'|'.join(FORMATS)})", re.DOTALL)
ANSWERS = (
    rb"assistant|Assistant:|ASSISTANT:|<start_of_turn>|\[/INST\]|### Response:"  # one is in each of them
)


class RenderedTexts:
    """Finds texts with the tokens that a chat template writes around a user's message.

    Such a token inside a text reads as the template's own. The tokens that begin and end a whole text
    (`<s>` is also HTML) count only at its beginning and its end. A user's text that begins as a conversation
    in the format of another template counts, too.

    Args:
        chat: whose template; without one nothing is found.
    """

    def __init__(self, chat: Chat) -> None:
        before, after = _around(chat)
        tokenizer = chat.tokenizer
        added = {t.content for t in tokenizer.added_tokens_decoder.values()} | {*tokenizer.all_special_tokens}
        written = {t for t in added if t.strip() and t in before + after and not OPTIONAL.search(t)}
        ends = (tokenizer.bos_token, tokenizer.eos_token) if before + after else ("", "")
        self.first, self.last = (str(token or "") for token in ends)
        self.inside = sorted(written - {self.first, self.last})
        marks = [chunk.split()[-1] for chunk in (before, after) if chunk.strip()]  # [INST], [/INST]
        self.marks = marks if len(marks) == 2 and all(re.search(r"[<\[|]", mark) for mark in marks) else []
        tokens = filter(None, (*self.inside, *self.marks[:1], self.first, self.last))
        quick = [json.dumps(token, ensure_ascii=False)[1:-1] for token in tokens]  # as prompts are packed
        self.rendered = bool(before + after)
        known = [re.escape(token).encode() for token in quick]
        self.quick = re.compile(b"|".join([*known, ANSWERS]) if self.rendered else b"(?!)")

    def fault(self, prompt: Prompt) -> str:
        """Why a prompt cannot be rendered; empty if it can."""
        return self.fault_of(prompt.messages) if self.quick.search(prompt.packed) else ""

    def fault_of(self, messages: Sequence[Message]) -> str:
        """Why these messages cannot be rendered; empty if they can."""
        for number, message in enumerate(messages, 1):
            for text in (message["content"], message.get("reasoning_content", "")):
                if token := self._found(text.strip()):
                    return (
                        f"message {number} ({message['role']}): a text that is rendered already: {token} "
                        "belongs to the chat template; leave it out, or set prompts.template=none"
                    )
            if self.rendered and message["role"] == "user" and BEGUN.match(message["content"].strip()):
                return (
                    f"message {number} (user): a conversation that is rendered already, in another format "
                    "than the chat template's; give it as messages, or set prompts.template=none"
                )
        return ""

    def _found(self, text: str) -> str:
        if token := next((token for token in self.inside if token in text), ""):
            return token
        if self.first and text.startswith(self.first):
            return self.first
        if self.last and text.endswith(self.last):
            return self.last
        return self.marks[0] if self.marks and all(mark in text for mark in self.marks) else ""


def _around(chat: Chat) -> tuple[str, str]:
    """What the template writes before a user's text and behind it, up to the answer."""
    if chat.template == "none":
        return "", ""
    try:
        before, after = chat.user_turn()
    except UserError:  # it refuses such a conversation, and will say so of each
        return "", ""
    return str(chat.tokenizer.decode(before)), str(chat.tokenizer.decode(after))
