"""The target's distributions at the slots of one round."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft import Draft
from decode.sampling import Sampler


class TargetProbs:
    """The target's distributions at the slots of one round, warped on demand.

    Args:
        logits: (B, S, V) of the target.
        sampler: the warpers.
        seen: (B, V) bool tokens of each sequence, root included; None if no warper needs them.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, seen: Tensor | None = None) -> None:
        self._logits, self._sampler = logits, sampler
        self._seen = None if seen is None else seen.clone()
        self._row = torch.arange(logits.shape[0], device=logits.device)

    def at(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V) distributions, given the tokens passed to `append`."""
        return self._sampler.probs(self._logits[self._row, slot], self._seen)

    def append(self, token: Tensor, active: Tensor) -> None:
        """Add (B,) tokens to the paths of the active rows; a repetition penalty depends on them."""
        if self._seen is not None:
            self._seen[self._row, token.clamp_min(0)] |= active

    def all(self, draft: Draft) -> Tensor:
        """(B, S, V) distributions at every slot, each given its path from the root."""
        probs = self._sampler.probs(self._logits.flatten(0, 1), self._seen_at(draft))
        return probs.unflatten(0, self._logits.shape[:2])

    def argmax(self, draft: Draft) -> Tensor | None:
        """(B, S) greedy token at every slot; None unless the temperature is 0."""
        if self._sampler.temperature:
            return None
        tokens = self._sampler.argmax(self._logits.flatten(0, 1), self._seen_at(draft))
        return tokens.unflatten(0, self._logits.shape[:2])

    def _seen_at(self, draft: Draft) -> Tensor | None:
        """(B * S, V) bool: tokens of the sequence and of each slot's path."""
        if self._seen is None:
            return None
        # One-hot token of each node, times the ancestor matrix: counts of each token on each path.
        node = torch.zeros_like(self._logits[:, 1:]).scatter_(2, draft.tokens.clamp_min(0)[..., None], 1)
        on_path = draft.ancestors()[:, :, 1:].to(node.dtype) @ node > 0  # (B, S, V)
        return (self._seen[:, None] | on_path).flatten(0, 1)
