"""Rules that do not keep the target's distribution; they need `Plan.lossy`."""

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


def lenience(draft: Draft, target: TargetProbs, coin: Coin, plan: Plan) -> VerificationResult:
    """DistillSpec's lenience f(p) = p / e (arXiv:2310.08461): `recursive`, where a sampled child is accepted
    with probability min(1, r(x) / (e q(x))).

    With e = `plan.lenience` = 1 it is `recursive`; below, the output does NOT have the target's distribution.
    """
    return descend(draft, target, coin, Purpose.RESIDUAL, partial(try_sampled, lenience=plan.lenience))


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
