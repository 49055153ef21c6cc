"""`kseq`: try independently drawn siblings independently."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.rng import Coin, Key, Purpose
from decode.verification.descent import descend, next_child, without_node
from decode.verification.result import VerificationResult, drawn_from, first_true, ratio
from decode.verification.rule import Rule
from decode.verification.shape import Shape
from decode.verification.target_probs import TargetProbs

HALVINGS = 40  # bisection steps for rho, starting with an interval of at most k


class KSeq(Rule):
    """K-SEQ (SpecTr, arXiv:2310.15141), for siblings drawn independently: accept each of k children x with
    probability min(1, p(x) / (rho q(x))), one after another and independently.

    A child is accepted with probability b(rho) = sum min(q, p / rho). rho is the smallest number of at least
    1 for which no token's accepted mass, min(q, p / rho) (1 - (1 - b)^k) / b, exceeds p. If all children are
    rejected, the token is drawn from the rest of p.
    """

    name = "kseq"
    accepts = "siblings drawn independently from the q that they carry"

    @override
    def check(self, plan: Shape) -> None:
        if plan.depth and not (plan.replacement or plan.drafts > 1):
            raise UserError(
                "decode.rule=kseq weighs siblings that were drawn independently: set decode=static "
                "decode.proposal=sampled decode.replacement=true, or decode=drafts; or rule=recursive"
            )

    @override
    def fits(self, draft: Draft) -> bool:
        drafted = draft.probs
        return drafted is None or drafted.siblings <= 1 or drafted.replacement

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        return descend(draft, target, coin, Purpose.RESIDUAL, examine=_try_independent)


def _try_independent(
    draft: Draft, slot: Tensor, children: Tensor, p: Tensor, coin: Coin, depth: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `try_sampled`, for `kseq`."""
    drafted = draft.probs
    assert drafted is not None
    q = drawn_from(drafted, slot, p.dtype)  # (B, V)
    waiting = children & drafted.sampled  # (B, N) not examined yet
    count = waiting.sum(-1)  # (B,) k
    rho = smallest_rho(p, q, count)  # (B,)
    child = torch.full_like(slot, -1)
    for rank in range(drafted.siblings):
        node, token, trying = next_child(draft, waiting, active & (child < 0))
        p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = coin.flip(p_token, q_token * rho, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        # The first of siblings with equal tokens has the largest subtree (all of it, in parallel chains).
        twin = first_true(children & drafted.sampled & (draft.tokens == token))
        child = torch.where(accept, twin, child)
        waiting = without_node(waiting, node)
    each = torch.minimum(q, p / rho[:, None])  # (B, V) mass of one child that is accepted
    chance = each.sum(-1)
    any_of = ratio(1 - (1 - chance).clamp_min(0) ** count, chance)  # 1 + (1 - b) + ... + (1 - b)^(k - 1)
    rest = (p - each * any_of[:, None]).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    rejected = active & (count > 0) & (child < 0)
    return torch.where(rejected[:, None] & (mass > 0), rest / mass, p), child


def smallest_rho(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """(B,) the smallest rho of at least 1 with 1 - (1 - b)^k <= rho b, b = sum min(q, p / rho), by bisection.

    Any rho for which this holds is lossless, and k is one; returns the upper end of the interval.

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
