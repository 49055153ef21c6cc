"""Result of a verification, and its construction from a path of the draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft, DraftProbs


class VerificationResult(NamedTuple):
    """Tokens that one round emits."""

    tokens: Tensor  # (B, K + 1) accepted tokens and one more, then PAD
    slots: Tensor  # (B, K + 1) slot whose target row each token was drawn from, then 0
    accepted: Tensor  # (B,) number of accepted draft tokens


def emit_path(draft: Draft, end: Tensor, extra: Tensor) -> VerificationResult:
    """Emit the path from the root to (B,) slot `end`, then the (B,) `extra` token."""
    row = torch.arange(end.shape[0], device=end.device)
    accepted = draft.levels[row, end]  # (B,)
    on_path = draft.ancestors()[row, end]  # (B, S)
    slots = torch.zeros(end.shape[0], draft.depth + 2, dtype=torch.long, device=end.device)
    # Write each slot of the path to the column of its level; the others share a last column, cut below.
    place = torch.where(on_path, draft.levels, draft.depth + 1)
    slots = slots.scatter(1, place, torch.arange(place.shape[1], device=end.device).expand_as(place))
    slots[:, -1].zero_()
    # Column j emits the token of the slot at level j + 1; `extra` goes after the last accepted one.
    tokens = nn.functional.pad(draft.tokens, (1, 0), value=PAD).gather(1, slots[:, 1:])
    tokens = tokens.scatter(1, accepted[:, None], extra[:, None])
    return VerificationResult(tokens, slots[:, :-1], accepted)


def accept_longest(
    draft: Draft, accept: Tensor, extra: Callable[[Tensor, Tensor], Tensor]
) -> VerificationResult:
    """Emit the deepest path of (B, N) accepted nodes only, then extra(row, its last slot)."""
    row = torch.arange(accept.shape[0], device=accept.device)
    rejected = draft.ancestors()[:, :, 1:] & ~accept[:, None]  # (B, S, N)
    end = draft.levels.masked_fill(rejected.any(-1), -1).argmax(-1)
    return emit_path(draft, end, extra(row, end))


def first_true(mask: Tensor) -> Tensor:
    """(..., N) bool -> (...) index of the first True, -1 if there is none."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


def drawn_from(drafted: DraftProbs, slot: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, V) distribution that the first sampled child of (B,) `slot` was drawn from."""
    row = torch.arange(slot.shape[0], device=slot.device)
    return normalised(drafted.q[row, first_true(drafted.owner == slot[:, None]).clamp_min(0)].to(dtype))


def normalised(q: Tensor) -> Tensor:
    """(..., V) q divided by its sum, as in drawing, because sums in half precision miss 1 by more than p's.

    Rows of zeros stay as they are.
    """
    return q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def without_token(q: Tensor, token: Tensor) -> Tensor:
    """Set q of `token` to 0 and renormalise, for draws without replacement."""
    return normalised(q.scatter(-1, token, 0.0))


def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Return top / bottom, and 0 where bottom is 0: such a branch has probability 0."""
    return torch.where(bottom > 0, top / bottom, 0.0)
