"""Acceptance rules, each written once against a `Coin`.

`match`, `recursive` and `traversal` are lossless: what they emit, continued by the target, has the
target's law (docs/lossless.md). `token` and `block` are the latter two on a sampled chain, `select`
is the first on one of several drafts. The rules loop over depth and over sampled siblings, for all
rows at once, and never ask the device for a value. `lenient` is not lossless, and only runs where
the plan says `lossy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.descent import match, recursive, select
from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.traversal import traversal
from decode.verdict import Rows, Verdict, longest


def lenient(draft: Draft, rows: Rows, coin: Coin, threshold: float, alpha: float) -> Verdict:
    """Keep the longest path whose tokens all have p >= min(threshold, alpha exp(-entropy)).

    Medusa's typical acceptance (arXiv:2401.10774, section 3.3.1); without `alpha` a plain threshold.
    What it emits does NOT have the target's law.
    """
    laws = rows.laws(draft)  # (B, S, V)
    least = torch.special.entr(laws).sum(-1).neg().exp().mul(alpha).clamp_max(threshold)  # (B, S)
    at = torch.arange(laws.shape[0], device=laws.device)[:, None]
    mass = laws[at, draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    good = (mass >= least.gather(1, draft.parents + 1)) & (draft.tokens != PAD)

    def extra(row: Tensor, end: Tensor) -> Tensor:
        return coin.draw(laws[row, end], Key(Purpose.RESIDUAL, 0), torch.ones_like(row, dtype=torch.bool))

    return longest(draft, good, extra)


class Rule(NamedTuple):
    """An acceptance rule and what it can verify without loss."""

    run: Callable[..., Verdict]
    takes: str
    needs_chain: bool = False
    needs_laws: bool = False  # every node sampled from a law that the draft carries
    reads_laws: bool = True  # weighs sampled nodes by their laws
    lossy: bool = False


RULES = {
    "match": Rule(match, "any chain or tree", reads_laws=False),
    "token": Rule(recursive, "a chain sampled from laws q that the draft carries", True, True),
    "block": Rule(traversal, "a chain sampled from laws q that the draft carries", True, True),
    "recursive": Rule(recursive, "any chain or tree whose sampled nodes carry their laws"),
    "traversal": Rule(traversal, "any chain or tree whose sampled nodes carry their laws"),
    "select": Rule(select, "any chain or tree", reads_laws=False),
    "typical": Rule(lenient, "any chain or tree, with loss", reads_laws=False, lossy=True),
    "threshold": Rule(lenient, "any chain or tree, with loss", reads_laws=False, lossy=True),
}


def verify(plan: Plan, draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Run the plan's rule, or say why it would not be lossless on this draft.

    Raises:
        UserError: a draft that the rule cannot verify without loss.
    """
    rule = RULES[plan.rule]
    if not draft.depth and draft.laws is None:
        return match(draft, rows, coin)  # nothing to verify; every rule draws from p
    if (rule.needs_chain and not draft.is_chain) or (rule.needs_laws and draft.laws is None):
        raise UserError(f"decode.rule={plan.rule} verifies {rule.takes}; this draft is none: use rule=match")
    if rule.reads_laws and draft.laws is not None and draft.laws.selected:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: this draft's nodes were kept or dropped by a "
            "look at the tokens drawn, so they no longer have the law q: use rule=match"
        )
    if rule.run is traversal and draft.laws is not None and draft.laws.ranked:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: which of this draft's nodes were kept depends "
            "on tokens drawn elsewhere in it: use rule=recursive, or a static tree"
        )
    if rule.lossy:
        return rule.run(draft, rows, coin, plan.threshold, plan.alpha if plan.rule == "typical" else math.inf)
    if rule.reads_laws:
        draft = _weighable(draft)
    # Where all nodes are fixed the rules are one in law, and `match` is keyed like plain decoding.
    return (rule.run if draft.laws is not None else match)(draft, rows, coin)


def _weighable(draft: Draft) -> Draft:
    """The draft without the drawn children of slots whose stated q has no mass, or no finite one.

    Whether a child is left out depends on q alone and never on the token, so the rest keeps its
    distribution. `expand` drafts no such child; another proposer may.
    """
    laws = draft.laws
    if laws is None or not laws.levels:
        return draft
    mass = laws.q.sum(-1, dtype=torch.float32)  # (B, Q)
    usable = mass.isfinite() & (mass > 0)
    # (B, S + 1): of each slot; the last column takes the rows of q that belong to none.
    slot = torch.where(laws.owner < 0, draft.tokens.shape[1] + 1, laws.owner)
    lost = torch.zeros_like(draft.tokens, dtype=torch.bool)
    lost = torch.nn.functional.pad(lost, (1, 1)).scatter(1, slot, ~usable)
    gone = laws.sampled & lost.gather(1, draft.parents + 1)  # (B, N)
    return replace(draft, tokens=draft.tokens.masked_fill(gone, PAD))
