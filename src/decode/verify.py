"""Acceptance rules of speculative decoding, batched over rows.

`match`, `recursive`, `kseq` and `traversal` are lossless: their output, continued by the target, has the
target's distribution (docs/lossless.md). `token` is `recursive` and `block` is `traversal` on a sampled
chain; `select` is `match` on the best of several drafts. `typical`, `threshold` and `lenience` are lossy
and need `Plan.lossy`.

Every rule loops over depth and over sampled siblings only, for all rows at once, and does not
synchronise with the device. Random numbers come from a `Coin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft, DraftProbs
from decode.errors import UserError
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler

HALVINGS = 40  # of the interval of a kseq rule's rho, from at most k


class VerificationResult(NamedTuple):
    """Tokens that one round emits."""

    tokens: Tensor  # (B, K + 1) accepted tokens and one more, then PAD
    slots: Tensor  # (B, K + 1) slot whose target row each token was drawn from, then 0
    accepted: Tensor  # (B,) number of accepted draft tokens


# (draft, (B,) slot, (B, N) its children, (B, V) p, coin, depth, (B,) active) -> (B, V) residual, (B,) child
Examine = Callable[[Draft, Tensor, Tensor, Tensor, Coin, int, Tensor], tuple[Tensor, Tensor]]


class TargetProbs:
    """The target's distributions at the slots of one round, warped on demand.

    Args:
        logits: (B, S, V) of the target.
        sampler: the warpers.
        seen: (B, V) bool tokens of each sequence, root included; None if no warper needs them.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, seen: Tensor | None = None) -> None:
        self._logits, self._sampler = logits, sampler
        self._seen = None if seen is None else seen.clone()
        self._row = torch.arange(logits.shape[0], device=logits.device)

    def at(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V) distributions, given the tokens passed to `append`."""
        return self._sampler.probs(self._logits[self._row, slot], self._seen)

    def append(self, token: Tensor, active: Tensor) -> None:
        """Add (B,) tokens to the paths of the active rows; a repetition penalty depends on them."""
        if self._seen is not None:
            self._seen[self._row, token.clamp_min(0)] |= active

    def all(self, draft: Draft) -> Tensor:
        """(B, S, V) distributions at every slot, each given its path from the root."""
        probs = self._sampler.probs(self._logits.flatten(0, 1), self._seen_at(draft))
        return probs.unflatten(0, self._logits.shape[:2])

    def argmax(self, draft: Draft) -> Tensor | None:
        """(B, S) greedy token at every slot; None unless the temperature is 0."""
        if self._sampler.temperature:
            return None
        tokens = self._sampler.argmax(self._logits.flatten(0, 1), self._seen_at(draft))
        return tokens.unflatten(0, self._logits.shape[:2])

    def _seen_at(self, draft: Draft) -> Tensor | None:
        """(B * S, V) bool: tokens of the sequence and of each slot's path."""
        if self._seen is None:
            return None
        # One-hot token of each node, times the ancestor matrix: counts of each token on each path.
        node = torch.zeros_like(self._logits[:, 1:]).scatter_(2, draft.tokens.clamp_min(0)[..., None], 1)
        on_path = draft.ancestors()[:, :, 1:].to(node.dtype) @ node > 0  # (B, S, V)
        return (self._seen[:, None] | on_path).flatten(0, 1)


# -- root to leaf: `match` for fixed nodes, `recursive` for sampled ones -----------------------------------


def match(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Draw y from the target's distribution; descend to the child with token y, or stop.

    Valid for any tree, however it was made. Draws are keyed by position, so sampled output equals
    plain sampling token for token.
    """
    y = target.argmax(draft)  # (B, S)
    if y is None:
        return _descend(draft, target, coin, Purpose.TARGET)
    # Temperature 0 draws nothing, so all paths are compared at once.
    if not draft.depth:
        return VerificationResult(y, torch.zeros_like(y), torch.zeros_like(y[:, 0]))
    hit = draft.tokens == y.gather(1, draft.parents + 1)  # (B, N) node has its parent's greedy token
    if draft.is_chain:  # the output is y itself, up to the first miss
        accepted = hit.long().cumprod(1).sum(1)
        place = torch.arange(y.shape[1], device=y.device).expand_as(y)
        beyond = place > accepted[:, None]
        return VerificationResult(y.masked_fill(beyond, PAD), place.masked_fill(beyond, 0), accepted)
    # Of siblings with equal tokens only the first counts, as in `_descend`. (B, N, N)
    duplicate = (draft.parents[:, :, None] == draft.parents[:, None]) & hit[:, :, None] & hit[:, None]
    hit = hit & ~duplicate.tril(-1).any(-1)
    return accept_longest(draft, hit, lambda row, end: y[row, end])


def recursive(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Recursive rejection sampling (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374).

    Starting with r = p, accept a sampled child x with probability min(1, r(x) / q(x)), else
    r <- norm (r - q)+. If no sampled child is accepted, match the fixed children with a draw from r.
    """
    return _descend(draft, target, coin, Purpose.RESIDUAL)


def kseq(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """K-SEQ (SpecTr, arXiv:2310.15141), for siblings drawn independently: accept each of k children x with
    probability min(1, p(x) / (rho q(x))), in turn and independently.

    A child is accepted with probability b(rho) = sum min(q, p / rho). rho is the smallest number of at least
    1 at which no token's accepted mass, min(q, p / rho) (1 - (1 - b)^k) / b, exceeds p. If all children are
    rejected, the token comes from what that mass leaves of p.
    """
    return _descend(draft, target, coin, Purpose.RESIDUAL, examine=_try_independent)


def lenience(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """DistillSpec's lenience f(p) = p / e (arXiv:2310.08461): `recursive`, where a sampled child is accepted
    with probability min(1, r(x) / (e q(x))).

    With e = `plan.lenience` = 1 it is `recursive`; below, the output does NOT have the target's distribution.
    """
    return _descend(draft, target, coin, Purpose.RESIDUAL, partial(_try_sampled, lenience=plan.lenience))


def select(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Self-selection (SpecDiff-2, arXiv:2511.00606): `match` on the best of several drafts.

    The choice looks at the drawn tokens, so the nodes count as fixed and q is dropped.
    """
    best = best_path(draft, target.all(draft))
    chosen = replace(draft, tokens=draft.tokens.masked_fill(~best, PAD), probs=None)
    return match(chosen, target, coin)


def best_path(draft: Draft, p: Tensor) -> Tensor:
    """(B, N) bool: nodes of the path with the most tokens accepted by `match` in expectation.

    The expectation is the sum over j of p(x_1) .. p(x_j) along the path; ties go to the first path.

    Args:
        draft: a tree.
        p: (B, S, V) the target's distributions.
    """
    row = torch.arange(p.shape[0], device=p.device)
    token_prob = p[row[:, None], draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    on_path = draft.ancestors()[:, 1:, 1:]  # (B, N, N)
    token_prob = token_prob.masked_fill(draft.tokens == PAD, 0.0)[:, None].expand_as(on_path)
    path_prob = token_prob.masked_fill(~on_path, 1.0).prod(-1, keepdim=True)  # (B, N, 1)
    expected = (on_path.to(path_prob.dtype) @ path_prob)[..., 0]  # (B, N) sum over a node's ancestors
    return on_path[row, expected.argmax(-1)]


def _descend(
    draft: Draft, target: TargetProbs, coin: Coin, purpose: Purpose, examine: Examine | None = None
) -> VerificationResult:
    """Walk from the root to the first slot without an accepted child, one depth at a time.

    `match` (purpose TARGET) treats every node as fixed; others (RESIDUAL) try sampled nodes first, by
    `examine`, `_try_sampled` unless given.
    """
    examine = examine or _try_sampled
    count, device = draft.tokens.shape[0], draft.tokens.device
    drafted = draft.probs if purpose == Purpose.RESIDUAL else None
    slot = torch.zeros(count, dtype=torch.long, device=device)  # where each row stands
    none = torch.full_like(slot, -1)
    active = torch.ones(count, dtype=torch.bool, device=device)  # rows not stopped yet
    tokens, slots = [], []
    for depth in range(draft.depth + 1):
        p, child = target.at(slot), none  # (B, V); (B,) node to descend to
        children = (draft.parents == slot[:, None] - 1) & (draft.tokens != PAD)  # (B, N)
        if drafted is not None and depth < draft.depth:
            p, child = examine(draft, slot, children, p, coin, depth, active)
            children = children & ~drafted.sampled
        undecided = active & (child < 0)
        y = none if _none_true(undecided) else coin.draw(p, Key(purpose, depth), undecided)  # (B,)
        if depth < draft.depth:
            child = torch.where(child < 0, first_true(children & (draft.tokens == y[:, None])), child)
            child_token = draft.tokens.gather(1, child.clamp_min(0)[:, None])[:, 0]
            y = torch.where(child < 0, y, child_token)
        tokens.append(torch.where(active, y, PAD))
        slots.append(slot * active)
        target.append(y, active)
        active = active & (child >= 0)
        slot = (child + 1) * active
        if _none_true(active):
            break
    missing = (0, draft.depth + 1 - len(tokens))  # depths skipped by the early exit
    emitted = nn.functional.pad(torch.stack(tokens, 1), missing, value=PAD)
    slots = nn.functional.pad(torch.stack(slots, 1), missing)
    return VerificationResult(emitted, slots, (emitted != PAD).sum(1) - 1)


def _try_sampled(
    draft: Draft,
    slot: Tensor,
    children: Tensor,
    p: Tensor,
    coin: Coin,
    depth: int,
    active: Tensor,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Examine the sampled children of (B,) `slot` in the order they were drawn.

    Returns:
        (B, V) the residual of `p` after the rejections, and (B,) the accepted child, or -1.
    """
    drafted = draft.probs
    assert drafted is not None
    q = _drawn_from(drafted, slot, p)  # (B, V)
    child = torch.full_like(slot, -1)
    waiting = children & drafted.sampled  # (B, N) not examined yet
    for rank in range(drafted.siblings):
        node, token, trying = _next_child(draft, waiting, active & (child < 0))
        p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = coin.flip(p_token, q_token * lenience, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        child = torch.where(accept, node, child)
        p = _residual(p, q, trying & ~accept)
        if rank + 1 < drafted.siblings:
            waiting = _without(waiting, node)
            q = q if drafted.replacement else without_token(q, token)
    return p, child


def _try_independent(
    draft: Draft, slot: Tensor, children: Tensor, p: Tensor, coin: Coin, depth: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `_try_sampled`, by the rule of `kseq`."""
    drafted = draft.probs
    assert drafted is not None
    q = _drawn_from(drafted, slot, p)  # (B, V)
    waiting = children & drafted.sampled  # (B, N) not examined yet
    count = waiting.sum(-1)  # (B,) k
    rho = smallest_rho(p, q, count)  # (B,)
    child = torch.full_like(slot, -1)
    for rank in range(drafted.siblings):
        node, token, trying = _next_child(draft, waiting, active & (child < 0))
        p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = coin.flip(p_token, q_token * rho, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        # Of siblings with equal tokens the first has the most below it (all of it, in parallel chains).
        twin = first_true(children & drafted.sampled & (draft.tokens == token))
        child = torch.where(accept, twin, child)
        waiting = _without(waiting, node)
    each = torch.minimum(q, p / rho[:, None])  # (B, V) mass of one child that is accepted
    chance = each.sum(-1)
    any_of = _ratio(1 - (1 - chance).clamp_min(0) ** count, chance)  # 1 + (1 - b) + ... + (1 - b)^(k - 1)
    rest = (p - each * any_of[:, None]).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    rejected = active & (count > 0) & (child < 0)
    return torch.where(rejected[:, None] & (mass > 0), rest / mass, p), child


def smallest_rho(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """(B,) the smallest rho of at least 1 with 1 - (1 - b)^k <= rho b, b = sum min(q, p / rho), by bisection.

    Any rho for which this holds is lossless, and it holds at k; the result is an upper end.

    Args:
        p: (B, V) the target's distributions.
        q: (B, V) the drafter's.
        count: (B,) k, the number of draws.
    """
    low, high = torch.ones_like(p[:, 0]), count.to(p).clamp_min(1)
    for step in range(HALVINGS):
        rho = low if not step else (low + high) / 2
        chance = torch.minimum(q, p / rho[:, None]).sum(-1)
        enough = 1 - (1 - chance).clamp_min(0) ** count <= rho * chance
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high


def _next_child(draft: Draft, waiting: Tensor, undecided: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) first of the (B, N) waiting nodes, (B, 1) its token, (B,) undecided rows that have such a node."""
    node = first_true(waiting)
    token = draft.tokens.gather(1, node.clamp_min(0)[:, None]).clamp_min(0)
    return node, token, undecided & (node >= 0)


def _without(waiting: Tensor, node: Tensor) -> Tensor:
    """(B, N) nodes without (B,) `node`."""
    return waiting.scatter(1, node.clamp_min(0)[:, None], value=False)


def _drawn_from(drafted: DraftProbs, slot: Tensor, p: Tensor) -> Tensor:
    """(B, V) distribution that the first sampled child of (B,) `slot` was drawn from, in the dtype of p."""
    row = torch.arange(slot.shape[0], device=slot.device)
    return drafted.q[row, first_true(drafted.owner == slot[:, None]).clamp_min(0)].to(p.dtype)


def _residual(p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    """Replace p by norm (p - q)+ in the (B,) rows where a token drawn from q was rejected.

    If p = q to the last bit, a rejection has probability zero and p is returned.
    """
    if _none_true(rejected):
        return p
    rest = (p - q).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(rejected[..., None] & (mass > 0), rest / mass, p)


def _none_true(mask: Tensor) -> bool:
    """Whether a CPU mask has no True. Always False on other devices, to avoid a synchronisation."""
    return mask.device.type == "cpu" and not mask.any()


# -- leaf to root ------------------------------------------------------------------------------------------


def traversal(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Traversal verification (arXiv:2505.12398): accept the first slot that passes, leaves first.

    A slot passes with a chance w, given that the subtrees of its earlier siblings failed, and has a
    residual distribution. Both follow from the tree alone, so a single draw decides which slot is
    accepted. On a chain this is block verification (Sun et al., arXiv:2403.10444).
    """
    row = torch.arange(draft.tokens.shape[0], device=draft.tokens.device)
    active = torch.ones_like(row, dtype=torch.bool)
    passes, residual = _pass_chances(draft, target.all(draft))  # (B, S), (B, S, V)
    order = draft.postorder().argsort(-1)  # (B, S) slots, every subtree before its root
    chance = passes.double().gather(1, order)
    chance[:, -1] = 1.0  # the root always passes; guards against rounding
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
    """Chances and residuals of `traversal` (theorem 2 of docs/lossless.md), level by level.

    Args:
        draft: with `probs`.
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
    w[:, 0] = 1.0
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
        _fail_sampled(draft, owner, q.to(residual.dtype), w, residual)
        start += size
        # Fixed children in closed form: child c of a parent with residual r passes with
        # w r(c) / (1 - w R), where R is the mass of its earlier siblings.
        current = fixed & (draft.levels[:, 1:] == level + 1)  # (B, N)
        parent_w = w.gather(1, draft.parents + 1)  # (B, N)
        mass = residual[row, draft.parents + 1, draft.tokens.clamp_min(0)] * current  # (B, N) r(c)
        earlier_mass = (earlier.to(mass) @ mass[..., None])[..., 0]  # (B, N) R
        child_w = _ratio(parent_w * mass, 1 - parent_w * earlier_mass).clamp_max(1)
        w[:, 1:] = torch.where(current, child_w, w[:, 1:])
        # (B, S) mass that the fixed children leave to each parent; rounding may push it below 0.
        rest = (1 - torch.zeros_like(w).scatter_add(1, draft.parents + 1, mass)).clamp_min(0)
        w = torch.where(rest < 1, _ratio(w * rest, w * rest + (1 - w)), w)
    return w, residual


def _fail_sampled(draft: Draft, owner: Tensor, q: Tensor, w: Tensor, residual: Tensor) -> None:
    """Set w of the sampled children of some slots; then update the slots as if these children failed.

    Args:
        draft: with `probs`.
        owner: (B, n) slots of one level, -1 where left out.
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
        passes = _ratio(chance * p.gather(-1, token)[..., 0], q.gather(-1, token)[..., 0]).clamp_max(1)
        # Missing nodes are routed to the root, whose w is 1 in any case.
        w.scatter_(1, torch.where(exists, node + 1, 0), torch.where(exists, passes, 1.0))
        rest = (chance[..., None] * p - q).clamp_min(0)  # unnormalised residual
        mass = rest.sum(-1)
        p = torch.where((exists & (mass > 0))[..., None], rest / mass[..., None], p)
        chance = torch.where(exists, _ratio(mass, mass + (1 - chance)), chance)
        if rank + 1 < drafted.siblings:
            waiting = waiting.scatter(2, node.clamp_min(0)[..., None], value=False)
            q = q if drafted.replacement else without_token(q, token)
    residual[row, slot], w[row, slot] = p, chance  # owners of -1 write the root's values back


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Return top / bottom, and 0 where bottom is 0: the probability of such a branch is zero."""
    return torch.where(bottom > 0, top / bottom, 0.0)


# -- lossy -------------------------------------------------------------------------------------------------


def typical(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """Accept the longest path whose tokens all have p >= min(threshold, alpha exp(-entropy)).

    Medusa's typical acceptance (arXiv:2401.10774, section 3.3.1); `threshold` leaves the entropy out.
    The output does NOT have the target's distribution.
    """
    p = target.all(draft)  # (B, S, V)
    alpha = plan.alpha if plan.rule == "typical" else math.inf
    least = torch.special.entr(p).sum(-1).neg().exp().mul(alpha).clamp_max(plan.threshold)  # (B, S)
    row = torch.arange(p.shape[0], device=p.device)[:, None]
    token_prob = p[row, draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    accept = (token_prob >= least.gather(1, draft.parents + 1)) & (draft.tokens != PAD)

    def extra(row: Tensor, end: Tensor) -> Tensor:
        return coin.draw(p[row, end], Key(Purpose.RESIDUAL, 0), torch.ones_like(row, dtype=torch.bool))

    return accept_longest(draft, accept, extra)


# -- rules by name -----------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """An acceptance rule and the drafts it can verify losslessly."""

    run: Callable[..., VerificationResult]
    accepts: str  # for error messages
    needs_chain: bool = False
    needs_probs: bool = False  # every node is sampled from a q that the draft carries
    reads_probs: bool = True  # weighs sampled nodes by q
    needs_independent: bool = False  # siblings are drawn with replacement
    lossy: bool = False


RULES = {
    "match": Rule(match, "any chain or tree", reads_probs=False),
    "token": Rule(recursive, "a chain sampled from distributions q that the draft carries", True, True),
    "block": Rule(traversal, "a chain sampled from distributions q that the draft carries", True, True),
    "recursive": Rule(recursive, "any chain or tree whose sampled nodes carry their q"),
    "kseq": Rule(kseq, "siblings drawn independently from the q that they carry", needs_independent=True),
    "traversal": Rule(traversal, "any chain or tree whose sampled nodes carry their q"),
    "select": Rule(select, "any chain or tree", reads_probs=False),
    "typical": Rule(typical, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "threshold": Rule(typical, "any chain or tree, lossily", reads_probs=False, lossy=True),
    "lenience": Rule(lenience, "any chain or tree whose sampled nodes carry their q, lossily", lossy=True),
}


def verify(plan: Plan, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Run the plan's rule on one round.

    Raises:
        UserError: the rule would not be lossless on this draft.
    """
    rule = RULES[plan.rule]
    drafted = draft.probs
    if not draft.depth and drafted is None:
        return match(draft, target, coin)  # nothing to verify; every rule draws from p
    dependent = drafted is not None and drafted.siblings > 1 and not drafted.replacement
    unfit = rule.needs_independent and dependent
    if unfit or (rule.needs_chain and not draft.is_chain) or (rule.needs_probs and drafted is None):
        raise UserError(
            f"decode.rule={plan.rule} verifies {rule.accepts}; this draft is not one: use rule=match"
        )
    if rule.reads_probs and drafted is not None and drafted.selected:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: nodes of this draft were kept or dropped after "
            "looking at the drawn tokens, so they are no longer distributed as q: use rule=match"
        )
    if rule.run is traversal and drafted is not None and drafted.ranked:
        raise UserError(
            f"decode.rule={plan.rule} would not be lossless: which nodes of this draft were kept depends "
            "on tokens drawn elsewhere in it: use rule=recursive, or a static tree"
        )
    if rule.lossy:
        return rule.run(draft, target, coin, plan)
    # If all nodes are fixed, all rules give the same distribution, and `match` is keyed like plain decoding.
    return (rule.run if draft.probs is not None else match)(draft, target, coin)


# -- shared ------------------------------------------------------------------------------------------------


def emit_path(draft: Draft, end: Tensor, extra: Tensor) -> VerificationResult:
    """Emit the path from the root to (B,) slot `end`, then the (B,) `extra` token."""
    row = torch.arange(end.shape[0], device=end.device)
    accepted = draft.levels[row, end]  # (B,)
    on_path = draft.ancestors()[row, end]  # (B, S)
    slots = torch.zeros(end.shape[0], draft.depth + 2, dtype=torch.long, device=end.device)
    # Write each slot of the path to the column of its level; the others share a last column, cut below.
    place = torch.where(on_path, draft.levels, draft.depth + 1)
    slots = slots.scatter(1, place, torch.arange(place.shape[1], device=end.device).expand_as(place))
    slots[:, -1] = 0
    # Column j emits the token of the slot at level j + 1; `extra` goes behind the last accepted one.
    tokens = nn.functional.pad(draft.tokens, (1, 0), value=PAD).gather(1, slots[:, 1:])
    tokens = tokens.scatter(1, accepted[:, None], extra[:, None])
    return VerificationResult(tokens, slots[:, :-1], accepted)


def accept_longest(
    draft: Draft, accept: Tensor, extra: Callable[[Tensor, Tensor], Tensor]
) -> VerificationResult:
    """Emit the deepest path of (B, N) accepted nodes only, then extra(row, its last slot)."""
    row = torch.arange(accept.shape[0], device=accept.device)
    rejected = draft.ancestors()[:, :, 1:] & ~accept[:, None]  # (B, S, N)
    end = draft.levels.masked_fill(rejected.any(-1), -1).argmax(-1)
    return emit_path(draft, end, extra(row, end))


def without_token(q: Tensor, token: Tensor) -> Tensor:
    """Set q of `token` to 0 and renormalise, for draws without replacement."""
    rest = q.scatter(-1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def first_true(mask: Tensor) -> Tensor:
    """(..., N) bool -> (...) index of the first True, -1 if there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)
