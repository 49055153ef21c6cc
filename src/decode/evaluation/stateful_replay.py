"""Acceptance on stored answers of a drafter whose drafts depend on where earlier rounds began.

Its nodes being fixed, the text says where every round ends: the rounds of a decoder that emits this
very text are walked through, one after the other, and the target is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.evaluation.teacher_forced import Rollout, Texts
from decode.generation.adaptive import adapt_depth
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler


class Step(NamedTuple):
    """One round of every row that is still under way."""

    state: Any  # the drafter's, as it was when it drafted
    draft: Draft
    ahead: Tensor  # (B, K) the text behind the root, then `PAD`
    accepted: list[int]
    whole: list[bool]  # not cut by the end of the text
    goes_on: list[bool]  # a round follows


@torch.inference_mode()
def walk(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 32,
    on_step: Callable[[Step], None] | None = None,
) -> tuple[list[int], np.ndarray]:
    """Rounds of each rollout, and (2, K + 1) as `replay.Replayed.reached`.

    Args:
        target: that wrote the rollouts.
        drafter: what is scored.
        rollouts: any.
        plan: of fixed nodes.
        sampler: the law.
        batch_size: rollouts side by side.
        on_step: told of every round.
    """
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].answer))
    rounds, reached = [0] * len(rollouts), np.zeros((2, plan.depth + 1))
    for start in range(0, len(order), batch_size):
        part = [i for i in order[start : start + batch_size] if len(rollouts[i].answer) > 1]
        if not part:
            continue
        walker = _Walker(target, drafter, [rollouts[i] for i in part], plan)
        while walker.rows:
            step = walker.step(sampler)
            if on_step:
                on_step(step)
            for row, kept, whole in zip(walker.rows, step.accepted, step.whole, strict=True):
                rounds[part[row]] += 1
                if whole:
                    reached[0, : kept + 1] += 1
                    reached[1] += 1
            walker.settle(step.accepted)
    return rounds, reached


NO_COIN: Any = None  # nothing is drawn


class _Walker:
    """Rollouts side by side, each at a place of its own.

    Attributes:
        rows: that are under way.
    """

    def __init__(self, target: Target, drafter: Proposer, rollouts: Sequence[Rollout], plan: Plan) -> None:
        self.target, self.drafter, self.plan = target, adapt_depth(drafter, plan), plan
        self.texts = Texts(target, rollouts, plan.depth)
        self.length = [len(r.answer) for r in rollouts]
        self.begin = [len(r.prompt) for r in rollouts]
        self.rows = list(range(len(rollouts)))
        self.place = [1] * len(rollouts)  # the answers' token that a round would draft first
        self.state = self.drafter.new_state(len(rollouts))
        self._tell([0] * len(rollouts), self.begin)

    def _tell(self, first: Sequence[int], counts: Sequence[int]) -> None:
        """Have the drafter absorb `counts` tokens of each row from `first` on."""
        device = self.texts.tokens.device
        rows = torch.tensor(self.rows, device=device)[:, None]
        at = torch.tensor(first, device=device)[:, None] + torch.arange(max(counts), device=device)
        at = at.clamp_max(self.texts.tokens.shape[1] - 1)  # (B, M)
        place = torch.tensor([self.place[r] for r in self.rows], device=device)
        root = self.texts.answers[rows[:, 0], place - 1]
        tokens, taps = self.texts.tokens[rows, at], self.texts.read.taps[rows, at]
        self.drafter.advance(self.state, self.target, tokens, taps, list(counts), root)

    def step(self, sampler: Sampler) -> Step:
        """Draft, and see how far the text follows."""
        device = self.texts.answers.device
        rows = torch.tensor(self.rows, device=device)[:, None]
        place = torch.tensor([self.place[r] for r in self.rows], device=device)[:, None]
        ahead = self.texts.answers[rows, place + torch.arange(self.plan.depth, device=device)]
        draft = self.drafter.propose(self.state, self.target, sampler, NO_COIN, self.plan)
        accepted = matched(draft, ahead)
        whole = [self.place[r] + a < self.length[r] for r, a in zip(self.rows, accepted, strict=True)]
        return Step(self.state, draft, ahead, accepted, whole, self._goes_on(accepted))

    def _goes_on(self, accepted: Sequence[int]) -> list[bool]:
        return [self.place[r] + a + 1 < self.length[r] for r, a in zip(self.rows, accepted, strict=True)]

    def settle(self, accepted: Sequence[int]) -> None:
        """Go on behind what was kept."""
        left = [i for i, on in enumerate(self._goes_on(accepted)) if on]
        first = [self.begin[r] + self.place[r] - 1 for r in self.rows]
        for row, kept in zip(self.rows, accepted, strict=True):
            self.place[row] += kept + 1
        if len(left) < len(self.rows):
            self.drafter.select(self.state, left)
            self.rows = [self.rows[i] for i in left]
        if left:
            self._tell([first[i] for i in left], [accepted[i] + 1 for i in left])


def matched(draft: Draft, ahead: Tensor) -> list[int]:
    """How many of (B, K) tokens a fixed draft has below its root, one below the other."""
    if not draft.depth:
        return [0] * len(ahead)
    slot = torch.zeros(len(ahead), dtype=torch.long, device=ahead.device)
    alive, kept = torch.ones_like(slot, dtype=torch.bool), torch.zeros_like(slot)
    for token in ahead.unbind(1):
        node = (draft.parents == slot[:, None] - 1) & (draft.tokens == token[:, None]) & (token >= 0)[:, None]
        alive = alive & node.any(1)
        kept += alive
        slot = node.int().argmax(1) + 1
    return kept.tolist()
