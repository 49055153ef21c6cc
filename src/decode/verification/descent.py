"""Rules that walk from the root: `match` for fixed nodes, `recursive` and `kseq` for sampled ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft
from decode.rng import Coin, Key, Purpose
from decode.verification.result import (
    VerificationResult,
    accept_longest,
    drawn_from,
    first_true,
    ratio,
    without_token,
)
from decode.verification.target_probs import TargetProbs

HALVINGS = 40  # of the interval of a kseq rule's rho, from at most k

# (draft, (B,) slot, (B, N) its children, (B, V) p, coin, depth, (B,) active) -> (B, V) residual, (B,) child
Examine = Callable[[Draft, Tensor, Tensor, Tensor, Coin, int, Tensor], tuple[Tensor, Tensor]]
# (draft, target, (B,) slot, (B, N) its children) -> (B,) child to take though another token was drawn, or -1
Instead = Callable[[Draft, TargetProbs, Tensor, Tensor], Tensor]


def match(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Draw y from the target's distribution; descend to the child with token y, or stop.

    Valid for any tree, however it was made. Draws are keyed by position, so sampled output equals
    plain sampling token for token.
    """
    y = target.argmax(draft)  # (B, S)
    if y is None:
        return descend(draft, target, coin, Purpose.TARGET)
    # Temperature 0 draws nothing, so all paths are compared at once.
    if not draft.depth:
        return VerificationResult(y, torch.zeros_like(y), torch.zeros_like(y[:, 0]))
    hit = draft.tokens == y.gather(1, draft.parents + 1)  # (B, N) node has its parent's greedy token
    if draft.is_chain:  # the output is y itself, up to the first miss
        accepted = hit.long().cumprod(1).sum(1)
        place = torch.arange(y.shape[1], device=y.device).expand_as(y)
        beyond = place > accepted[:, None]
        return VerificationResult(y.masked_fill(beyond, PAD), place.masked_fill(beyond, 0), accepted)
    # Of siblings with equal tokens only the first counts, as in `descend`. (B, N, N)
    duplicate = (draft.parents[:, :, None] == draft.parents[:, None]) & hit[:, :, None] & hit[:, None]
    hit = hit & ~duplicate.tril(-1).any(-1)
    return accept_longest(draft, hit, lambda row, end: y[row, end])


def recursive(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Recursive rejection sampling (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374).

    Starting with r = p, accept a sampled child x with probability min(1, r(x) / q(x)), else
    r <- norm (r - q)+. If no sampled child is accepted, match the fixed children with a draw from r.
    """
    return descend(draft, target, coin, Purpose.RESIDUAL)


def kseq(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """K-SEQ (SpecTr, arXiv:2310.15141), for siblings drawn independently: accept each of k children x with
    probability min(1, p(x) / (rho q(x))), in turn and independently.

    A child is accepted with probability b(rho) = sum min(q, p / rho). rho is the smallest number of at least
    1 at which no token's accepted mass, min(q, p / rho) (1 - (1 - b)^k) / b, exceeds p. If all children are
    rejected, the token comes from what that mass leaves of p.
    """
    return descend(draft, target, coin, Purpose.RESIDUAL, examine=_try_independent)


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


def descend(
    draft: Draft,
    target: TargetProbs,
    coin: Coin,
    purpose: Purpose,
    examine: Examine | None = None,
    instead: Instead | None = None,
) -> VerificationResult:
    """Walk from the root to the first slot without an accepted child, one depth at a time.

    `match` (purpose TARGET) treats every node as fixed; others (RESIDUAL) try sampled nodes first, by
    `examine`, `try_sampled` unless given. Where no child has the target's token, a lossy rule may accept
    another, by `instead`.
    """
    examine = examine or try_sampled
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
            if instead is not None:
                child = torch.where(child < 0, instead(draft, target, slot, children), child)
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


def try_sampled(
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
    q = drawn_from(drafted, slot, p.dtype)  # (B, V)
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
    """Like `try_sampled`, by the rule of `kseq`."""
    drafted = draft.probs
    assert drafted is not None
    q = drawn_from(drafted, slot, p.dtype)  # (B, V)
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
    any_of = ratio(1 - (1 - chance).clamp_min(0) ** count, chance)  # 1 + (1 - b) + ... + (1 - b)^(k - 1)
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
