"""Rows of a shard: prompts, turn after turn, with the answers that an engine gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.errors import UserError
from distill.engines.base import Answer, Engine, Request, SamplingParams
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Message, Prompt, turns, unanswered
from distill.rollouts.store import RolloutPlan, Row


@dataclass
class Talk:
    """A conversation as it grows.

    Attributes:
        id: of its rows, and of its requests.
        sample: which answer to its prompt it is.
        tokens: rendered, up to where the next answer begins.
        said: the same as messages; empty for what the target begins by itself.
        rest: messages still to come.
        rows: finished and unfinished ones.
    """

    id: str
    sample: int
    tokens: list[int]
    said: list[Message] = field(default_factory=list)
    rest: list[Message] = field(default_factory=list)
    tools: Sequence[dict[str, Any]] = ()
    weight: float = 1.0
    turn: int = 0
    open: bool = True
    rows: list[Row] = field(default_factory=list)

    def request(self) -> Request:
        """For the next answer."""
        name = f"{self.id}@{self.turn}" if self.turn else self.id
        return Request(name, self.sample, self.tokens, tuple(self.said), self.tools)

    def take(self, answer: Answer) -> None:
        """Put an answer behind what was said.

        It goes on in the row of the turn before, where that row is how this turn begins. Where the
        template writes earlier turns differently (leaves their reasoning out, say), a row begins.
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
        row["loss_mask"] += [0] * (len(self.tokens) - start) + [1] * len(answer.tokens)
        row["finish_reason"] = "stop" if answer.stopped else "length"
        if not answer.exact:
            row["ids"] = "reencoded"
        self.turn += 1


def longest_prompt(plan: RolloutPlan, context: int | None) -> int:
    """Tokens; a prompt that fills the context cannot be answered."""
    return min(plan.max_prompt_tokens, (context or 2**31) - 1)


def check_plan(plan: RolloutPlan, chat: Chat, context: int | None) -> tuple[list[int], list[int]]:
    """Ids before and behind the prompts that a target of this context writes itself, if it writes any.

    Raises:
        UserError: nobody answers them, they cannot begin or have no room.
    """
    if plan.until not in ("answer", "length"):
        raise UserError(f"rollout.until={plan.until}: choose answer or length")
    if not plan.self_prompts:
        return [], []
    before, after = chat.user_turn()
    if plan.answers == "given":
        raise UserError("rollout=given: prompts.self must be 0; those prompts have no given answers")
    if not before:
        raise UserError("prompts.self: this tokenizer has nothing to begin a prompt with; give a file")
    if (room := longest_prompt(plan, context)) <= len(before) + len(after):
        raise UserError(
            f"prompts.self: no room for a self-written prompt in {room} tokens; raise prompts.max_tokens"
        )
    return before, after


class Writer:
    """Makes the rows of a shard.

    Args:
        engine: answers.
        chat: renders.
        plan: laws, lengths, end tokens and seed.

    Raises:
        UserError: self-written prompts that nobody answers, cannot begin or have no room.
    """

    def __init__(self, engine: Engine, chat: Chat, plan: RolloutPlan) -> None:
        self.engine, self.chat, self.plan = engine, chat, plan
        self.room = (engine.context or 2**31) - 1
        self.limit = longest_prompt(plan, engine.context)
        self.before, self.after = check_plan(plan, chat, engine.context)
        self.law = SamplingParams(
            plan.sampler, plan.max_new_tokens, plan.stop if plan.until == "answer" else []
        )
        if plan.self_prompts and not engine.begins:
            raise UserError(
                "prompts.self: a chat server answers prompts but writes none; set prompts.self=0 "
                "and give a file"
            )

    def __call__(self, shard: int, prompts: list[Prompt], self_written: int) -> list[Row]:
        """Rows of one shard: a function of the plan and the shard number alone."""
        if self.plan.answers == "given":
            return [self._given(p) for p in prompts]
        talks = [self._begin(p, sample) for p in prompts for sample in range(self.plan.samples)]
        names = [f"self-{shard}-{i}" for i in range(self_written)]
        if self.plan.until == "answer":
            talks += [Talk(name, 0, ids) for name, ids in self._write_prompts(names)]
        else:
            talks += [Talk(name, 0, self.before) for name in names]
        while asked := [talk for talk in talks if self._fits(talk)]:
            answers = self.engine([talk.request() for talk in asked], self.law)
            for talk, answer in zip(asked, answers, strict=True):
                if answer.tokens:
                    talk.take(answer)
                self._go_on(talk, answer)
        return [row for talk in talks for row in talk.rows]

    def _begin(self, prompt: Prompt, sample: int) -> Talk:
        messages = unanswered(prompt.messages)
        first = turns(messages)[0]
        said, rest = list(messages[:first]), list(messages[first:])
        ids = self.chat.encode(said, prompt.tools)
        if self.room < len(ids) <= self.plan.max_prompt_tokens:  # a server may read less than the target
            raise UserError(
                f"{prompt.file or 'prompt'}:{prompt.line or prompt.id}: {len(ids)} tokens, and what answers "
                f"reads {self.room + 1}, the answer included; give it more context, or set "
                f"prompts.max_tokens={self.room} to leave out longer prompts"
            )
        return Talk(prompt.id, sample, ids, said, rest, prompt.tools, prompt.weight)

    def _fits(self, talk: Talk) -> bool:
        longest = (talk.turn + 1) * self.limit + talk.turn * self.plan.max_new_tokens
        return talk.open and len(talk.tokens) <= min(longest, self.room)

    def _go_on(self, talk: Talk, answer: Answer) -> None:
        """To the next place that wants an answer; one that was cut off is nothing to go on from."""
        places = turns(talk.rest)
        talk.open = bool(places) and answer.stopped and self.plan.until == "answer"
        if talk.open:
            text = self.chat.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            talk.said += [{"role": "assistant", "content": text}, *talk.rest[: places[0]]]
            talk.rest = talk.rest[places[0] :]
            talk.tokens = self.chat.encode(talk.said, talk.tools)

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
        law = SamplingParams(self.plan.prompt_sampler, room, [*self.plan.stop, *after[:1]])
        answers = self.engine([Request(f"{name}-prompt", 0, before) for name in names], law)
        turns = [a.tokens[:-1] if a.stopped else a.tokens for a in answers]
        return [(n, before + t + after) for n, t in zip(names, turns, strict=True) if t]
