"""Reuse of hidden states from the previous draft: they contain no drafted token, so rejection keeps them.

Tokens are chosen from these states again, or drawn from the q of the draft, so any acceptance rule is
lossless (docs/lossless.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin
from drafters.drafting.merge import merge_trees
from drafters.drafting.parallel_logits import ParallelLogits
from drafters.drafting.tree import Beam, best_nodes

MODES = ("none", "logit_sum", "tree_merge", "immediate")


@dataclass(frozen=True)
class Reuse:
    """How states after a rejection are reused in the next round.

    none: not at all. logit_sum: `weight` times their logits are added to the new ones of the same
    position. tree_merge: a second tree of fixed nodes is grown from them and verified in the same pass, with
    `nodes` of the plan's nodes and those that the new tree does not use. Only for dynamic trees, or hybrid
    ones if `drawn`; otherwise none. immediate: the draft is made only from them if all rows of a batch have
    `least` of them and expect `tokens` accepted tokens; otherwise none.

    Raises:
        UserError: an unknown mode, or a number out of range.
    """

    mode: str
    nodes: int
    weight: float
    least: int
    tokens: float
    drawn: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"drafter.reuse.mode={self.mode}: choose one of {', '.join(MODES)}")
        if self.nodes < 1 or self.least < 1:
            raise UserError(f"drafter.reuse: nodes={self.nodes}, least={self.least}; both must be at least 1")
        if self.weight <= 0 or self.tokens < 0:
            raise UserError(
                f"drafter.reuse: weight={self.weight} must be more than 0, tokens={self.tokens} at least 0"
            )

    def merges(self, plan: Plan) -> bool:
        """Whether two trees are merged under this plan."""
        permitted = self.drawn or plan.proposal == "fixed"
        return self.mode == "tree_merge" and permitted and plan.width > 1 and not plan.tree

    def applies_to(self, plan: Plan) -> bool:
        """Whether states are reused under this plan."""
        return self.mode in ("logit_sum", "immediate") or self.merges(plan)

    def is_sufficient(self, logits: Tensor, left: Tensor) -> bool:
        """Whether (B, K, V) logits of old states, (B,) `left` of them valid, are enough for a draft."""
        depth = torch.arange(logits.shape[1], device=logits.device)
        chance = logits.softmax(-1).amax(-1) * (depth < left[:, None])  # (B, K)
        return bool(((left >= self.least) & (chance.cumprod(1).sum(1) >= self.tokens)).all())

    def summed(self, raw: Sequence[Tensor], left: Tensor) -> list[Tensor]:
        """K of (2 B, V) new and old logits -> K of (B, V) weighted sums."""
        halves = [logits.chunk(2) for logits in raw]
        return [new + self.weight * old * (left > k)[:, None] for k, (new, old) in enumerate(halves)]

    def merged(self, both: ParallelLogits, left: Tensor, coin: Coin, plan: Plan) -> Draft:
        """Merge the fixed trees grown from new levels, rows 0 to B, and old levels, rows B to 2 B."""
        limit = torch.cat([torch.full_like(left, plan.depth), left])
        grown = best_nodes(both.first, both.step, coin, plan, limit, both.vocabulary)
        fresh, old = (Beam(*half) for half in zip(*(t.chunk(2) for t in _expanded(grown)), strict=True))
        return self._merge(_fixed_draft(fresh, plan), old, plan)

    def merged_with_drawn(
        self, fresh: Draft, old: ParallelLogits, left: Tensor, coin: Coin, plan: Plan
    ) -> Draft:
        """Merge a hybrid tree with the tree of fixed nodes grown from old levels."""
        grown = best_nodes(old.first, old.step, coin, plan, left, old.vocabulary)
        return self._merge(fresh, grown, plan)

    def _merge(self, fresh: Draft, old: Beam, plan: Plan) -> Draft:
        return merge_trees(fresh, _fixed_draft(old, plan), max(plan.nodes - self.nodes, 0), plan.nodes)


def _fixed_draft(beam: Beam, plan: Plan) -> Draft:
    """A draft of fixed nodes."""
    return Draft(beam.tokens, beam.parents, plan.depth, score=beam.score)


def _expanded(beam: Beam) -> list[Tensor]:
    """All fields, expanded to the batch size."""
    return [field.expand(len(beam.tokens), -1) for field in beam]


def resized(states: Tensor, depth: int) -> Tensor:
    """(B, K, D) states cut or padded to another depth; the caller masks the padding."""
    more = states[:, -1:].expand(-1, max(depth - states.shape[1], 0), -1)
    return torch.cat([states[:, :depth], more], 1)
