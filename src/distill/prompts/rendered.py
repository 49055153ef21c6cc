"""Detect texts that are already rendered: a chat template would add its tokens a second time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from decode.errors import UserError
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message, Prompt
from distill.prompts.templates.rendering import Tools

OPTIONAL = re.compile("think|reason")  # tokens allowed in texts: they enclose reasoning
# Beginnings of conversations in formats of other templates, up to the answer where a user may write the rest.
FORMATS = (
    r"<\|im_start\|>\s*(?:system|user|assistant)\b",
    r"<\|start_header_id\|>\s*(?:system|user|assistant)\b",
    r"<\|header_start\|>.*<\|header_start\|>\s*assistant",
    r"<\|start_of_role\|>.*<\|start_of_role\|>\s*assistant",
    r"<\|start\|>(?:system|developer|user).*<\|start\|>assistant",
    r"<\|START_OF_TURN_TOKEN\|>.*<\|CHATBOT_TOKEN\|>",
    "<\uff5cUser\uff5c>.*<\uff5cAssistant\uff5c>",
    r"<start_of_turn>.*<start_of_turn>\s*model",
    r"<\|(?:user|system|prompter)\|>.*<\|assistant\|>",
    r"(?:\[SYSTEM_PROMPT\].*)?\[INST\].*\[/INST\]",
    r"<human>:.*<bot>:",
    r"GPT4 (?:Correct )?User:.*GPT4 (?:Correct )?Assistant:",
    r"(?:Below is an instruction\b.*)?### Instruction:.*### Response:",
    r"### (?:Human|User):.*### Assistant:",
    r"(?:A chat between\b.*)?USER:.*\bASSISTANT:",
    r"(?:System:.*)?Human:.*\n\s*Assistant:",
    r"(?:System:.*)?User:.*\n\s*Assistant:\s*\Z",  # otherwise a transcript that the question is about
)
STARTS = (
    *("<s>", "<bos>", r"<\|begin_of_text\|>", "<BOS_TOKEN>"),
    *("<\uff5cbegin\u2581of\u2581sentence\uff5c>", r"\[gMASK\]<sop>"),
)
BEGUN = re.compile(rf"(?:{'|'.join(STARTS)})?\s*(?:{'|'.join(FORMATS)})", re.DOTALL)
# Each contains one of these.
BEGINNINGS = rb"<\|im_start\|>|<\|start_header_id\|>"
ANSWERS = rb"[Aa]ssistant|ASSISTANT:|CHATBOT|<bot>|<start_of_turn>|\[/INST\]|### Response:"
# Their rendering shows the text that a template writes around system texts and answers.
TURNS: tuple[list[Message], ...] = (
    [{"role": "system", "content": "."}, {"role": "user", "content": "."}],
    [{"role": role, "content": "."} for role in ("user", "assistant", "user")],
)


class RenderedTexts:
    """Finds texts that contain the tokens that a chat template writes around a user's message.

    Such a token inside a text would act as the template's own. Tokens that begin and end a whole text (`<s>`
    is also HTML) count only at its beginning and end. A user's text that begins like a conversation in
    another template's format counts too.

    Args:
        chat: chat with the template; without a template, nothing is found.
    """

    def __init__(self, chat: Chat) -> None:
        before, after = _around(chat)
        tokenizer = chat.tokenizer
        added = {t.content for t in tokenizer.added_tokens_decoder.values()} | {*tokenizer.all_special_tokens}
        around = before + after + "".join(_turns(chat))
        written = {t for t in added if t.strip() and t in around and not OPTIONAL.search(t)}
        ends = (tokenizer.bos_token, tokenizer.eos_token) if before + after else ("", "")
        self.first, self.last = (str(token or "") for token in ends)
        if self.last and self.last in after:  # it ends a user's turn too
            self.last = ""
        self.inside = sorted(written - {self.first, self.last})
        marks = [chunk.split()[-1] for chunk in (before, after) if chunk.strip()]  # [INST], [/INST]
        self.marks = marks if len(marks) == 2 and all(re.search(r"[<\[|]", mark) for mark in marks) else []
        tokens = filter(None, (*self.inside, *self.marks[:1], self.first, self.last))
        quick = [json.dumps(token, ensure_ascii=False)[1:-1] for token in tokens]  # as prompts are packed
        self.rendered = bool(before + after)
        known = [re.escape(token).encode() for token in quick]
        self.quick = re.compile(b"|".join([*known, BEGINNINGS, ANSWERS]) if self.rendered else b"(?!)")

    def fault(self, prompt: Prompt) -> str:
        """Why a prompt cannot be rendered; empty if it can."""
        return self.fault_of(prompt.messages, prompt.tools) if self.quick.search(prompt.packed) else ""

    def fault_of(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Why these messages cannot be rendered; empty if they can."""
        if token := next(filter(None, map(self._found, _texts(list(tools)))), ""):
            return f"tools: {token} in a schema belongs to the chat template; leave it out"
        for number, message in enumerate(messages, 1):
            parts = [message["content"], message.get("reasoning_content", ""), message.get("tool_calls")]
            for text in _texts(parts):
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
        if found := min(((text.find(token), token) for token in self.inside if token in text), default=None):
            return found[1]
        if self.first and text.startswith(self.first):
            return self.first
        if self.last and text.endswith(self.last):
            return self.last
        return self.marks[0] if self.marks and all(mark in text for mark in self.marks) else ""


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from map(str, value)
        yield from (text for inner in value.values() for text in _texts(inner))
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _texts(inner))


def _turns(chat: Chat) -> Iterator[str]:
    """Renderings of TURNS that the template accepts."""
    for messages in TURNS if chat.template == "chat" else ():
        with suppress(UserError):
            yield chat.text(messages)


def _around(chat: Chat) -> tuple[str, str]:
    """Text that the template writes before a user's text, and between it and the answer."""
    if chat.template == "none":
        return "", ""
    try:
        before, after = chat.user_turn()
    except UserError:  # the refusal is reported for each conversation
        return "", ""
    return str(chat.tokenizer.decode(before)), str(chat.tokenizer.decode(after))
