"""`match`: accept a drafted token that is the target's own."""

from __future__ import annotations

from typing_extensions import override

from decode.draft import Draft
from decode.rng import Coin
from decode.verification.descent import match
from decode.verification.result import VerificationResult
from decode.verification.rule import Rule
from decode.verification.target_probs import TargetProbs


class Match(Rule):
    """See `descent.match`. Valid for any draft, whatever its source."""

    name = "match"
    accepts = "any chain or tree"
    reads_probs = False
    keeps_text = True

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        return match(draft, target, coin)
