"""What acceptance rules read, the target's rows, and what they give, a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft
from decode.sampling import Sampler


class Verdict(NamedTuple):
    """What a round settles."""

    tokens: Tensor  # (B, K + 1) emitted: the accepted tokens and one more, then PAD
    slots: Tensor  # (B, K + 1) slot whose row each token was drawn from, then 0
    accepted: Tensor  # (B,) accepted draft tokens


class Rows:
    """The target's laws at the slots of one round, warped where a rule asks for them.

    Args:
        logits: (B, S, V) the target's rows.
        sampler: the warpers.
        seen: (B, V) bool tokens of each sequence, root included, or None if not needed.
    """

    def __init__(self, logits: Tensor, sampler: Sampler, seen: Tensor | None = None) -> None:
        self._logits, self._sampler = logits, sampler
        self._seen = None if seen is None else seen.clone()
        self._row = torch.arange(logits.shape[0], device=logits.device)

    def law(self, slot: Tensor) -> Tensor:
        """(B,) slots -> (B, V) laws, given the tokens that `follow` has reported."""
        return self._sampler.law(self._logits[self._row, slot], self._seen)

    def follow(self, token: Tensor, active: Tensor) -> None:
        """Extend each active row's path: penalties inside a tree depend on it."""
        if self._seen is not None:
            self._seen[self._row, token.clamp_min(0)] |= active

    def laws(self, draft: Draft) -> Tensor:
        """(B, S, V) laws at every slot, each given its own path from the root."""
        laws = self._sampler.law(self._logits.flatten(0, 1), self._seen_at(draft))
        return laws.unflatten(0, self._logits.shape[:2])

    def best(self, draft: Draft) -> Tensor | None:
        """(B, S) the one token that each slot's law allows, at temperature 0."""
        if self._sampler.temperature:
            return None
        best = self._sampler.best(self._logits.flatten(0, 1), self._seen_at(draft))
        return best.unflatten(0, self._logits.shape[:2])

    def _seen_at(self, draft: Draft) -> Tensor | None:
        """(B * S, V) bool: tokens of the sequence and of each slot's path."""
        if self._seen is None:
            return None
        node = torch.zeros_like(self._logits[:, 1:]).scatter_(2, draft.tokens.clamp_min(0)[..., None], 1)
        below = draft.ancestors()[:, :, 1:].to(node.dtype) @ node > 0  # (B, S, V)
        return (self._seen[:, None] | below).flatten(0, 1)


def settle(draft: Draft, end: Tensor, extra: Tensor) -> Verdict:
    """Emit the path from the root to (B,) slot `end`, and one more token."""
    row = torch.arange(end.shape[0], device=end.device)
    accepted = draft.levels[row, end]  # (B,)
    on_path = draft.ancestors()[row, end]  # (B, S)
    slots = torch.zeros(end.shape[0], draft.depth + 2, dtype=torch.long, device=end.device)
    place = torch.where(on_path, draft.levels, draft.depth + 1)  # the last column is thrown away
    slots = slots.scatter(1, place, torch.arange(place.shape[1], device=end.device).expand_as(place))
    slots[:, -1] = 0
    tokens = nn.functional.pad(draft.tokens, (1, 0), value=PAD).gather(1, slots[:, 1:])
    tokens = tokens.scatter(1, accepted[:, None], extra[:, None])
    return Verdict(tokens, slots[:, :-1], accepted)


def longest(draft: Draft, good: Tensor, extra: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Emit the deepest path all of whose nodes are (B, N) `good`, and extra(row, its end)."""
    row = torch.arange(good.shape[0], device=good.device)
    fails = draft.ancestors()[:, :, 1:] & ~good[:, None]  # (B, S, N)
    end = draft.levels.masked_fill(fails.any(-1), -1).argmax(-1)
    return settle(draft, end, extra(row, end))


def struck(q: Tensor, at: Tensor) -> Tensor:
    """Strike the token at `at` from q and renormalise: drawn without replacement."""
    left = q.scatter(-1, at, 0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def first(mask: Tensor) -> Tensor:
    """(..., N) bool -> (...) index of the first True, -1 if there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)
