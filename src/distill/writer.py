"""Rows of a shard: the target, in this process, answers prompts."""

from __future__ import annotations

from decode.errors import UserError
from decode.generate import generate
from decode.sampling import Sampler
from decode.target import Target
from distill.chat import Chat
from distill.prompts import Prompt
from distill.rollouts import RolloutPlan, Row


class Writer:
    """Makes the rows of a shard with the target in this process.

    Args:
        target: answers.
        chat: renders.
        plan: laws, lengths, end tokens and seed.

    Raises:
        UserError: self-written prompts that nobody answers, cannot begin or have no room.
    """

    def __init__(self, target: Target, chat: Chat, plan: RolloutPlan) -> None:
        self.target, self.chat, self.plan = target, chat, plan
        # A prompt that fills the context cannot be answered.
        self.limit = min(plan.max_prompt_tokens, (target.max_positions or plan.max_prompt_tokens + 1) - 1)
        self.before, self.after = chat.user_turn() if plan.self_prompts else ([], [])
        if plan.until not in ("answer", "length"):
            raise UserError(f"rollout.until={plan.until}: choose answer or length")
        if not plan.self_prompts:
            return
        if plan.answers == "given":
            raise UserError("rollout=given: prompts.self must be 0; those prompts have no given answers")
        if not self.before:
            raise UserError("prompts.self: this tokenizer has nothing to begin a prompt with; give a file")
        if self.limit <= len(self.before) + len(self.after):
            raise UserError(f"rollout.max_prompt_tokens={self.limit}: no room for a self-written prompt")

    def __call__(self, shard: int, prompts: list[Prompt], self_written: int) -> list[Row]:
        """Rows of one shard: a function of the plan and the shard number alone."""
        if self.plan.answers == "given":
            return [self._given(p) for p in prompts]
        encoded = [(p.id, self.chat.encode(p.messages)) for p in prompts]
        names = [f"self-{shard}-{i}" for i in range(self_written)]
        if self.plan.until == "answer":
            encoded, stop = encoded + self._write_prompts(names), self.plan.stop
        else:
            encoded, stop = encoded + [(name, self.before) for name in names], []
        encoded = [(name, ids) for name, ids in encoded if len(ids) <= self.limit]
        out = generate(
            self.target,
            None,
            [ids for _, ids in encoded],
            max_new_tokens=self.plan.max_new_tokens,
            sampler=Sampler(**self.plan.sampler),
            seed=self.plan.seed,
            requests=[name for name, _ in encoded],
            stop=stop,
        )
        return [
            {
                "id": name,
                "tokens": ids + o.tokens,
                "loss_mask": [0] * len(ids) + [1] * len(o.tokens),
                "finish_reason": "stop" if o.stopped else "length",
                "ids": "exact",
            }
            for (name, ids), o in zip(encoded, out.outputs, strict=True)
        ]

    def _given(self, prompt: Prompt) -> Row:
        tokens, mask = self.chat.encode_answered(prompt.messages)
        return {
            "id": prompt.id,
            "tokens": tokens,
            "loss_mask": mask,
            "finish_reason": "given",
            "ids": "reencoded",
        }

    def _write_prompts(self, names: list[str]) -> list[tuple[str, list[int]]]:
        """Let the target write the user's turn (Magpie, Xu et al., arXiv:2406.08464)."""
        before, after = self.before, self.after
        out = generate(
            self.target,
            None,
            [before] * len(names),
            max_new_tokens=self.limit - len(before) - len(after),
            sampler=Sampler(**self.plan.prompt_sampler),
            seed=self.plan.seed,
            requests=[f"{name}-prompt" for name in names],
            stop=[*self.plan.stop, *after[:1]],
        )
        turns = [o.tokens[:-1] if o.stopped else o.tokens for o in out.outputs]
        return [(n, before + t + after) for n, t in zip(names, turns, strict=True) if t]
