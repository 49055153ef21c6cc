"""What a draft takes over from the one before it, whose states no rejected token has entered.

States are side information, a function of settled tokens alone. Tokens are chosen anew from them, so
whatever is verified is a fixed node, and any rule is lossless (docs/lossless.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin
from decode.sampling import Sampler
from drafters.drafting.tree import Beam, best_nodes, expand
from drafters.families.token_bias import ParallelLogits

PRIORITY = 1e6  # more than a difference of log-probabilities
MODES = ("none", "logit_sum", "tree_merge", "immediate")


@dataclass(frozen=True)
class Reuse:
    """How the states behind a rejection are used, once, in the round after.

    none: they are not. logit_sum: `weight` times their logits is added to the fresh ones of the same
    position. tree_merge: a second tree grown from them is verified in the same pass; `nodes` of the
    plan's nodes are its, and whatever the fresh tree leaves idle. It is for dynamic trees of fixed
    nodes; with other plans it is none. immediate: where all rows of a batch have `least` of them and the
    drafter expects `tokens` tokens of them, they are verified alone and nothing is drafted; else, and
    where tokens are drawn, none.

    Raises:
        UserError: a mode that is none of these, or a number out of range.
    """

    mode: str
    nodes: int
    weight: float
    least: int
    tokens: float

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
        """Whether two trees become one under this plan."""
        return self.mode == "tree_merge" and plan.proposal == "fixed" and plan.width > 1 and not plan.tree

    def applies_to(self, plan: Plan) -> bool:
        """Whether old states change anything under this plan."""
        immediate = self.mode == "immediate" and plan.proposal == "fixed"
        return self.mode == "logit_sum" or immediate or self.merges(plan)

    def is_sufficient(self, logits: Tensor, left: Tensor) -> bool:
        """Whether (B, K, V) logits of old states, `left` of them a row, are worth a pass of their own."""
        depth = torch.arange(logits.shape[1], device=logits.device)
        chance = logits.softmax(-1).amax(-1) * (depth < left[:, None])  # (B, K)
        return bool(((left >= self.least) & (chance.cumprod(1).sum(1) >= self.tokens)).all())

    def summed(self, raw: Sequence[Tensor], left: Tensor) -> list[Tensor]:
        """K of (2 B, V) fresh and old logits -> K of (B, V)."""
        halves = [logits.chunk(2) for logits in raw]
        return [new + self.weight * old * (left > k)[:, None] for k, (new, old) in enumerate(halves)]

    def merged(self, both: ParallelLogits, left: Tensor, coin: Coin, plan: Plan) -> Draft:
        """One tree from the fresh levels of B rows and, in rows B to 2 B, the old ones."""
        limit = torch.cat([torch.full_like(left, plan.depth), left])
        grown = best_nodes(both.first, both.step, coin, plan, limit)
        fresh, old = (Beam(*half) for half in zip(*(t.chunk(2) for t in _rows(grown)), strict=True))
        return merge_trees(fresh, old, max(plan.nodes - self.nodes, 0), plan)


def _rows(beam: Beam) -> list[Tensor]:
    """With every field one row for each of the batch."""
    return [field.expand(len(beam.tokens), -1) for field in beam]


def resized(states: Tensor, depth: int) -> Tensor:
    """(B, K, D) states as those of a draft of another depth; what is added means nothing."""
    more = states[:, -1:].expand(-1, max(depth - states.shape[1], 0), -1)
    return torch.cat([states[:, :depth], more], 1)


def truncated_draft(
    levels: ParallelLogits,
    left: Tensor,
    sampler: Sampler,
    coin: Coin,
    plan: Plan,
    confidence: Callable[[], Tensor] | None = None,
) -> Draft:
    """A draft of fixed nodes from levels of which a row has (B,) `left`."""
    if plan.width > 1 and not plan.tree:
        best = best_nodes(levels.first, levels.step, coin, plan, left)
        return Draft(best.tokens, best.parents, plan.depth)
    draft = expand(levels.first, levels.step, sampler, coin, plan, confidence=confidence)
    return replace(draft, tokens=draft.tokens.masked_fill(draft.levels[:, 1:] > left[:, None], PAD))


def merge_trees(fresh: Beam, old: Beam, first: int, plan: Plan) -> Draft:
    """The union of two trees below the same root, at most plan.nodes nodes.

    The best `first` of the fresh tree, then what the old one adds, then the rest of the fresh one. No
    parent comes after its child in that order, so what is kept is a tree.
    """
    rows, count = fresh.tokens.shape
    twin = _twins(fresh, old, plan.depth)  # (B, N)
    rank = _descending(_descending(fresh.score), ascending=True)  # (B, N) of each among the fresh
    fresh_key = fresh.score.double() + 2 * PRIORITY * (rank < first)
    old_key = old.score.double() + PRIORITY
    # A node of both is the fresh tree's, and as early as either wants it.
    fresh_key = fresh_key.scatter_reduce(
        1, twin.clamp_min(0), old_key.masked_fill(twin < 0, -torch.inf), "amax"
    )
    key = torch.cat([fresh_key, old_key.masked_fill(twin >= 0, -torch.inf)], 1)  # (B, 2 N)
    selection = _descending(key)[:, : plan.nodes].sort(1).values  # parents before children
    parent_twin = twin.gather(1, old.parents.clamp_min(0))  # the parent's twin
    old_parents = torch.where(parent_twin >= 0, parent_twin, old.parents + count).masked_fill(
        old.parents < 0, -1
    )
    parents = torch.cat([fresh.parents, old_parents], 1).gather(1, selection)
    slot = torch.zeros(rows, 2 * count + 1, dtype=torch.long, device=selection.device)
    slot.scatter_(
        1,
        selection + 1,
        torch.arange(1, selection.shape[1] + 1, device=selection.device).expand_as(selection),
    )
    tokens = torch.cat([fresh.tokens, old.tokens], 1).masked_fill(key == -torch.inf, PAD)
    return Draft(tokens.gather(1, selection), slot.gather(1, parents + 1) - 1, plan.depth)


def _descending(values: Tensor, ascending: bool = False) -> Tensor:
    """(B, n) order of the values; equals stay as they are."""
    return values.sort(dim=1, descending=not ascending, stable=True).indices


def _twins(fresh: Beam, old: Beam, depth: int) -> Tensor:
    """(B, N) which fresh node has the same path as each old one, or -1."""
    same = old.tokens[:, :, None] == fresh.tokens[:, None]  # (B, N old, N fresh)
    twin = torch.full_like(old.tokens, -1)
    for _ in range(depth):  # a level more is right each time
        up = twin.gather(1, old.parents.clamp_min(0))
        up = torch.where(old.parents < 0, -1, torch.where(up < 0, -2, up))
        match = same & (up[:, :, None] == fresh.parents[:, None])
        twin = torch.where(match.any(-1), match.int().argmax(-1), -1)
    return twin
