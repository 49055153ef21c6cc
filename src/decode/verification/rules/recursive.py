"""`recursive`: rejection sampling, one child after another."""

from __future__ import annotations

from typing_extensions import override

from decode.draft import Draft
from decode.rng import Coin, Purpose
from decode.verification.descent import descend
from decode.verification.result import VerificationResult
from decode.verification.rule import Rule
from decode.verification.target_probs import TargetProbs


class Recursive(Rule):
    """Recursive rejection sampling (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374).

    Starting with r = p, accept a sampled child x with probability min(1, r(x) / q(x)), otherwise
    r <- norm (r - q)+. If no sampled child is accepted, match the fixed children with a draw from r.
    """

    name = "recursive"
    uses_drawn_child = True

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        return descend(draft, target, coin, Purpose.RESIDUAL)
