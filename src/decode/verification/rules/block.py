"""`block`: accept a sampled chain, or the first part of it, as one block."""

from __future__ import annotations

from decode.verification.chains import ChainRule
from decode.verification.rules.traversal import Traversal


class Block(ChainRule, Traversal):
    """Block verification (Sun et al., arXiv:2403.10444): `traversal` on a sampled chain."""

    name = "block"
