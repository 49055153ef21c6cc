"""Base classes of lossy rules that accept tokens which the target did not draw."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from decode.draft import PAD, Draft
from decode.rng import Coin, Key, Purpose
from decode.verification.descent import descend
from decode.verification.result import VerificationResult, accept_longest
from decode.verification.rule import LossyRule
from decode.verification.target_probs import TargetProbs


@dataclass(frozen=True)
class AcceptingRule(LossyRule):
    """Accept tokens depending on the target's distribution."""

    @abstractmethod
    def acceptable(self, p: Tensor) -> Tensor:
        """(..., V) bool: accepted tokens, given the target's (..., V) distributions."""

    @override
    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        """Return q a + (1 - sum q a) p, with a(x) = 1 for acceptable tokens."""
        kept = q * self.acceptable(p)
        return kept + (1 - kept.sum(-1, keepdim=True)) * p


@dataclass(frozen=True)
class LongestPath(AcceptingRule):
    """Accept the longest path of acceptable tokens."""

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        p = target.all(draft)  # (B, S, V)
        row = torch.arange(p.shape[0], device=p.device)[:, None]
        accept = self.acceptable(p)[row, draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)

        def extra(row: Tensor, end: Tensor) -> Tensor:
            return coin.draw(p[row, end], Key(Purpose.RESIDUAL, 0), torch.ones_like(row, dtype=torch.bool))

        return accept_longest(draft, accept & (draft.tokens != PAD), extra)


@dataclass(frozen=True)
class Relaxed(AcceptingRule):
    """`match`, but if no child has the target's token, take the most probable acceptable child.

    At temperature 0 children are judged by the distribution at temperature 1.
    """

    changes_greedy = True

    @override
    def verify(self, draft: Draft, target: TargetProbs, coin: Coin) -> VerificationResult:
        return descend(draft, target, coin, Purpose.TARGET, instead=self._best_acceptable)

    def here(self, target: TargetProbs) -> Tensor | None:
        """(B,) bool, whether the rule applies at the end of each path; None: everywhere."""
        del target
        return None

    def _best_acceptable(self, draft: Draft, target: TargetProbs, slot: Tensor, children: Tensor) -> Tensor:
        """(B,) most probable acceptable child of (B, N) children, the first if equal; -1: none."""
        p, tokens = target.soft_at(slot), draft.tokens.clamp_min(0)
        accept = children & self.acceptable(p).gather(1, tokens)
        if (here := self.here(target)) is not None:
            accept = accept & here[:, None]
        best = p.gather(1, tokens).masked_fill(~accept, -1.0).argmax(-1)
        return torch.where(accept.any(-1), best, -1)

    @override
    def emitted_among(self, p: Tensor, children: Tensor) -> Tensor:
        """All other tokens' mass goes to the most probable acceptable child, if there is one."""
        tokens, there = children.clamp_min(0), children != PAD
        accept = there & self.acceptable(p).gather(1, tokens)
        best = tokens.gather(1, p.gather(1, tokens).masked_fill(~accept, -1.0).argmax(-1, keepdim=True))
        drafted = torch.zeros_like(p).scatter_reduce(1, tokens, there.to(p), "amax")
        moved = (p * (1 - drafted)).sum(-1, keepdim=True)
        return torch.where(accept.any(-1, keepdim=True), (p * drafted).scatter_add(1, best, moved), p)
