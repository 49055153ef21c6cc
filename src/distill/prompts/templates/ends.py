"""End tokens of answers: from the chat template, the tokenizer and the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.prompts.prompt import Message
from distill.prompts.templates.renderer import Span, TemplateRenderer, common_start

MARK = "\u2407"
SYSTEM: Message = {"role": "system", "content": "."}
QUESTION: Message = {"role": "user", "content": "?"}
LONGER: Message = {
    "role": "user",
    "content": "Which river runs through the capital of France, and how long is it?",
}
# Conversations up to an answer; a template may require a system message or more.
STARTS = ([QUESTION], [SYSTEM, QUESTION], [LONGER], [SYSTEM, LONGER])
ANSWER: Message = {"role": "assistant", "content": MARK}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": MARK, "arguments": {}}}],
}
RESULT: Message = {"role": "tool", "name": MARK, "content": "."}


class AnswerFrame(NamedTuple):
    """Text that a template writes around an answer.

    Attributes:
        header: first token that a prompt adds to a question; empty if it adds no token.
        token: token after an answer, which the target writes; empty if there is none.
        tail: further text of the template, at the end of a conversation.
        between: tokens directly after earlier answers: gpt-oss has `<|end|>` there and `<|return|>` after
            the last one; GLM-4 has the next turn's `<|user|>` or `<|observation|>`.
    """

    header: str = ""
    token: str = ""
    tail: str = ""
    between: tuple[str, ...] = ()

    def fit(self, span: Span, text: str) -> Span:
        """The span, extended by the end token and shortened by the tail."""
        start, end = span
        place = text.rfind(self.token, start, end) + len(self.token)
        if self.token and place >= start + len(self.token) and self.tail.startswith(text[place:end]):
            return Span(start, place)
        found = next((token for token in self.tokens if text.startswith(token, end)), "")
        return Span(start, end + len(found))

    @property
    def tokens(self) -> tuple[str, ...]:
        """All tokens that may end an answer."""
        return tuple(dict.fromkeys([*([self.token] if self.token else []), *self.between]))


@dataclass(frozen=True)
class Ends:
    """Tokens that end an answer, by source.

    Attributes:
        generation: from generation_config.json, or else config.json.
        tokenizer: the tokenizer's end token; empty if it has none.
        template: tokens that the chat template writes after an answer.
    """

    generation: tuple[int, ...]
    tokenizer: tuple[int, ...]
    template: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """All of them, starting with those of the model's files."""
        return list(dict.fromkeys([*self.generation, *self.tokenizer, *self.template]))

    def remark(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Describe a disagreement of the sources in one line; None if the model's files name all ends."""
        unknown = [token for token in self.ids if token not in self.generation]
        if not unknown:
            return None
        writers = [
            f"its {name} ends answers with {_named(tokens, tokenizer)}"
            for name, tokens in (("chat template", self.template), ("tokenizer", self.tokenizer))
            if set(tokens) & set(unknown)
        ]
        files = f"names {_named(self.generation, tokenizer)}" if self.generation else "names no end token"
        return (
            f"target: {' and '.join(writers)}, and generation_config.json {files}; answers end at all of "
            "them here, and an engine may need the same list"
        )


def find_frame(render: TemplateRenderer, starts: Sequence[Sequence[Message]] = STARTS) -> AnswerFrame:
    """Infer the text around an answer by rendering known conversations.

    Args:
        render: the template.
        starts: conversations up to an answer; the first one that the template accepts is used.
    """
    asked = next((start for start in starts if _after(render, [*start, ANSWER]) is not None), None)
    if asked is None:
        return AnswerFrame()
    last = _after(render, [*asked, ANSWER]) or ""
    between = _after(render, [*asked, ANSWER, asked[-1]]) or ""
    shared = common_start(last, between)
    # Text after the answer in both places belongs to it. Otherwise, the template adds text to whole
    # conversations (Phi-3), or ends the last answer differently.
    places = list(render.added.any.finditer(shared))
    eos = render.tokenizer.eos_token
    closing = next((m for m in places if m.group() == eos), places[-1] if places else None)
    closing = closing or render.added.any.search(last)
    token = closing.group() if closing else ""
    following = [_first(render, between), "" if token else _after_call(render, asked)]
    return AnswerFrame(
        _first(render, prompt_header(render, asked) or ""),
        token,
        last[closing.end() :] if closing else "",
        tuple(dict.fromkeys(filter(None, following))),
    )


def template_ends(render: TemplateRenderer) -> list[int]:
    """Ids of the tokens that a template writes after an answer at the end of a conversation.

    If there are none, the first token of the next turn ends an answer, including that of a tool's result.
    """
    end = find_frame(render)
    ids = [render.ids(token) for token in ([end.token] if end.token else end.between)]
    return [one[0] for one in ids if len(one) == 1]


def prompt_header(render: TemplateRenderer, messages: Sequence[Message]) -> str | None:
    """Text that a prompt adds to its messages; None if the template refuses them without an answer."""
    try:
        prompt, plain = (render.text(messages, prompt=is_prompt) for is_prompt in (True, False))
    except UserError:
        return None
    border = len(common_start(prompt, plain))
    tokens = render.added.any.finditer(prompt)
    border = next((token.start() for token in tokens if token.start() < border < token.end()), border)
    return prompt[border:]


def _after_call(render: TemplateRenderer, asked: Sequence[Message]) -> str:
    """Token directly after a call that a result follows; empty if there is none."""
    try:
        call, answered = (render.text([*asked, CALL, *more]) for more in ((), (RESULT,)))
    except UserError:
        return ""
    if MARK not in call or not answered.startswith(call):
        return ""
    return _first(render, answered.removeprefix(call))


def _first(render: TemplateRenderer, text: str) -> str:
    """The added token at the start of a text; empty if there is none."""
    found = render.added.any.match(text)
    return found.group() if found else ""


def _after(render: TemplateRenderer, messages: Sequence[Message]) -> str | None:
    """Text that a template writes after the answer MARK; None if it refuses the conversation."""
    try:
        _, mark, behind = render.text(messages).rpartition(MARK)
    except UserError:
        return None
    return behind if mark else ""


def _named(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(named_token(token, tokenizer) for token in tokens)


def named_token(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token's text and id; only the id if the tokenizer has no such token."""
    if not 0 <= token < len(tokenizer):
        return str(token)
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"
