"""Make the rows of a shard: an engine answers prompts, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from decode.errors import UserError
from distill.engines.base import Answer, Engine, Request, SamplingParams
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message, Prompt, turns, unanswered
from distill.rollouts.store import RolloutPlan, Row
from distill.utils.progress import say

UNREAD = "unread"  # finish_reason of an answer that cannot become a message of the history


@dataclass
class Conversation:
    """A conversation that grows turn by turn.

    Attributes:
        id: id of its rows and requests.
        sample: number of the answer to its prompt.
        tokens: tokens of the rendered conversation, up to the start of the next answer.
        messages: the same as messages; empty for conversations that the target starts.
        remaining: later messages.
        rows: rows of the store; the last one may grow.
    """

    id: str
    sample: int
    tokens: list[int]
    messages: list[Message] = field(default_factory=list)
    remaining: list[Message] = field(default_factory=list)
    tools: Sequence[dict[str, Any]] = ()
    weight: float = 1.0
    turn: int = 0
    open: bool = True
    rows: list[Row] = field(default_factory=list)

    def request(self) -> Request:
        """The request for the next answer."""
        name = f"{self.id}@{self.turn}" if self.turn else self.id
        return Request(name, self.sample, self.tokens, tuple(self.messages), self.tools)

    def add_answer(self, answer: Answer) -> None:
        """Append an answer.

        It extends the previous turn's row if that row is a prefix of this turn's tokens. If the template
        renders earlier turns differently (for example without reasoning), a new row starts.
        """
        start = len(self.rows[-1]["tokens"]) if self.rows else 0
        if not self.rows or self.tokens[:start] != self.rows[-1]["tokens"]:
            start = 0
            name = f"{self.id}#{self.sample}" if self.sample else self.id
            self.rows.append(
                {"id": f"{name}@{self.turn}" if self.turn else name, "tokens": [], "loss_mask": []}
                | {"ids": "exact", "weight": self.weight}
            )
        row = self.rows[-1]
        row["tokens"] = self.tokens + answer.tokens
        # Tokens of the template and user are masked; answer tokens are supervised.
        row["loss_mask"] += [0] * (len(self.tokens) - start) + [1] * len(answer.tokens)
        row["finish_reason"] = "stop" if answer.stopped else "length"
        if not answer.exact:
            row["ids"] = "reencoded"
        self.turn += 1


def longest_prompt(plan: RolloutPlan, context: int | None) -> int:
    """Largest number of prompt tokens that leaves room for one answer token."""
    return min(plan.max_prompt_tokens, (context or 2**31) - 1)


def check_plan(plan: RolloutPlan, chat: Chat, context: int | None) -> tuple[list[int], list[int]]:
    """Token ids before and after self-written prompts; empty if there are none.

    Raises:
        UserError: self-written prompts that are impossible with this plan, template or context.
    """
    if plan.until not in ("answer", "length"):
        raise UserError(f"rollout.until={plan.until}: choose answer or length")
    if not plan.self_prompts:
        return [], []
    before, after = chat.user_turn()
    if plan.answers == "given":
        raise UserError("rollout=given: prompts.self must be 0; those prompts have no given answers")
    if not before:
        raise UserError("prompts.self: this tokenizer has no token to begin a prompt with; give a file")
    if (room := longest_prompt(plan, context)) <= len(before) + len(after):
        raise UserError(
            f"prompts.self: no room for a self-written prompt in {room} tokens; raise prompts.max_tokens"
        )
    return before, after


class Writer:
    """Makes the rows of a shard.

    Args:
        engine: answers requests.
        chat: renders conversations.
        plan: samplers, lengths, end tokens and seed.
        progress: called with the share of the current shard's answers that are written.

    Raises:
        UserError: self-written prompts that this plan, template or engine does not support.
    """

    def __init__(
        self, engine: Engine, chat: Chat, plan: RolloutPlan, progress: Callable[[float], None] | None = None
    ) -> None:
        self.engine, self.chat, self.plan = engine, chat, plan
        self.progress = progress
        self.room = (engine.context or 2**31) - 1
        self.limit = longest_prompt(plan, engine.context)
        self.before, self.after = check_plan(plan, chat, engine.context)
        self.params = SamplingParams(
            plan.sampler, plan.max_new_tokens, plan.stop if plan.until == "answer" else []
        )
        if plan.self_prompts and not engine.begins:
            raise UserError(
                "prompts.self: a chat server answers prompts but writes none; set prompts.self=0 "
                "and give a file"
            )

    def __call__(self, shard: int, prompts: list[Prompt], self_written: int) -> list[Row]:
        """Make the rows of one shard; they depend only on the plan and the shard number."""
        if self.plan.answers == "given":
            return [self._given(p) for p in prompts]
        conversations = [self._begin(p, sample) for p in prompts for sample in range(self.plan.samples)]
        names = [f"self-{shard}-{i}" for i in range(self_written)]
        if self.plan.until == "answer":
            conversations += [Conversation(name, 0, ids) for name, ids in self._write_prompts(names)]
        else:
            conversations += [Conversation(name, 0, self.before) for name in names]
        written, expected = 0, sum(1 + len(turns(c.remaining)) for c in conversations)
        while waiting := [conversation for conversation in conversations if self._fits(conversation)]:
            requests = [conversation.request() for conversation in waiting]
            answers = self.engine(requests, self.params, partial(self._report, written, expected))
            written += len(waiting)
            for conversation, answer in zip(waiting, answers, strict=True):
                if answer.tokens:
                    conversation.add_answer(answer)
                self._next_turn(conversation, answer)
        rows = [row for conversation in conversations for row in conversation.rows]
        if unread := sum(row["finish_reason"] == UNREAD for row in rows):
            say(
                f"rollouts: {unread} of {len(conversations)} conversations of shard {shard} end early: their "
                "answers call tools, or have marks of the chat template that it cannot read back"
            )
        return rows

    def _report(self, written: int, expected: int, more: float) -> None:
        if self.progress:
            self.progress((written + more) / expected)

    def _begin(self, prompt: Prompt, sample: int) -> Conversation:
        messages = unanswered(prompt.messages)
        first = turns(messages)[0]
        opening, remaining = list(messages[:first]), list(messages[first:])
        ids = self.chat.encode(opening, prompt.tools)
        if self.room < len(ids) <= self.plan.max_prompt_tokens:  # a server may have a shorter context
            raise UserError(
                f"{prompt.file or 'prompt'}:{prompt.line or prompt.id}: {len(ids)} tokens, and what answers "
                f"reads {self.room + 1}, the answer included; give it more context, or set "
                f"prompts.max_tokens={self.room} to leave out longer prompts"
            )
        return Conversation(prompt.id, sample, ids, opening, remaining, prompt.tools, prompt.weight)

    def _fits(self, conversation: Conversation) -> bool:
        longest = (conversation.turn + 1) * self.limit + conversation.turn * self.plan.max_new_tokens
        return conversation.open and len(conversation.tokens) <= min(longest, self.room)

    def _next_turn(self, conversation: Conversation, answer: Answer) -> None:
        """Move to the next turn to answer; a truncated or unreadable answer ends the conversation."""
        places = turns(conversation.remaining)
        conversation.open = bool(places) and answer.stopped and self.plan.until == "answer"
        if not conversation.open:
            return
        if (message := self._read(conversation, answer)) is None:
            conversation.open = False
            conversation.rows[-1]["finish_reason"] = UNREAD
            return
        conversation.messages += [message, *conversation.remaining[: places[0]]]
        conversation.remaining = conversation.remaining[places[0] :]
        conversation.tokens = self.chat.encode(conversation.messages, conversation.tools)

    def _read(self, conversation: Conversation, answer: Answer) -> Message | None:
        """The answer as a message of the history; None if it cannot be parsed."""
        ended = answer.tokens[-1:] and answer.tokens[-1] in self.plan.stop
        tokens = answer.tokens[: -1 if ended else None]
        return self.chat.read_back(conversation.messages, conversation.tools, tokens)

    def _given(self, prompt: Prompt) -> Row:
        tokens, mask = self.chat.encode_answered(prompt.messages, prompt.tools)
        return {
            "id": prompt.id,
            "tokens": tokens,
            "loss_mask": mask,
            "finish_reason": "given",
            "ids": "reencoded",
            "weight": prompt.weight,
        }

    def _write_prompts(self, names: list[str]) -> list[tuple[str, list[int]]]:
        """Let the target write the user's turn (Magpie, Xu et al., arXiv:2406.08464)."""
        if not names:
            return []
        before, after = self.before, self.after
        room = min(self.limit - len(before) - len(after), self.plan.max_new_tokens)
        params = SamplingParams(self.plan.prompt_sampler, room, [*self.plan.stop, *after[:1]])
        answers = self.engine([Request(f"{name}-prompt", 0, before) for name in names], params)
        turns = [a.tokens[:-1] if a.stopped else a.tokens for a in answers]
        return [(n, before + t + after) for n, t in zip(names, turns, strict=True) if t]
