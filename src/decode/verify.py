"""Acceptance rules, each written once against a `Coin`.

Both rules are lossless: what they emit, continued by the target, has the target's law (Lemma and
Theorem 1 of docs/lossless.md; Leviathan et al. arXiv:2211.17192, Chen et al. arXiv:2302.01318).
They loop over depth, for all rows at once, and never ask the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.coin import Coin, Key, Purpose
from decode.draft import PAD, Draft
from decode.errors import UserError
from decode.sampling import Sampler


class Verdict(NamedTuple):
    """What a round settles."""

    tokens: Tensor  # (B, K + 1) emitted: the accepted tokens and one more, then PAD
    slots: Tensor  # (B, K + 1) slot whose row each token was drawn from, then 0
    accepted: Tensor  # (B,) accepted draft tokens


class Rows:
    """The target's laws at the slots of one round, warped on demand along the walked path.

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


def match(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Draw y from the target's row; descend while y is a child, else stop. Any tree, any source.

    Draws are keyed by position, so sampled output equals plain sampling token for token.
    """
    count, device = draft.tokens.shape[0], draft.tokens.device
    slot = torch.zeros(count, dtype=torch.long, device=device)
    active = torch.ones(count, dtype=torch.bool, device=device)
    tokens, slots = [], []
    for depth in range(draft.depth + 1):
        y = coin.draw(rows.law(slot), Key(Purpose.TARGET, depth), active)  # (B,)
        tokens.append(torch.where(active, y, PAD))
        slots.append(slot * active)
        if depth < draft.depth:
            rows.follow(y, active)
            child = (draft.parents == slot[:, None] - 1) & (draft.tokens == y[:, None])  # (B, N)
            active = active & child.any(-1)
            slot = torch.where(active, child.int().argmax(-1) + 1, slot)
    emitted = torch.stack(tokens, 1)
    return Verdict(emitted, torch.stack(slots, 1), (emitted != PAD).sum(-1) - 1)


def token(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Keep a sampled token x with probability min(1, p(x) / q(x)), else draw from (p - q)+.

    Arithmetic in the rows' own dtype (fp32 or wider); `flip` is strict; where p equals q to the
    last bit the residual is empty, was reached with probability zero, and p itself serves.
    """
    q = draft.q
    assert q is not None
    count, device = draft.tokens.shape[0], draft.tokens.device
    active = torch.ones(count, dtype=torch.bool, device=device)
    accepted = torch.zeros(count, dtype=torch.long, device=device)
    residual = torch.zeros_like(q[:, 0])  # (B, V) at the slot where each row's walk ends
    for depth in range(draft.depth):
        p = rows.law(torch.full_like(accepted, depth))  # (B, V)
        x = draft.tokens[:, depth]
        real = x != PAD
        at = x.clamp_min(0)[:, None]
        law = q[:, depth].to(p.dtype) * real[:, None]  # a row without a node has no residual
        accept, proposal = p.gather(1, at)[:, 0], law.gather(1, at)[:, 0]
        keep = coin.flip(accept, proposal, Key(Purpose.ACCEPT, depth), active & real)
        rejected = (p - law).clamp_min(0)
        rejected = torch.where(rejected.sum(-1, keepdim=True) > 0, rejected, p)
        residual = torch.where(active[:, None], rejected, residual)
        active = active & keep & real
        accepted += active
        rows.follow(x, active)
    last = rows.law(torch.full_like(accepted, draft.depth))
    residual = torch.where(active[:, None], last, residual)  # a draft accepted whole
    # One draw a round: its key needs no slot.
    extra = coin.draw(residual, Key(Purpose.RESIDUAL, 0), torch.ones_like(active))  # (B,)
    steps = torch.arange(draft.depth + 1, device=device)
    drafted = torch.nn.functional.pad(draft.tokens, (0, 1), value=PAD)
    emitted = torch.where(steps < accepted[:, None], drafted, PAD)
    emitted = emitted.scatter(1, accepted[:, None], extra[:, None])
    return Verdict(emitted, steps * (emitted != PAD), accepted)


class Rule(NamedTuple):
    """An acceptance rule and what it can verify without loss."""

    run: Callable[[Draft, Rows, Coin], Verdict]
    needs_chain: bool  # every node the child of the one before
    needs_laws: bool  # every node sampled from a law that the draft carries
    takes: str


RULES = {
    "match": Rule(match, False, False, "any chain or tree"),
    "token": Rule(token, True, True, "a chain sampled from laws q that the draft carries"),
}


def verify(rule: str, draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Run a rule, or say why it would not be lossless on this draft.

    Raises:
        UserError: unknown rule, or a draft the rule cannot verify without loss.
    """
    if rule not in RULES:
        raise UserError(f"decode.rule={rule}: choose one of {', '.join(RULES)}")
    run, needs_chain, needs_laws, takes = RULES[rule]
    # A round that drafts nothing has no law to carry; every rule then draws from p.
    if (needs_chain and not draft.is_chain) or (needs_laws and draft.q is None and draft.depth):
        raise UserError(f"decode.rule={rule} verifies {takes}; this draft is none: use rule=match")
    if needs_laws and draft.q is None:
        run = match
    return run(draft, rows, coin)
