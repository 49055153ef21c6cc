"""Rules that do not keep the target's distribution; they need `Plan.lossy`.

Which tokens each accepts is `acceptable`; what they do to the distribution of a token is `emitted`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.verification.descent import descend, try_sampled
from decode.verification.result import VerificationResult, accept_longest
from decode.verification.target_probs import TargetProbs


def acceptable(plan: Plan, p: Tensor) -> Tensor:
    """(..., V) bool: tokens that the plan's rule accepts though the target would have drawn others.

    `threshold`: p(x) >= threshold. `typical`: p(x) >= min(threshold, alpha exp(-entropy)) (Medusa,
    arXiv:2401.10774, section 3.3.1). `topk`: x is one of the `accept_top` most probable tokens, and p(x) >=
    `accept_ratio` max p (SpecDec, arXiv:2203.16487; relaxed acceptance in TensorRT-LLM). `bild`: the
    surprisal -log p(x) is at most `rollback` (BiLD, arXiv:2302.07863). `sprint`: every token (SPRINTER,
    arXiv:2502.04557), since the draft ends where the drafter doubts.

    Args:
        plan: with one of these rules.
        p: (..., V) the target's distributions.
    """
    if plan.rule == "sprint":
        return torch.ones_like(p, dtype=torch.bool)
    if plan.rule == "topk":
        kth = p.topk(min(plan.accept_top, p.shape[-1])).values[..., -1:]
        return (p >= kth) & (p >= plan.accept_ratio * p.amax(-1, keepdim=True))
    if plan.rule == "bild":
        return p >= math.exp(-plan.rollback)
    if plan.rule == "threshold":
        return p >= plan.threshold
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    return p >= entropy.neg().exp().mul(plan.alpha).clamp_max(plan.threshold)


def relaxed(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """`match`, but where no child has the target's token the most probable `acceptable` child is taken.

    At temperature 0 children are judged by the distribution of temperature 1. With `Plan.within` it is
    `match` outside of the tags. Elsewhere the output does NOT have the target's distribution.
    """
    return descend(draft, target, coin, Purpose.TARGET, instead=partial(_best_acceptable, plan=plan))


def _best_acceptable(draft: Draft, target: TargetProbs, slot: Tensor, children: Tensor, plan: Plan) -> Tensor:
    """(B,) the most probable acceptable one of (B, N) children, the first of several; -1 if there is none."""
    p, tokens = target.soft_at(slot), draft.tokens.clamp_min(0)
    accept = children & acceptable(plan, p).gather(1, tokens)
    if (inside := target.inside()) is not None:
        accept = accept & inside[:, None]
    best = p.gather(1, tokens).masked_fill(~accept, -1.0).argmax(-1)
    return torch.where(accept.any(-1), best, -1)


def typical(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """Accept the longest path of `acceptable` tokens: Medusa's typical acceptance, and `threshold`.

    The output does NOT have the target's distribution.
    """
    p = target.all(draft)  # (B, S, V)
    row = torch.arange(p.shape[0], device=p.device)[:, None]
    accept = acceptable(plan, p)[row, draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)

    def extra(row: Tensor, end: Tensor) -> Tensor:
        return coin.draw(p[row, end], Key(Purpose.RESIDUAL, 0), torch.ones_like(row, dtype=torch.bool))

    return accept_longest(draft, accept & (draft.tokens != PAD), extra)


def lenience(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """DistillSpec's lenience f(p) = p / e (arXiv:2310.08461): `recursive`, where a sampled child is accepted
    with probability min(1, r(x) / (e q(x))).

    With e = `plan.lenience` = 1 it is `recursive`; below, the output does NOT have the target's distribution.
    """
    return descend(draft, target, coin, Purpose.RESIDUAL, partial(try_sampled, lenience=plan.lenience))


def emitted(plan: Plan, p: Tensor, q: Tensor) -> Tensor:
    """(B, V) distribution of the token that a lossy rule emits at a slot whose only child is drawn from q.

    With a(x) = 1 for acceptable tokens, pi = q a + (1 - sum q a) p; for `lenience`, with m = min(q, p / e),
    pi = m + (1 - sum m) norm (p - q)+.

    Args:
        plan: with a lossy rule.
        p: (B, V) the target's distributions, at a temperature above 0.
        q: (B, V) the drafter's.
    """
    if plan.rule == "lenience":
        kept, rest = torch.minimum(q, p / plan.lenience), (p - q).clamp_min(0)
        mass = rest.sum(-1, keepdim=True)
        rest = torch.where(mass > 0, rest / mass, p)
    else:
        kept, rest = q * acceptable(plan, p), p
    return kept + (1 - kept.sum(-1, keepdim=True)) * rest


def emitted_among(plan: Plan, p: Tensor, children: Tensor) -> Tensor:
    """(B, V) distribution of the token that `relaxed` emits at a slot with fixed children.

    The mass of all other tokens goes to the most probable acceptable child, if there is one.

    Args:
        plan: with such a rule.
        p: (B, V) the target's distributions, at a temperature above 0.
        children: (B, C) tokens, `PAD` for none.
    """
    tokens, there = children.clamp_min(0), children != PAD
    accept = there & acceptable(plan, p).gather(1, tokens)
    best = tokens.gather(1, p.gather(1, tokens).masked_fill(~accept, -1.0).argmax(-1, keepdim=True))  # (B, 1)
    drafted = torch.zeros_like(p).scatter_reduce(1, tokens, there.to(p), "amax")
    moved = (p * (1 - drafted)).sum(-1, keepdim=True)
    return torch.where(accept.any(-1, keepdim=True), (p * drafted).scatter_add(1, best, moved), p)
