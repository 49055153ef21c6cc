"""`block`: a sampled chain is accepted as a whole, or a beginning of it."""

from __future__ import annotations

from typing_extensions import override

from decode.draft import Draft
from decode.verification.chains import ACCEPTS, check_sampled_chain, is_sampled_chain
from decode.verification.rules.traversal import Traversal
from decode.verification.shape import Shape


class Block(Traversal):
    """Block verification (Sun et al., arXiv:2403.10444): `traversal` on a sampled chain."""

    name = "block"
    accepts = ACCEPTS

    @override
    def check(self, plan: Shape) -> None:
        check_sampled_chain(self.name, plan)

    @override
    def fits(self, draft: Draft) -> bool:
        return is_sampled_chain(draft)
