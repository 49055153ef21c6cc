"""Reuse of hidden states from the previous draft: no drafted token enters them, so they survive rejection.

States are a function of settled tokens only, and tokens are chosen from them again, so every verified
node is a fixed node and any acceptance rule is lossless (docs/lossless.md).
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

PRIORITY = 1e6  # above any difference of log-probabilities
MODES = ("none", "logit_sum", "tree_merge", "immediate")


@dataclass(frozen=True)
class Reuse:
    """How states after a rejection are reused in the next round.

    none: not at all. logit_sum: `weight` times their logits are added to the new ones of the same
    position. tree_merge: a second tree is grown from them and verified in the same pass; it gets `nodes`
    of the plan's nodes and those that the new tree does not use. Only for dynamic trees of fixed nodes;
    with other plans as none. immediate: if all rows of a batch have `least` such states and the drafter
    expects `tokens` accepted tokens from them, they are verified without a new draft. Otherwise, and
    with sampling, as none.

    Raises:
        UserError: an unknown mode, or a number out of range.
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
        """Whether two trees are merged under this plan."""
        return self.mode == "tree_merge" and plan.proposal == "fixed" and plan.width > 1 and not plan.tree

    def applies_to(self, plan: Plan) -> bool:
        """Whether states are reused under this plan."""
        immediate = self.mode == "immediate" and plan.proposal == "fixed"
        return self.mode == "logit_sum" or immediate or self.merges(plan)

    def is_sufficient(self, logits: Tensor, left: Tensor) -> bool:
        """Whether (B, K, V) logits of old states, (B,) `left` of them valid, are worth verifying alone."""
        depth = torch.arange(logits.shape[1], device=logits.device)
        chance = logits.softmax(-1).amax(-1) * (depth < left[:, None])  # (B, K)
        return bool(((left >= self.least) & (chance.cumprod(1).sum(1) >= self.tokens)).all())

    def summed(self, raw: Sequence[Tensor], left: Tensor) -> list[Tensor]:
        """K of (2 B, V) new and old logits -> K of (B, V) weighted sums."""
        halves = [logits.chunk(2) for logits in raw]
        return [new + self.weight * old * (left > k)[:, None] for k, (new, old) in enumerate(halves)]

    def merged(self, both: ParallelLogits, left: Tensor, coin: Coin, plan: Plan) -> Draft:
        """Merge the trees grown from new levels, rows 0 to B, and old levels, rows B to 2 B."""
        limit = torch.cat([torch.full_like(left, plan.depth), left])
        grown = best_nodes(both.first, both.step, coin, plan, limit, both.vocabulary)
        fresh, old = (Beam(*half) for half in zip(*(t.chunk(2) for t in _rows(grown)), strict=True))
        return merge_trees(fresh, old, max(plan.nodes - self.nodes, 0), plan)


def _rows(beam: Beam) -> list[Tensor]:
    """All fields, expanded to the batch size."""
    return [field.expand(len(beam.tokens), -1) for field in beam]


def resized(states: Tensor, depth: int) -> Tensor:
    """(B, K, D) states cut or padded to another depth; padding is to be masked."""
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
    """A draft of fixed nodes from levels, the first (B,) `left` of which are valid."""
    if plan.width > 1 and not plan.tree:
        best = best_nodes(levels.first, levels.step, coin, plan, left, levels.vocabulary)
        return Draft(best.tokens, best.parents, plan.depth)
    draft = expand(levels.first, levels.step, sampler, coin, plan, levels.vocabulary, confidence)
    return replace(draft, tokens=draft.tokens.masked_fill(draft.levels[:, 1:] > left[:, None], PAD))


def merge_trees(fresh: Beam, old: Beam, first: int, plan: Plan) -> Draft:
    """The union of two trees below the same root, at most plan.nodes nodes.

    Selects the best `first` nodes of the new tree, then nodes that only the old tree has, then the rest
    of the new tree. Parents precede children in this order, so the selection is a tree.
    """
    rows, count = fresh.tokens.shape
    twin = _twins(fresh, old, plan.depth)  # (B, N)
    rank = _descending(_descending(fresh.score), ascending=True)  # (B, N) rank in the new tree
    fresh_key = fresh.score.double() + 2 * PRIORITY * (rank < first)
    old_key = old.score.double() + PRIORITY
    # A node of both trees counts as the new tree's, with the higher of both priorities.
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
    """(B, n) indices that sort the values, stable."""
    return values.sort(dim=1, descending=not ascending, stable=True).indices


def _twins(fresh: Beam, old: Beam, depth: int) -> Tensor:
    """(B, N) index of the new node with the same path as each old node, or -1."""
    same = old.tokens[:, :, None] == fresh.tokens[:, None]  # (B, N old, N fresh)
    twin = torch.full_like(old.tokens, -1)
    for _ in range(depth):  # iteration d settles the nodes of level d
        up = twin.gather(1, old.parents.clamp_min(0))
        up = torch.where(old.parents < 0, -1, torch.where(up < 0, -2, up))
        match = same & (up[:, :, None] == fresh.parents[:, None])
        twin = torch.where(match.any(-1), match.int().argmax(-1), -1)
    return twin
