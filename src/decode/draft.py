"""A draft: per row a chain or tree of proposed tokens hanging from the root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

PAD = -1  # as a token: can equal no drawn token, so padding never matches


@dataclass(frozen=True)
class Laws:
    """Which nodes of a draft were sampled, and from what.

    Attributes:
        q: (B, Q, V) laws, after the drafter's own warpers. Row r is the law of the first sampled
            child of slot `owner[:, r]`; later ones were drawn from it without their earlier
            siblings, renormalised, or with `replacement` from the same law.
        owner: (B, Q) slot, or -1 where that node was left out.
        levels: rows of `q` that belong to each level, root first; their sum is Q.
        sampled: (B, N) bool: the node was drawn; False: chosen (`fixed`).
        siblings: the most sampled children of one parent.
        replacement: siblings may repeat.
        selected: nodes were kept or dropped by a look at the drawn tokens themselves (pruned by
            their own scores, best of several drafts). min(1, p / q) is then no longer lossless.
        ranked: whether a node was kept may depend on tokens drawn elsewhere in the tree, though not
            on its own or those below it. `traversal` is then no longer lossless.
    """

    q: Tensor
    owner: Tensor
    levels: tuple[int, ...]
    sampled: Tensor
    siblings: int = 1
    replacement: bool = False
    selected: bool = False
    ranked: bool = False


@dataclass(frozen=True)
class Draft:
    """Proposed tokens below the root.

    Slot 0 is the root (the newest settled token, which the target has not read), slot i + 1 is
    node i. Parents come before children. Siblings stand in the order they were drawn, the sampled
    ones first, and are different tokens (unless drawn with replacement).

    Attributes:
        tokens: (B, N), `PAD` where a row has no such node.
        parents: (B, N) node index of the parent, -1 for the root.
        depth: the deepest level K; 0 when nothing is drafted.
        laws: of sampled nodes. None: every node is `fixed` (chosen without a coin).
        is_chain: node i hangs from node i - 1 in every row.
        reach: (1, S, S) what `ancestors` gives, of a form that all rows and rounds share.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    laws: Laws | None = None
    is_chain: bool = False
    reach: Tensor | None = None

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
        laws = None
        if q is not None and k:
            laws = Laws(q, parents + 1, (1,) * k, torch.ones_like(tokens, dtype=torch.bool))
        return cls(tokens, parents, depth=k, laws=laws, is_chain=True)

    @property
    def q(self) -> Tensor | None:
        """(B, Q, V) laws of sampled nodes, if there are any."""
        return None if self.laws is None else self.laws.q

    def ancestors(self) -> Tensor:
        """(B, S, S) bool: slot j is slot i itself or lies on its path from the root."""
        return self._ancestors

    @cached_property
    def _ancestors(self) -> Tensor:
        rows, nodes = self.tokens.shape
        if self.is_chain:
            make = _causal if nodes <= 64 else _causal.__wrapped__  # prompts are not worth keeping
            return make(nodes + 1, self.tokens.device).expand(rows, -1, -1)
        if self.reach is not None:
            return self.reach.expand(rows, -1, -1)
        reach = torch.eye(nodes + 1, device=self.tokens.device).repeat(rows, 1, 1)  # (B, S, S)
        reach[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        for _ in range((self.depth - 1).bit_length()):  # each product doubles the steps followed
            reach = (reach @ reach).clamp_max_(1.0)
        return reach.bool()

    @cached_property
    def levels(self) -> Tensor:
        """(B, S) distance of each slot from the root."""
        if self.is_chain:
            rows, nodes = self.tokens.shape
            return torch.arange(nodes + 1, device=self.tokens.device).expand(rows, -1)
        return self.ancestors().sum(-1) - 1

    def offered(self) -> Tensor:
        """(B,) depth of each row's deepest real node."""
        level = self.levels[:, 1:]
        return (level * (self.tokens != PAD)).amax(-1) if self.depth else level.sum(-1)

    def leaf_first(self) -> Tensor:
        """(B, S) place of each slot when every subtree comes before its root, and before all later
        siblings' subtrees."""
        reach = self.ancestors().float()
        parents = torch.nn.functional.pad(self.parents, (1, 0), value=-2)
        order = torch.arange(parents.shape[1], device=parents.device)
        elder = (parents[:, :, None] == parents[:, None]) & (order[:, None] < order)  # (B, S, S)
        left = reach @ elder.float() @ reach.mT > 0  # below an elder sibling of an ancestor
        return left.sum(1) + reach.sum(1).long() - 1


@lru_cache(maxsize=64)
def _causal(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, so it must outlive the mode it was made in
        return torch.ones(n, n, dtype=torch.bool, device=device).tril()[None]
