"""`token`: rejection sampling of a chain, token after token."""

from __future__ import annotations

from typing_extensions import override

from decode.draft import Draft
from decode.verification.chains import ACCEPTS, check_sampled_chain, is_sampled_chain
from decode.verification.rules.recursive import Recursive
from decode.verification.shape import Shape


class Token(Recursive):
    """`recursive` on a sampled chain: speculative sampling (arXiv:2211.17192, arXiv:2302.01318)."""

    name = "token"
    accepts = ACCEPTS
    uses_drawn_child = False

    @override
    def check(self, plan: Shape) -> None:
        check_sampled_chain(self.name, plan)

    @override
    def fits(self, draft: Draft) -> bool:
        return is_sampled_chain(draft)
