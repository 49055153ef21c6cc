"""The rule that goes from the leaves to the root."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.rng import Coin, Key, Purpose
from decode.verdict import Rows, Verdict, first, settle, struck


def traversal(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Traversal verification (arXiv:2505.12398): the first slot that stands, leaves first.

    A slot carries the chance w of standing once its elder siblings' subtrees have failed, and what
    is left of its law; both follow from the tree alone, so one draw says which slot stands. On a
    chain this is block verification (Sun et al., arXiv:2403.10444).
    """
    row = torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
    every = torch.ones_like(row, dtype=torch.bool)
    stands, left = _leaf_chances(draft, rows.laws(draft))  # (B, S), (B, S, V)
    order = draft.leaf_first().argsort(-1)  # (B, S) slots
    chance = stands.double().gather(1, order)
    chance[:, -1] = 1.0  # the root always stands; rounding must not say otherwise
    failed = torch.cat([torch.ones_like(chance[:, :1]), (1 - chance).cumprod(1)[:, :-1]], 1)
    end = order[row, coin.draw(chance * failed, Key(Purpose.ACCEPT, 0), every)]
    # The fixed children of the slot that stands have failed, so none of them can follow.
    law = left[row, end]
    node = (draft.parents == end[:, None] - 1) & (draft.tokens != PAD)
    if draft.laws is not None:
        node = node & ~draft.laws.sampled
    rest = law * torch.ones_like(law).scatter_reduce(1, draft.tokens.clamp_min(0), (~node).to(law), "prod")
    law = torch.where(rest.sum(-1, keepdim=True) > 0, rest, law)
    return settle(draft, end, coin.draw(law, Key(Purpose.RESIDUAL, 0), every))


def _leaf_chances(draft: Draft, left: Tensor) -> tuple[Tensor, Tensor]:
    """Theorem 2 of docs/lossless.md for all slots, level by level.

    Args:
        draft: with laws.
        left: (B, S, V) the target's laws; changed in place.

    Returns:
        (B, S) chance of each slot to stand once its children have failed, 0 for padding, and
        (B, S, V) what is left of its law when its sampled children have.
    """
    laws = draft.laws
    assert laws is not None
    assert len(laws.levels) == draft.depth, "chosen children of a level without an entry would be lost"
    rows, nodes = draft.tokens.shape
    row = torch.arange(rows, device=left.device)[:, None]
    w = torch.zeros(rows, nodes + 1, dtype=left.dtype, device=left.device)
    w[:, 0] = 1.0
    # Elder fixed siblings that are other tokens: an equal one leaves a later one nothing.
    fixed = (draft.tokens != PAD) & ~laws.sampled
    same = (draft.parents[:, :, None] == draft.parents[:, None]) & fixed[:, :, None] & fixed[:, None]
    order = torch.arange(nodes, device=left.device)
    elder = same & (order < order[:, None])  # (B, N, N): node j is an elder of node i
    fixed = fixed & ~(elder & (draft.tokens[:, :, None] == draft.tokens[:, None])).any(-1)
    elder = elder & fixed[:, None]
    start = 0
    for level, size in enumerate(laws.levels):
        owner, q = laws.owner[:, start : start + size], laws.q[:, start : start + size]
        _fail_sampled(draft, owner, q.to(left.dtype), w, left)
        start += size
        # Fixed children in closed form: a child of law r(c) stands first with w r(c) / (1 - w R),
        # where R is the mass of its elders.
        here = fixed & (draft.levels[:, 1:] == level + 1)  # (B, N)
        above = w.gather(1, draft.parents + 1)
        mass = left[row, draft.parents + 1, draft.tokens.clamp_min(0)] * here  # (B, N)
        elders = (elder.to(mass) @ mass[..., None])[..., 0]
        w[:, 1:] = torch.where(here, _ratio(above * mass, 1 - above * elders).clamp_max(1), w[:, 1:])
        # (B, S) of parents; where they take all, rounding must not leave less than nothing.
        kept = (1 - torch.zeros_like(w).scatter_add(1, draft.parents + 1, mass)).clamp_min(0)
        w = torch.where(kept < 1, _ratio(w * kept, w * kept + (1 - w)), w)
    return w, left


def _fail_sampled(draft: Draft, owner: Tensor, q: Tensor, w: Tensor, left: Tensor) -> None:
    """Give the sampled children of (B, n) slots their w, then let them fail; in place."""
    laws = draft.laws
    assert laws is not None
    row = torch.arange(owner.shape[0], device=owner.device)[:, None]
    slot = owner.clamp_min(0)
    law, chance = left[row, slot], w[row, slot]  # (B, n, V), (B, n)
    below = (draft.parents[:, None] == owner[..., None] - 1) & (owner >= 0)[..., None]
    waiting = below & (laws.sampled & (draft.tokens != PAD))[:, None]  # (B, n, N)
    for rank in range(laws.siblings):
        node = first(waiting)  # (B, n)
        real = node >= 0
        at = draft.tokens.gather(1, node.clamp_min(0)).clamp_min(0)[..., None]  # (B, n, 1)
        stand = _ratio(chance * law.gather(-1, at)[..., 0], q.gather(-1, at)[..., 0]).clamp_max(1)
        # Rows of nodes that are not there write to the root, which is one whatever is written.
        w.scatter_(1, torch.where(real, node + 1, 0), torch.where(real, stand, 1.0))
        rest = (chance[..., None] * law - q).clamp_min(0)
        mass = rest.sum(-1)
        law = torch.where((real & (mass > 0))[..., None], rest / mass[..., None], law)
        chance = torch.where(real, _ratio(mass, mass + (1 - chance)), chance)
        if rank + 1 < laws.siblings:
            waiting = waiting.scatter(2, node.clamp_min(0)[..., None], value=False)
            q = q if laws.replacement else struck(q, at)
    left[row, slot], w[row, slot] = law, chance  # of nodes that were left out: the root's own


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Give top / bottom, and 0 where there is nothing below: such a branch is never reached."""
    return torch.where(bottom > 0, top / bottom, 0.0)
