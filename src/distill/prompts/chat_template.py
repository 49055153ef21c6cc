"""Render conversations with a chat template to token ids and loss masks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from distill.prompts.prompt import Message, answered, turns, unanswered
from distill.prompts.templates.answer_parts import answer_parts
from distill.prompts.templates.clock import now, parse
from distill.prompts.templates.ends import AnswerFrame, Ends, find_frame, template_ends
from distill.prompts.templates.faults import fault_in_prompt, fault_in_tools
from distill.prompts.templates.loss_mask import check_short_texts, supervise
from distill.prompts.templates.renderer import (
    FORMS,
    AddedTokens,
    Form,
    IncompletePromptError,
    TemplateRenderer,
)
from distill.prompts.templates.rendering import RefusedByTemplateError, Rendering, Tools
from distill.utils.progress import say
from distill.utils.provenance import digest

CALLS = {"truncation", "padding"}  # state that a tokenizer keeps from its last call
# Options that switch a template's thinking on or off.
THINKS = re.compile(r"(?<![\w.'\"])(\w*think\w*)\s*(?:is\s+(?:not\s+)?defined|\|\s*default)")
NO_OTHER_WAY = "and without a chat template there is no way to write it"
T = TypeVar("T")
READING = 3  # version of the code; increased when ids or masks change


class Chat:
    """A tokenizer's chat template, or plain text for models without one.

    Args:
        tokenizer: tokenizer of the target.
        template: `chat` renders with the tokenizer's template, `none` joins the messages' text.
        options: options of the template, as in `{"enable_thinking": False}`.
        moment: ISO date or time for the template; None: now.

    Attributes:
        moment: date or time that is rendered; "" if the template renders none.

    Raises:
        UserError: `chat` with a tokenizer without a template, options with `none`, or an invalid moment.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str = "chat",
        options: Mapping[str, Any] | None = None,
        moment: str | None = None,
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
        time = parse(moment) if moment else now()
        self.rendering = Rendering(tokenizer, self.options, time) if template == "chat" else None
        self.moment = self.rendering.moment if self.rendering else ""
        self.added = AddedTokens.of(tokenizer)
        self._frames: dict[tuple[Form, str, bool, str], AnswerFrame] = {}
        self._noted = False  # whether the note about developers' messages was printed

    def fingerprint(self) -> str:
        """Hash of everything that determines token ids: tokenizer, template, options, moment, `READING`."""
        tokenizer = self.tokenizer
        rules: list[Any] = [READING, self.moment, tokenizer.get_vocab(), tokenizer.chat_template]
        rules += [tokenizer.special_tokens_map, self.options]
        # The tokenizers package's state: merges, normalization and post-processing.
        if (whole := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            state = json.loads(whole.to_str())
            rules.append({name: state[name] for name in state if name not in CALLS})
        return digest(json.dumps(rules, sort_keys=True, default=str))

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids up to the start of the target's answer; omits a final answer."""
        messages = unanswered(messages)
        if self.template == "none":
            if tools:
                raise UserError(f"prompts.template=none: the record has tools, {NO_OTHER_WAY}")
            return self._plain_ids("\n".join(_text_of(m) for m in messages))
        return self._ids(self._in_some_form(messages, tools, _prompt))

    def check_turns(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Render the turns after the first answer too, with answers of one word.

        Raises:
            UserError: the template refuses them, or omits texts of users or tools.
        """
        if self.template == "chat" and len(turns(unanswered(messages))) > 1:
            self.text(answered(messages, "Yes"), tools)

    def encode_answered(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Token ids of a whole conversation, and a mask with 1 where the assistant wrote them.

        With a template, see `loss_mask.supervise`; in plain text, the last message is the answer. An answer
        with `train: false` is context.

        Raises:
            UserError: the mask is all 0 or all 1, or the template omits content of the record.
        """
        if messages[-1]["role"] != "assistant":
            raise UserError("rollout=given: the record does not end with an answer")
        if all(m.get("train") is False for m in messages if m["role"] == "assistant"):
            raise UserError("rollout=given: no answer of the record is to be trained on (train: false)")
        if self.template == "none":
            head = self.encode(messages, tools)
            # Encoded separately, so that no token spans the border.
            answer = self.tokenizer.encode("\n" + _text_of(messages[-1]), add_special_tokens=False)
            ids, mask = head + answer, [0] * len(head) + [1] * len(answer)
        else:
            ids, mask = self._supervised(messages, tools)
        if len(set(mask)) < 2:
            raise UserError(
                f"target: the chat template's loss mask is all {mask[0] if mask else 0}; "
                "nothing (or everything) would be trained on"
            )
        return ids, mask

    def read_back(self, messages: Sequence[Message], tools: Tools, answer: Sequence[int]) -> Message | None:
        """Parse a generated answer into a message; see `answer_parts`.

        Args:
            messages: messages before the answer.
            tools: tools of the conversation.
            answer: its tokens, without the end token.
        """
        if self.template == "none":
            text = self.tokenizer.decode(list(answer), skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        return self._in_some_form(messages, tools, lambda render, known: answer_parts(render, known, answer))

    def user_turn(self) -> tuple[list[int], list[int]]:
        """Token ids before a user's text, and those between it and the answer."""
        if self.template == "none":
            start: Any = self.tokenizer.bos_token_id
            return ([] if start is None else [start]), []
        marker = "\u2407"
        asked = [{"role": "user", "content": marker}]
        text = self._in_some_form(asked, (), _prompt)
        before, _, after = text.partition(marker)
        return self._ids(before), self._ids(after)

    def _plain_ids(self, text: str) -> list[int]:
        """Token ids of a text without a template, followed by an answer.

        A text with its own beginning token gets no second one. Tokens that the tokenizer appends are omitted,
        since some append an end token.
        """
        ids, first = self.tokenizer.encode(text), self.tokenizer.bos_token_id
        if first is not None and ids[:2] == [first, first]:
            ids = ids[1:]
        own = self.tokenizer.encode(text, add_special_tokens=False)
        return _without_tail(ids, own)

    def ends(self, generation: Sequence[int], vocabulary: int) -> Ends:
        """Tokens that end an answer.

        Args:
            generation: end tokens in the model's files, see `stop_tokens`.
            vocabulary: size of the target's vocabulary; larger ids are ignored.
        """
        eos: Any = self.tokenizer.eos_token_id
        written: list[int] = []
        if self.template == "chat":
            found = (template_ends(self.renderer(form=form)) for form in FORMS)
            written = next((ends for ends in found if ends), [])
        own = [] if eos is None else [eos]
        sources = ([token for token in ends if token < vocabulary] for ends in (generation, own, written))
        return Ends(*map(tuple, sources))

    def text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Render a whole conversation."""
        return self._in_some_form(messages, tools, _checked)

    # -- rendering -------------------------------------------------------------------------------

    def renderer(
        self, tools: Tools = (), form: Form = FORMS[0], options: Mapping[str, Any] | None = None
    ) -> TemplateRenderer:
        """Build a renderer with these tools, form of messages, and additional options."""
        assert self.rendering, "without a template nothing is rendered"
        return TemplateRenderer(self.rendering.having(options or {}), tools, form, self.added)

    def _in_some_form(
        self,
        messages: Sequence[Message],
        tools: Tools,
        work: Callable[[TemplateRenderer, Sequence[Message]], T],
        options: Mapping[str, Any] | None = None,
    ) -> T:
        """Do work in the first form of the messages that the template accepts and renders completely.

        Raises:
            UserError: there is no such form; describes the error of the most successful one.
        """
        messages = self._with_known_roles(messages, tools)
        refusals: list[UserError] = []
        for form in FORMS:
            if form.changes(messages):
                try:
                    return work(self.renderer(tools, form, options), messages)
                except UserError as error:
                    refusals.append(error)
        raise max(refusals, key=_progress) from None

    def _supervised(self, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[int]]:
        """See `loss_mask.supervise`; a refusal names the option of the template that helps, if any."""

        def work(render: TemplateRenderer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
            return supervise(render, messages, self._frame(render, messages))

        try:
            return self._in_some_form(messages, tools, work)
        except UserError as error:
            for option in self._thinking_options(tools):
                try:
                    self._in_some_form(messages, tools, work, option)
                except UserError:
                    continue
                ((name, value),) = option.items()
                written = f"'{{{name}: {str(value).lower()}}}'"
                raise UserError(f"{error}; prompts.template_options={written} helps") from None
            raise

    def _frame(self, render: TemplateRenderer, messages: Sequence[Message]) -> AnswerFrame:
        """Text that the template writes around an answer; of these messages if it refuses all others."""
        options = json.dumps(render.rendering.options, sort_keys=True, default=str)
        key = render.form, render.template, bool(render.tools), options
        if key not in self._frames:
            self._frames[key] = find_frame(render)
        return self._frames[key] if any(self._frames[key]) else find_frame(render, [messages[:-1]])

    def _thinking_options(self, tools: Tools) -> Iterator[dict[str, bool]]:
        for name in sorted(set(THINKS.findall(self.renderer(tools).template))):
            yield from ({name: value} for value in (True, False) if self.options.get(name) is not value)

    def _ids(self, text: str) -> list[int]:
        # Templates write special tokens themselves.
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _with_known_roles(self, messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
        """The messages, with developers as system if the template has no developer role."""
        if all(m["role"] != "developer" for m in messages) or "developer" in self.renderer(tools).template:
            return messages
        if not self._noted:
            say("prompts: the chat template has no developer role; such messages become the system's")
            self._noted = True
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]


def _progress(refusal: UserError) -> int:
    """Rank of a refusal: whether the conversation was rendered, and with all texts in its prompt."""
    return (
        0 if isinstance(refusal, RefusedByTemplateError) else 2 - isinstance(refusal, IncompletePromptError)
    )


def _prompt(render: TemplateRenderer, messages: Sequence[Message]) -> str:
    """The text up to the start of the target's answer."""
    return _checked(render, messages, prompt=True)


def _checked(render: TemplateRenderer, messages: Sequence[Message], prompt: bool = False) -> str:
    """The rendered messages, see `TemplateRenderer.text`.

    Raises:
        UserError: a text of users, tools or the system is missing, or a tool.
    """
    text = render.text(messages, prompt)
    if fault := fault_in_prompt(messages, text):
        raise IncompletePromptError(f"target: its chat template {fault}")
    check_short_texts(render, messages)
    if fault := fault_in_tools(render.tools or (), text):
        raise UserError(f"target: its chat template {fault}")
    return text


def _without_tail(ids: list[int], own: list[int]) -> list[int]:
    """Ids up to the end of the text's own ids; all ids if these are not contained unchanged."""
    starts = (i for i in range(len(ids) - len(own) + 1) if own and ids[i : i + len(own)] == own)
    start = next(starts, None)
    return ids if start is None else ids[: start + len(own)]


def _text_of(message: Message) -> str:
    more = next((key for key in ("tool_calls", "reasoning_content") if message.get(key)), "")
    if more or not isinstance(message.get("content"), str):
        what = f"has {more or 'no text'}, {NO_OTHER_WAY}"
        raise UserError(f"prompts.template=none: a message of the {message['role']} {what}")
    return message["content"]
