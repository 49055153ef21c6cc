"""Draft: a chain or tree of proposed tokens per row, below the root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

PAD = -1  # token of a missing node; equals no drawn token, so padding never matches


@dataclass(frozen=True)
class DraftProbs:
    """Sampled nodes of a draft and their distributions q.

    Attributes:
        q: (B, Q, V) distributions, after the drafter's warpers. The first sampled child of slot
            `owner[:, r]` was drawn from row r; later siblings were drawn from the same row, with
            the earlier tokens removed and renormalised unless `replacement`.
        owner: (B, Q) slot that each row of `q` belongs to; -1 if that node was omitted.
        levels: number of rows of `q` for each level of parents, root first; their sum is Q.
        sampled: (B, N) bool. True: the node was drawn; False: it is fixed, i.e. chosen by rank.
        siblings: maximum number of sampled children of one parent.
        replacement: siblings were drawn with replacement and may repeat.
        selected: nodes were kept or dropped after looking at their drawn tokens (pruned by score,
            best of several drafts). min(1, p / q) is then not lossless.
        ranked: whether a node was kept may depend on tokens drawn elsewhere in the tree, though not
            on its own token or those below it. `traversal` is then not lossless.
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

    Slot 0 is the root (the newest settled token, not yet read by the target), slot i + 1 is node i.
    Parents come before children. Siblings are in the order they were drawn, sampled ones first, and
    have different tokens unless drawn with replacement.

    Attributes:
        tokens: (B, N) token ids, `PAD` if a row has no such node.
        parents: (B, N) node index of the parent, -1 for the root.
        depth: deepest level K; 0 when nothing is drafted.
        probs: distributions of sampled nodes. None: every node is fixed.
        is_chain: node i is the child of node i - 1 in every row.
        ancestor_mask: (1, S, S) result of `ancestors` for a static tree, shared by rows and rounds.
        score: (B, N) drafter's scores of its nodes, descending, never above the parent's; -inf if a row has
            no such node. None: nodes are in that order already.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    probs: DraftProbs | None = None
    is_chain: bool = False
    ancestor_mask: Tensor | None = None
    score: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Draft:
        """Nothing drafted: plain decoding."""
        none = torch.empty(rows, 0, dtype=torch.long, device=device)
        return cls(none, none, depth=0, is_chain=True)

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor | None = None) -> Draft:
        """Chain of (B, K) tokens, with (B, K, V) distributions q if they were sampled."""
        k = tokens.shape[1]
        parents = torch.arange(-1, k - 1, device=tokens.device).expand_as(tokens)
        probs = None
        if q is not None and k:
            probs = DraftProbs(q, parents + 1, (1,) * k, torch.ones_like(tokens, dtype=torch.bool))
        return cls(tokens, parents, depth=k, probs=probs, is_chain=True)

    @property
    def q(self) -> Tensor | None:
        """(B, Q, V) distributions of sampled nodes, if there are any."""
        return None if self.probs is None else self.probs.q

    def ancestors(self) -> Tensor:
        """(B, S, S) bool: slot j is slot i or one of its ancestors."""
        return self._ancestors

    @cached_property
    def _ancestors(self) -> Tensor:
        rows, nodes = self.tokens.shape
        if self.is_chain:
            mask = _causal_mask if nodes <= 64 else _causal_mask.__wrapped__  # do not cache masks of prompts
            return mask(nodes + 1, self.tokens.device).expand(rows, -1, -1)
        if self.ancestor_mask is not None:
            return self.ancestor_mask.expand(rows, -1, -1)
        reach = torch.eye(nodes + 1, device=self.tokens.device).repeat(rows, 1, 1)  # (B, S, S)
        reach[:, 1:].scatter_(2, self.parents[..., None] + 1, 1.0)
        # Identity plus parent links; each squaring doubles the number of links followed.
        for _ in range((self.depth - 1).bit_length()):
            reach = (reach @ reach).clamp_max_(1.0)
        return reach.bool()

    @cached_property
    def levels(self) -> Tensor:
        """(B, S) depth of each slot; the root has 0."""
        if self.is_chain:
            rows, nodes = self.tokens.shape
            return torch.arange(nodes + 1, device=self.tokens.device).expand(rows, -1)
        return self.ancestors().sum(-1) - 1

    def lengths(self) -> Tensor:
        """(B,) draft length: depth of each row's deepest node."""
        level = self.levels[:, 1:]
        return (level * (self.tokens != PAD)).amax(-1) if self.depth else level.sum(-1)

    def postorder(self) -> Tensor:
        """(B, S) rank of each slot in postorder: children before parents, siblings' subtrees in order."""
        reach = self.ancestors().float()
        parents = torch.nn.functional.pad(self.parents, (1, 0), value=-2)
        order = torch.arange(parents.shape[1], device=parents.device)
        # (B, S, S): slot i is an earlier sibling of slot j
        earlier = (parents[:, :, None] == parents[:, None]) & (order[:, None] < order)
        # (B, S, S): slot i is below an earlier sibling of slot j or of one of j's ancestors.
        left = reach @ earlier.float() @ reach.mT > 0
        return left.sum(1) + reach.sum(1).long() - 1  # slots to the left, and j's own descendants


@lru_cache(maxsize=64)
def _causal_mask(n: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached, so it must be usable outside inference mode
        return torch.ones(n, n, dtype=torch.bool, device=device).tril()[None]
