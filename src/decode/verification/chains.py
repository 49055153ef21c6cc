"""Base class of the rules for sampled chains."""

from __future__ import annotations

from typing_extensions import override

from decode.draft import Draft
from decode.errors import UserError
from decode.verification.rule import Rule
from decode.verification.shape import Shape


class ChainRule(Rule):
    """A rule that verifies a chain sampled from known distributions q."""

    accepts = "a chain sampled from distributions q that the draft carries"

    @override
    def check(self, plan: Shape) -> None:
        if plan.has_siblings or plan.proposal != "sampled":
            raise UserError(
                f"decode.rule={self.name} verifies a chain drawn from distributions q: a fixed token has no "
                "q, and min(1, p/q) would not be lossless. Set width=1 proposal=sampled, or rule=match"
            )

    @override
    def fits(self, draft: Draft) -> bool:
        return draft.is_chain and draft.probs is not None
