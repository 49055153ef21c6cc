"""`token`: rejection sampling of a chain, one token after another."""

from __future__ import annotations

from decode.verification.chains import ChainRule
from decode.verification.rules.recursive import Recursive


class Token(ChainRule, Recursive):
    """`recursive` on a sampled chain: speculative sampling (arXiv:2211.17192, arXiv:2302.01318)."""

    name = "token"
    uses_drawn_child = False
