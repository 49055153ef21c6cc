"""A draft: per row a chain or tree of proposed tokens hanging from the root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

PAD = -1  # as a token: can equal no drawn token, so padding never matches


@dataclass(frozen=True)
class Draft:
    """Proposed tokens below the root.

    Slot 0 is the root (the newest settled token, which the target has not read), slot i + 1 is
    node i. Parents come before children; siblings stand in the order they were drawn.

    Attributes:
        tokens: (B, N), `PAD` where a row has no such node.
        parents: (B, N) node index of the parent, -1 for the root.
        depth: the deepest level K; 0 when nothing is drafted.
        q: (B, Q, V) or None. Row r is the law, after the drafter's own warpers, from which the
            children of slot r were sampled. None: every node is `fixed` (chosen, not sampled).
        is_chain: node i hangs from node i - 1 in every row.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    q: Tensor | None = None
    is_chain: bool = False

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Draft:
        """Nothing drafted: plain decoding."""
        none = torch.empty(rows, 0, dtype=torch.long, device=device)
        return cls(none, none, depth=0, is_chain=True)

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor | None = None) -> Draft:
        """(B, K) tokens, each the child of the one before; (B, K, V) their laws if sampled."""
        k = tokens.shape[1]
        parents = torch.arange(-1, k - 1, device=tokens.device).expand_as(tokens)
        return cls(tokens, parents, depth=k, q=q, is_chain=True)

    def ancestors(self) -> Tensor:
        """(B, S, S) bool: slot j is slot i itself or lies on its path from the root."""
        return self._ancestors

    @cached_property
    def _ancestors(self) -> Tensor:
        rows, nodes = self.tokens.shape
        if self.is_chain:
            make = _causal if nodes <= 64 else _causal.__wrapped__  # prompts are not worth keeping
            return make(nodes + 1, self.tokens.device).expand(rows, -1, -1)
        reach = torch.eye(nodes + 1, device=self.tokens.device).repeat(rows, 1, 1)  # (B, S, S)
        reach[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        for _ in range(self.depth.bit_length()):  # each product doubles the steps followed
            reach = (reach @ reach).clamp_max_(1.0)
        return reach.bool()

    def offered(self) -> Tensor:
        """(B,) depth of each row's deepest real node."""
        depth = self.ancestors().sum(-1)[:, 1:] - 1  # (B, N)
        return (depth * (self.tokens != PAD)).amax(-1) if self.depth else depth.sum(-1)


@lru_cache(maxsize=64)
def _causal(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, so it must outlive the mode it was made in
        return torch.ones(n, n, dtype=torch.bool, device=device).tril()[None]
