"""`traversal`: accept from the leaves to the root; on a chain it is block verification."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.rng import Coin, Key, Purpose
from decode.verification.result import (
    VerificationResult,
    emit_path,
    first_true,
    normalised,
    ratio,
    without_token,
)
from decode.verification.rule import Rule
from decode.verification.shape import Shape
from decode.verification.target_probs import TargetProbs


class Traversal(Rule):
    """Traversal verification (arXiv:2505.12398): accept the first slot that passes, leaves first.

    A slot passes with probability w, given that the subtrees of its earlier siblings failed, and has a
    residual distribution. Both follow from the tree, so a single draw decides the accepted slot. On a chain
    this is block verification (Sun et al., arXiv:2403.10444).
    """

    name = "traversal"
    weighs_paths = True

    @override
    def check(self, plan: Shape) -> None:
        if plan.proposal == "hybrid" and plan.depth and not plan.tree:
            raise UserError(
                "decode.rule=traversal verifies one subtree after another, and in a dynamic tree the tokens "
                "drawn in one decide which nodes of another are kept: not lossless. Give decode.tree "
                "(decode=static), or rule=recursive"
            )

    @override
    def unfit(self, draft: Draft) -> str:
        if not (reason := super().unfit(draft)) and draft.probs is not None and draft.probs.ranked:
            return (
                "would not be lossless: which nodes of this draft were kept depends on tokens drawn "
                "elsewhere in it: use rule=recursive, or a static tree"
            )
        return reason

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        row = torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
        active = torch.ones_like(row, dtype=torch.bool)
        passes, residual = _pass_chances(draft, target.all(draft))  # (B, S), (B, S, V)
        order = draft.postorder().argsort(-1)  # (B, S) slots, every subtree before its root
        chance = passes.double().gather(1, order)
        chance[:, -1].fill_(1.0)  # the root always passes; guards against rounding
        # Chance that all slots before this one failed: exclusive cumulative product.
        failed = torch.cat([torch.ones_like(chance[:, :1]), (1 - chance).cumprod(1)[:, :-1]], 1)
        end = order[row, coin.draw(chance * failed, Key(Purpose.ACCEPT, 0), active)]  # (B,) accepted slot
        # The fixed children of this slot failed, so their tokens cannot follow: multiply them by 0.
        p = residual[row, end]  # (B, V)
        child = (draft.parents == end[:, None] - 1) & (draft.tokens != PAD)  # (B, N)
        if draft.probs is not None:
            child = child & ~draft.probs.sampled
        rest = p * torch.ones_like(p).scatter_reduce(1, draft.tokens.clamp_min(0), (~child).to(p), "prod")
        p = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
        return emit_path(draft, end, coin.draw(p, Key(Purpose.RESIDUAL, 0), active))


def _pass_chances(draft: Draft, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Chances and residuals of `Traversal` (theorem 2 of docs/lossless.md), level by level.

    Args:
        draft: draft with `probs`.
        residual: (B, S, V) the target's distributions; changed in place.

    Returns:
        (B, S) chance of each slot to pass once its children have failed, 0 for padding, and
        (B, S, V) its residual distribution once its sampled children have failed.
    """
    drafted = draft.probs
    assert drafted is not None
    assert len(drafted.levels) == draft.depth, "fixed children of a level without an entry would be lost"
    rows, nodes = draft.tokens.shape
    row = torch.arange(rows, device=residual.device)[:, None]
    w = torch.zeros(rows, nodes + 1, dtype=residual.dtype, device=residual.device)  # (B, S)
    w[:, 0].fill_(1.0)
    # Fixed nodes and their earlier fixed siblings. A repeated token is dropped: the first one takes
    # all of its mass.
    fixed = (draft.tokens != PAD) & ~drafted.sampled  # (B, N)
    siblings = (draft.parents[:, :, None] == draft.parents[:, None]) & fixed[:, :, None] & fixed[:, None]
    order = torch.arange(nodes, device=residual.device)
    earlier = siblings & (order < order[:, None])  # (B, N, N): node j is an earlier sibling of node i
    fixed = fixed & ~(earlier & (draft.tokens[:, :, None] == draft.tokens[:, None])).any(-1)
    earlier = earlier & fixed[:, None]
    start = 0
    for level, size in enumerate(drafted.levels):  # parents of this level, root first
        owner, q = drafted.owner[:, start : start + size], drafted.q[:, start : start + size]
        _fail_sampled(draft, owner, normalised(q.to(residual.dtype)), w, residual)
        start += size
        # Fixed children in closed form: child c of a parent with residual r passes with
        # w r(c) / (1 - w R), where R is the mass of its earlier siblings.
        current = fixed & (draft.levels[:, 1:] == level + 1)  # (B, N)
        parent_w = w.gather(1, draft.parents + 1)  # (B, N)
        mass = residual[row, draft.parents + 1, draft.tokens.clamp_min(0)] * current  # (B, N) r(c)
        earlier_mass = (earlier.to(mass) @ mass[..., None])[..., 0]  # (B, N) R
        child_w = ratio(parent_w * mass, 1 - parent_w * earlier_mass).clamp_max(1)
        w[:, 1:] = torch.where(current, child_w, w[:, 1:])
        # (B, S) mass that the fixed children leave to each parent; rounding may push it below 0.
        rest = (1 - torch.zeros_like(w).scatter_add(1, draft.parents + 1, mass)).clamp_min(0)
        w = torch.where(rest < 1, ratio(w * rest, w * rest + (1 - w)), w)
    return w, residual


def _fail_sampled(draft: Draft, owner: Tensor, q: Tensor, w: Tensor, residual: Tensor) -> None:
    """Set w of the sampled children of some slots; then update the slots as if these children failed.

    Args:
        draft: draft with `probs`.
        owner: (B, n) slots of one level, -1 for omitted ones.
        q: (B, n, V) distributions that their first sampled children were drawn from.
        w: (B, S) chances; changed in place.
        residual: (B, S, V) residual distributions; changed in place.
    """
    drafted = draft.probs
    assert drafted is not None
    row = torch.arange(owner.shape[0], device=owner.device)[:, None]
    slot = owner.clamp_min(0)
    p, chance = residual[row, slot], w[row, slot]  # (B, n, V), (B, n)
    children = (draft.parents[:, None] == owner[..., None] - 1) & (owner >= 0)[..., None]
    waiting = children & (drafted.sampled & (draft.tokens != PAD))[:, None]  # (B, n, N)
    for rank in range(drafted.siblings):
        node = first_true(waiting)  # (B, n)
        exists = node >= 0
        token = draft.tokens.gather(1, node.clamp_min(0)).clamp_min(0)[..., None]  # (B, n, 1)
        passes = ratio(chance * p.gather(-1, token)[..., 0], q.gather(-1, token)[..., 0]).clamp_max(1)
        # Missing nodes are routed to the root, whose w is 1 in any case.
        w.scatter_(1, torch.where(exists, node + 1, 0), torch.where(exists, passes, 1.0))
        rest = (chance[..., None] * p - q).clamp_min(0)  # unnormalised residual
        mass = rest.sum(-1)
        p = torch.where((exists & (mass > 0))[..., None], rest / mass[..., None], p)
        chance = torch.where(exists, ratio(mass, mass + (1 - chance)), chance)
        if rank + 1 < drafted.siblings:
            waiting = waiting.scatter(2, node.clamp_min(0)[..., None], value=False)
            q = q if drafted.replacement else without_token(q, token)
    residual[row, slot], w[row, slot] = p, chance  # owners of -1 write the root's values back
