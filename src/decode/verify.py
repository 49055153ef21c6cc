"""Acceptance rules: what they read, what they give, and each of them, written once against a `Coin`.

`match`, `recursive` and `traversal` are lossless: what they emit, continued by the target, has the
target's distribution (docs/lossless.md). `token` and `block` are the latter two on a sampled chain, `select`
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
from torch import Tensor, nn

from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler


class Verdict(NamedTuple):
    """What a round settles."""

    tokens: Tensor  # (B, K + 1) emitted: the accepted tokens and one more, then PAD
    slots: Tensor  # (B, K + 1) slot whose row each token was drawn from, then 0
    accepted: Tensor  # (B,) accepted draft tokens


class Rows:
    """The target's laws at the slots of one round, warped where a rule asks for them.

    Args:
        logits: (B, S, V) the target's rows.
        sampler: the warpers.
        seen: (B, V) bool tokens of each sequence, root included, or None if not needed.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, seen: Tensor | None = None) -> None:
        self._logits, self._sampler = logits, sampler
        self._seen = None if seen is None else seen.clone()
        self._row = torch.arange(logits.shape[0], device=logits.device)

    def law(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V) laws, given the tokens that `follow` has reported."""
        return self._sampler.law(self._logits[self._row, slot], self._seen)

    def follow(self, token: Tensor, active: Tensor) -> None:
        """Extend each active row's path: penalties inside a tree depend on it."""
        if self._seen is not None:
            self._seen[self._row, token.clamp_min(0)] |= active

    def laws(self, draft: Draft) -> Tensor:
        """(B, S, V) laws at every slot, each given its own path from the root."""
        laws = self._sampler.law(self._logits.flatten(0, 1), self._seen_at(draft))
        return laws.unflatten(0, self._logits.shape[:2])

    def best(self, draft: Draft) -> Tensor | None:
        """(B, S) the one token that each slot's law allows, at temperature 0."""
        if self._sampler.temperature:
            return None
        best = self._sampler.best(self._logits.flatten(0, 1), self._seen_at(draft))
        return best.unflatten(0, self._logits.shape[:2])

    def _seen_at(self, draft: Draft) -> Tensor | None:
        """(B * S, V) bool: tokens of the sequence and of each slot's path."""
        if self._seen is None:
            return None
        node = torch.zeros_like(self._logits[:, 1:]).scatter_(2, draft.tokens.clamp_min(0)[..., None], 1)
        below = draft.ancestors()[:, :, 1:].to(node.dtype) @ node > 0  # (B, S, V)
        return (self._seen[:, None] | below).flatten(0, 1)


# -- from the root to a leaf: `match` for chosen tokens, `recursive` for drawn ones ------------------------


def match(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Draw y from the target's row; descend while y is a child, else stop. Any tree, any source.

    Draws are keyed by position, so sampled output equals plain sampling token for token.
    """
    y = rows.best(draft)  # (B, S)
    if y is None:
        return _walk(draft, rows, coin, Purpose.TARGET)
    # Nothing is drawn at temperature 0, so all paths are looked at together.
    if not draft.depth:
        return Verdict(y, torch.zeros_like(y), torch.zeros_like(y[:, 0]))
    hit = draft.tokens == y.gather(1, draft.parents + 1)  # (B, N)
    if draft.is_chain:  # what is emitted is y itself, up to the first miss
        accepted = hit.long().cumprod(1).sum(1)
        place = torch.arange(y.shape[1], device=y.device).expand_as(y)
        beyond = place > accepted[:, None]
        return Verdict(y.masked_fill(beyond, PAD), place.masked_fill(beyond, 0), accepted)
    # Of twins the first is the child, as in the walk.
    twin = (draft.parents[:, :, None] == draft.parents[:, None]) & hit[:, :, None] & hit[:, None]
    hit = hit & ~twin.tril(-1).any(-1)
    return longest(draft, hit, lambda row, end: y[row, end])


def recursive(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Recursive rejection (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374): keep a sampled
    child x with probability min(1, r(x) / q(x)), else r <- norm (r - q)+; when none is kept, match
    the fixed children with a draw from r.
    """
    return _walk(draft, rows, coin, Purpose.RESIDUAL)


def select(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Self-selection (SpecDiff-2, arXiv:2511.00606): `match` on the best of several drafts alone.

    A draft that was chosen for its tokens consists of chosen tokens, whatever it was drawn from.
    """
    best = most_expected(draft, rows.laws(draft))
    return match(replace(draft, tokens=draft.tokens.masked_fill(~best, PAD), laws=None), rows, coin)


def most_expected(draft: Draft, laws: Tensor) -> Tensor:
    """(B, N) bool: the path of which `match` keeps most in expectation, the first of equals.

    Along a path that is the sum over j of p(x_1) .. p(x_j); `laws` (B, S, V) are the target's.
    """
    row = torch.arange(laws.shape[0], device=laws.device)
    mass = laws[row[:, None], draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    on_path = draft.ancestors()[:, 1:, 1:]  # (B, N, N)
    mass = mass.masked_fill(draft.tokens == PAD, 0.0)[:, None].expand_as(on_path)
    reached = mass.masked_fill(~on_path, 1.0).prod(-1, keepdim=True)  # (B, N, 1)
    score = (on_path.to(reached.dtype) @ reached)[..., 0]
    return on_path[row, score.argmax(-1)]


def _walk(draft: Draft, rows: Rows, coin: Coin, purpose: Purpose) -> Verdict:
    count, device = draft.tokens.shape[0], draft.tokens.device
    laws = draft.laws if purpose == Purpose.RESIDUAL else None  # `match` takes every node as fixed
    slot = torch.zeros(count, dtype=torch.long, device=device)
    nobody = torch.full_like(slot, -1)
    active = torch.ones(count, dtype=torch.bool, device=device)
    tokens, slots = [], []
    for depth in range(draft.depth + 1):
        law, child = rows.law(slot), nobody  # (B, V); (B,) the node to descend to
        below = (draft.parents == slot[:, None] - 1) & (draft.tokens != PAD)  # (B, N)
        if laws is not None and depth < draft.depth:
            law, child = _try_sampled(draft, slot, below, law, coin, depth, active)
            below = below & ~laws.sampled
        some = active & (child < 0)
        y = nobody if _nobody(some) else coin.draw(law, Key(purpose, depth), some)  # (B,)
        if depth < draft.depth:
            child = torch.where(child < 0, first(below & (draft.tokens == y[:, None])), child)
            kept = draft.tokens.gather(1, child.clamp_min(0)[:, None])[:, 0]
            y = torch.where(child < 0, y, kept)
        tokens.append(torch.where(active, y, PAD))
        slots.append(slot * active)
        rows.follow(y, active)
        active = active & (child >= 0)
        slot = (child + 1) * active
        if _nobody(active):
            break
    left = (0, draft.depth + 1 - len(tokens))
    emitted = nn.functional.pad(torch.stack(tokens, 1), left, value=PAD)
    slots = nn.functional.pad(torch.stack(slots, 1), left)
    return Verdict(emitted, slots, (emitted != PAD).sum(1) - 1)


def _try_sampled(
    draft: Draft, slot: Tensor, below: Tensor, law: Tensor, coin: Coin, depth: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, V) what is left of the target's law at (B,) `slot`; (B,) the sampled child kept, or -1."""
    laws = draft.laws
    assert laws is not None
    row = torch.arange(slot.shape[0], device=slot.device)
    q = laws.q[row, first(laws.owner == slot[:, None]).clamp_min(0)].to(law.dtype)  # (B, V)
    child = torch.full_like(slot, -1)
    waiting = below & laws.sampled  # (B, N) not examined yet
    for rank in range(laws.siblings):
        node = first(waiting)
        trying = active & (node >= 0) & (child < 0)
        at = draft.tokens.gather(1, node.clamp_min(0)[:, None]).clamp_min(0)  # (B, 1)
        accept, proposal = law.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
        keep = coin.flip(accept, proposal, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        child = torch.where(keep, node, child)
        law = _without(law, q, trying & ~keep)
        if rank + 1 < laws.siblings:
            waiting = waiting.scatter(1, node.clamp_min(0)[:, None], value=False)
            q = q if laws.replacement else struck(q, at)
    return law, child


def _without(law: Tensor, q: Tensor, where: Tensor) -> Tensor:
    """What is left of `law`, norm (law - q)+, where a token of law q was rejected.

    Where both are equal to the last bit that has probability zero, and `law` itself serves.
    """
    if _nobody(where):
        return law
    left = (law - q).clamp_min(0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(where[..., None] & (mass > 0), left / mass, law)


def _nobody(rows: Tensor) -> bool:
    """Whether no row needs what comes next: asked on a CPU alone, where the answer costs nothing."""
    return rows.device.type == "cpu" and not rows.any()


# -- from the leaves to the root ---------------------------------------------------------------------------


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


# -- with loss ---------------------------------------------------------------------------------------------


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


# -- by name -----------------------------------------------------------------------------------------------


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
    if _nobody(~usable):
        return draft
    # (B, S + 1): of each slot; the last column takes the rows of q that belong to none.
    slot = torch.where(laws.owner < 0, draft.tokens.shape[1] + 1, laws.owner)
    lost = torch.zeros_like(draft.tokens, dtype=torch.bool)
    lost = torch.nn.functional.pad(lost, (1, 1)).scatter(1, slot, ~usable)
    gone = laws.sampled & lost.gather(1, draft.parents + 1)  # (B, N)
    return replace(draft, tokens=draft.tokens.masked_fill(gone, PAD))


# -- shared by the rules -----------------------------------------------------------------------------------


def settle(draft: Draft, end: Tensor, extra: Tensor) -> Verdict:
    """Emit the path from the root to (B,) slot `end`, and one more token."""
    row = torch.arange(end.shape[0], device=end.device)
    accepted = draft.levels[row, end]  # (B,)
    on_path = draft.ancestors()[row, end]  # (B, S)
    slots = torch.zeros(end.shape[0], draft.depth + 2, dtype=torch.long, device=end.device)
    place = torch.where(on_path, draft.levels, draft.depth + 1)  # the last column is thrown away
    slots = slots.scatter(1, place, torch.arange(place.shape[1], device=end.device).expand_as(place))
    slots[:, -1] = 0
    tokens = nn.functional.pad(draft.tokens, (1, 0), value=PAD).gather(1, slots[:, 1:])
    tokens = tokens.scatter(1, accepted[:, None], extra[:, None])
    return Verdict(tokens, slots[:, :-1], accepted)


def longest(draft: Draft, good: Tensor, extra: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Emit the deepest path all of whose nodes are (B, N) `good`, and extra(row, its end)."""
    row = torch.arange(good.shape[0], device=good.device)
    fails = draft.ancestors()[:, :, 1:] & ~good[:, None]  # (B, S, N)
    end = draft.levels.masked_fill(fails.any(-1), -1).argmax(-1)
    return settle(draft, end, extra(row, end))


def struck(q: Tensor, at: Tensor) -> Tensor:
    """Strike the token at `at` from q and renormalise: drawn without replacement."""
    left = q.scatter(-1, at, 0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def first(mask: Tensor) -> Tensor:
    """(..., N) bool -> (...) index of the first True, -1 if there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)
