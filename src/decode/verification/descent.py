"""The walk down the draft that most rules use, and `match`, which compares tokens only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft
from decode.rng import Coin, Key, Purpose
from decode.transfer import on_device_only
from decode.verification.result import (
    VerificationResult,
    accept_longest,
    drawn_from,
    first_true,
    without_token,
)
from decode.verification.target_probs import TargetProbs

# (draft, (B,) slot, (B, N) its children, (B, V) p, coin, depth, (B,) active) -> (B, V) residual, (B,) child
Examine = Callable[[Draft, Tensor, Tensor, Tensor, Coin, int, Tensor], tuple[Tensor, Tensor]]
# (draft, target, (B,) slot, (B, N) its children) -> (B,) child to accept instead of the drawn token, or -1
Instead = Callable[[Draft, TargetProbs, Tensor, Tensor], Tensor]


def match(draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
    """Draw y from the target's distribution; go to the child with token y, or stop.

    Valid for any tree, whatever its source. Draws are keyed by position, so sampled output equals
    plain sampling token for token.
    """
    y = target.argmax(draft)  # (B, S)
    if y is None:
        return descend(draft, target, coin, Purpose.TARGET)
    # Temperature 0 draws nothing, so all paths are compared at once.
    if not draft.depth:
        return VerificationResult(y, torch.zeros_like(y), torch.zeros_like(y[:, 0]))
    hit = draft.tokens == y.gather(1, draft.parents + 1)  # (B, N) token is the target's choice at the parent
    if draft.is_chain:  # the output is y itself, up to the first miss
        accepted = hit.long().cumprod(1).sum(1)
        place = torch.arange(y.shape[1], device=y.device).expand_as(y)
        beyond = place > accepted[:, None]
        return VerificationResult(y.masked_fill(beyond, PAD), place.masked_fill(beyond, 0), accepted)
    # Only the first of siblings with equal tokens counts, as in `descend`. (B, N, N)
    duplicate = (draft.parents[:, :, None] == draft.parents[:, None]) & hit[:, :, None] & hit[:, None]
    hit = hit & ~duplicate.tril(-1).any(-1)
    return accept_longest(draft, hit, lambda row, end: y[row, end])


def descend(
    draft: Draft,
    target: TargetProbs,
    coin: Coin,
    purpose: Purpose,
    examine: Examine | None = None,
    instead: Instead | None = None,
) -> VerificationResult:
    """Walk from the root to the first slot without an accepted child, one depth at a time.

    Purpose TARGET (`match`) accepts a child only if the target draws its token. RESIDUAL (other rules) first
    tests sampled children with `examine`, by default `try_sampled`. If no child is accepted, a lossy rule
    may choose one with `instead`.
    """
    examine = examine or try_sampled
    count, device = draft.tokens.shape[0], draft.tokens.device
    drafted = draft.probs if purpose == Purpose.RESIDUAL else None
    slot = torch.zeros(count, dtype=torch.long, device=device)  # current slot of each row
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
        y = none if none_true(undecided) else coin.draw(p, Key(purpose, depth), undecided)  # (B,)
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
        if none_true(active):
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
    """Accept or reject the sampled children of (B,) `slot`, in the order of drawing.

    Returns:
        (B, V) the residual of `p` after the rejections, and (B,) the accepted child, or -1.
    """
    drafted = draft.probs
    assert drafted is not None
    q = drawn_from(drafted, slot, p.dtype)  # (B, V)
    child = torch.full_like(slot, -1)
    waiting = children & drafted.sampled  # (B, N) not examined yet
    for rank in range(drafted.siblings):
        node, token, trying = next_child(draft, waiting, active & (child < 0))
        p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = coin.flip(p_token, q_token * lenience, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        child = torch.where(accept, node, child)
        p = _residual(p, q, trying & ~accept)
        if rank + 1 < drafted.siblings:
            waiting = without_node(waiting, node)
            q = q if drafted.replacement else without_token(q, token)
    return p, child


def next_child(draft: Draft, waiting: Tensor, undecided: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) first of the (B, N) waiting nodes, (B, 1) its token, (B,) undecided rows that have such a node."""
    node = first_true(waiting)
    token = draft.tokens.gather(1, node.clamp_min(0)[:, None]).clamp_min(0)
    return node, token, undecided & (node >= 0)


def without_node(waiting: Tensor, node: Tensor) -> Tensor:
    """(B, N) nodes without (B,) `node`."""
    return waiting.scatter(1, node.clamp_min(0)[:, None], value=False)


def _residual(p: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    """Replace p by norm (p - q)+ in the (B,) rows where a token drawn from q was rejected.

    If p = q to the last bit, a rejection has probability zero and p is returned.
    """
    if none_true(rejected):
        return p
    rest = (p - q).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(rejected[..., None] & (mass > 0), rest / mass, p)


def none_true(mask: Tensor) -> bool:
    """Whether a CPU mask has no True. Always False on other devices, to avoid a synchronisation."""
    return mask.device.type == "cpu" and not on_device_only() and not mask.any()
