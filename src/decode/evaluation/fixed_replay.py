"""Exact acceptance on stored answers of drafts with fixed nodes, round by round.

With fixed nodes the text determines where every round ends. So the rounds of a decoder that emits this text
are replayed one after another, with a single target pass; no other start needs a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.evaluation.teacher_forced import Read, Rollout, SettledCache, TeacherForcedTexts
from decode.generation.adaptive import adapt_depth
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler


class Step(NamedTuple):
    """One round of all running rows."""

    state: Any  # of the drafter at the time of the draft
    draft: Draft
    ahead: Tensor  # (B, K) the text after the root, then `PAD`
    accepted: list[int]
    goes_on: list[bool]  # another round follows


@torch.inference_mode()
def walk(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 32,
    on_step: Callable[[Step], None] | None = None,
    read: Read | None = None,
) -> list[np.ndarray]:
    """Replay all rounds on the rollouts.

    Args:
        target: the model that generated the rollouts.
        drafter: the drafter to score.
        rollouts: prompts and answers.
        plan: plan with fixed nodes.
        sampler: of the rollouts.
        batch_size: rollouts per batch.
        on_step: called after every round.
        read: reads the texts; default `target.read`.

    Returns:
        For each rollout (starts, K): 1 if token i after a start is accepted, else 0; 0 where no round starts.
    """
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].answer))
    keeps = [np.zeros((max(len(r.answer) - 1, 0), plan.depth)) for r in rollouts]
    for start in range(0, len(order), batch_size):
        part = [i for i in order[start : start + batch_size] if len(rollouts[i].answer) > 1]
        if not part:
            continue
        walker = _Walker(target, drafter, [rollouts[i] for i in part], plan, read)
        while walker.rows:
            step = walker.step(sampler)
            if on_step:
                on_step(step)
            for row, accepted in zip(walker.rows, step.accepted, strict=True):
                keeps[part[row]][walker.place[row] - 1, :accepted] = 1
            walker.advance(step.accepted)
    return keeps


NO_COIN: Any = None  # nothing is random


class _Walker:
    """A batch of rollouts, each at its own position.

    Attributes:
        rows: indices of the running rows.
    """

    def __init__(
        self,
        target: Target,
        drafter: Proposer,
        rollouts: Sequence[Rollout],
        plan: Plan,
        read: Read | None = None,
    ) -> None:
        self.target, self.drafter, self.plan = target, adapt_depth(drafter, plan), plan
        self.texts = TeacherForcedTexts(target, rollouts, plan.depth, read)
        self.length = [len(r.answer) for r in rollouts]
        self.begin = [len(r.prompt) for r in rollouts]
        self.rows = list(range(len(rollouts)))
        self.place = [1] * len(rollouts)  # index of the next answer token to draft
        self.state = self.drafter.new_state(len(rollouts))
        self.cache = SettledCache(target, drafter, *self.texts.tokens.shape)
        self._advance_drafter([0] * len(rollouts), self.begin)

    def _advance_drafter(self, first: Sequence[int], counts: Sequence[int]) -> None:
        """Pass `counts` tokens of each row, starting at position `first`, to the drafter."""
        device = self.texts.tokens.device
        rows = torch.tensor(self.rows, device=device)[:, None]
        at = torch.tensor(first, device=device)[:, None] + torch.arange(max(counts), device=device)
        at = at.clamp_max(self.texts.tokens.shape[1] - 1)  # (B, M)
        place = torch.tensor([self.place[r] for r in self.rows], device=device)
        root = self.texts.answers[rows[:, 0], place - 1]
        tokens, taps = self.texts.tokens[rows, at], self.texts.output.taps[rows, at]
        self.cache.settle(tokens, counts)
        self.drafter.advance(self.state, self.target, tokens, taps, list(counts), root)

    def step(self, sampler: Sampler) -> Step:
        """Draft, and count the draft tokens that match the text."""
        device = self.texts.answers.device
        rows = torch.tensor(self.rows, device=device)[:, None]
        place = torch.tensor([self.place[r] for r in self.rows], device=device)[:, None]
        ahead = self.texts.answers[rows, place + torch.arange(self.plan.depth, device=device)]
        draft = self.drafter.propose(self.state, self.target, sampler, NO_COIN, self.plan)
        accepted = matched(draft, ahead)
        return Step(self.state, draft, ahead, accepted, self._continues(accepted))

    def _continues(self, accepted: Sequence[int]) -> list[bool]:
        return [self.place[r] + a + 1 < self.length[r] for r, a in zip(self.rows, accepted, strict=True)]

    def advance(self, accepted: Sequence[int]) -> None:
        """Move each row past its accepted tokens; drop finished rows."""
        running = [i for i, on in enumerate(self._continues(accepted)) if on]
        first = [self.begin[r] + self.place[r] - 1 for r in self.rows]
        for row, count in zip(self.rows, accepted, strict=True):
            self.place[row] += count + 1
        if len(running) < len(self.rows):
            self.drafter.select(self.state, running)
            self.cache.select(running)
            self.rows = [self.rows[i] for i in running]
        if running:
            self._advance_drafter([first[i] for i in running], [accepted[i] + 1 for i in running])


def matched(draft: Draft, ahead: Tensor) -> list[int]:
    """Number of leading tokens of (B, K) `ahead` that form a path of a fixed draft, per row."""
    if not draft.depth:
        return [0] * len(ahead)
    slot = torch.zeros(len(ahead), dtype=torch.long, device=ahead.device)
    on_path, count = torch.ones_like(slot, dtype=torch.bool), torch.zeros_like(slot)
    for token in ahead.unbind(1):
        node = (draft.parents == slot[:, None] - 1) & (draft.tokens == token[:, None]) & (token >= 0)[:, None]
        on_path = on_path & node.any(1)
        count += on_path
        slot = node.int().argmax(1) + 1
    return count.tolist()
