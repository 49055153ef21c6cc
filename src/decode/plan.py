"""How much to draft, and how it is verified."""

from __future__ import annotations

from dataclasses import dataclass

from decode.errors import UserError


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of a draft.

    Args:
        depth: levels below the root, in tokens; 0 is plain decoding.
        width: nodes that each level below the first is grown from, and children each of them
            is given (EAGLE-2, arXiv:2406.16858); 1 is a chain.
        nodes: nodes that are verified, the best by draft probability; 0 means `depth`.
        proposal: `fixed` takes the likeliest tokens, `sampled` draws them (chains only).
        rule: acceptance rule; `auto` is `match` for fixed and `token` for sampled drafts.

    Raises:
        UserError: a shape that no draft can have.
    """

    depth: int = 0
    width: int = 1
    nodes: int = 0
    proposal: str = "fixed"
    rule: str = "auto"

    def __post_init__(self) -> None:
        if self.proposal not in ("fixed", "sampled"):
            raise UserError(f"decode.proposal={self.proposal}: choose fixed or sampled")
        if self.depth < 0 or self.width < 1:
            raise UserError(f"decode: depth={self.depth}, width={self.width} must be >= 0 and >= 1")
        if self.proposal == "sampled" and self.width > 1:
            raise UserError("decode: sampled drafts are chains; set decode.width=1 or proposal=fixed")
        nodes = self.nodes or self.depth
        if nodes < self.depth:
            raise UserError(f"decode.nodes={nodes} is fewer than decode.depth={self.depth}")
        object.__setattr__(self, "nodes", nodes if self.width > 1 else self.depth)
        if self.rule == "auto":
            object.__setattr__(self, "rule", "match" if self.proposal == "fixed" else "token")

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.depth == 0:
            return "plain"
        if self.width == 1:
            return f"chain-{self.depth}" + ("-sampled" if self.proposal == "sampled" else "")
        return f"tree-{self.nodes} (depth {self.depth}, width {self.width})"
