"""Rules that walk from the root to a leaf: `match` for chosen tokens, `recursive` for drawn ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from decode.draft import PAD, Draft
from decode.rng import Coin, Key, Purpose
from decode.verdict import Rows, Verdict, first, longest, struck


def match(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Draw y from the target's row; descend while y is a child, else stop. Any tree, any source.

    Draws are keyed by position, so sampled output equals plain sampling token for token.
    """
    y = rows.best(draft)  # (B, S)
    if y is None:
        return _walk(draft, rows, coin, Purpose.TARGET)
    # Nothing is drawn at temperature 0, so all paths are looked at together.
    if not draft.depth:
        return Verdict(y, torch.zeros_like(y), torch.zeros_like(y[:, 0]))
    hit = draft.tokens == y.gather(1, draft.parents + 1)  # (B, N)
    if draft.is_chain:  # what is emitted is y itself, up to the first miss
        accepted = hit.long().cumprod(1).sum(1)
        place = torch.arange(y.shape[1], device=y.device).expand_as(y)
        beyond = place > accepted[:, None]
        return Verdict(y.masked_fill(beyond, PAD), place.masked_fill(beyond, 0), accepted)
    # Of twins the first is the child, as in the walk.
    twin = (draft.parents[:, :, None] == draft.parents[:, None]) & hit[:, :, None] & hit[:, None]
    hit = hit & ~twin.tril(-1).any(-1)
    return longest(draft, hit, lambda row, end: y[row, end])


def recursive(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Recursive rejection (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374): keep a sampled
    child x with probability min(1, r(x) / q(x)), else r <- norm (r - q)+; when none is kept, match
    the fixed children with a draw from r.
    """
    return _walk(draft, rows, coin, Purpose.RESIDUAL)


def select(draft: Draft, rows: Rows, coin: Coin) -> Verdict:
    """Self-selection (SpecDiff-2, arXiv:2511.00606): `match` on the best of several drafts alone.

    A draft that was chosen for its tokens consists of chosen tokens, whatever it was drawn from.
    """
    best = most_expected(draft, rows.laws(draft))
    return match(replace(draft, tokens=draft.tokens.masked_fill(~best, PAD), laws=None), rows, coin)


def most_expected(draft: Draft, laws: Tensor) -> Tensor:
    """(B, N) bool: the path of which `match` keeps most in expectation, the first of equals.

    Along a path that is the sum over j of p(x_1) .. p(x_j); `laws` (B, S, V) are the target's.
    """
    row = torch.arange(laws.shape[0], device=laws.device)
    mass = laws[row[:, None], draft.parents + 1, draft.tokens.clamp_min(0)]  # (B, N)
    on_path = draft.ancestors()[:, 1:, 1:]  # (B, N, N)
    mass = mass.masked_fill(draft.tokens == PAD, 0.0)[:, None].expand_as(on_path)
    reached = mass.masked_fill(~on_path, 1.0).prod(-1, keepdim=True)  # (B, N, 1)
    score = (on_path.to(reached.dtype) @ reached)[..., 0]
    return on_path[row, score.argmax(-1)]


def _walk(draft: Draft, rows: Rows, coin: Coin, purpose: Purpose) -> Verdict:
    count, device = draft.tokens.shape[0], draft.tokens.device
    laws = draft.laws if purpose == Purpose.RESIDUAL else None  # `match` takes every node as fixed
    slot = torch.zeros(count, dtype=torch.long, device=device)
    nobody = torch.full_like(slot, -1)
    active = torch.ones(count, dtype=torch.bool, device=device)
    tokens, slots = [], []
    for depth in range(draft.depth + 1):
        law, child = rows.law(slot), nobody  # (B, V); (B,) the node to descend to
        below = (draft.parents == slot[:, None] - 1) & (draft.tokens != PAD)  # (B, N)
        if laws is not None and depth < draft.depth:
            law, child = _try_sampled(draft, slot, below, law, coin, depth, active)
            below = below & ~laws.sampled
        some = active & (child < 0)
        y = nobody if _nobody(some) else coin.draw(law, Key(purpose, depth), some)  # (B,)
        if depth < draft.depth:
            child = torch.where(child < 0, first(below & (draft.tokens == y[:, None])), child)
            kept = draft.tokens.gather(1, child.clamp_min(0)[:, None])[:, 0]
            y = torch.where(child < 0, y, kept)
        tokens.append(torch.where(active, y, PAD))
        slots.append(slot * active)
        rows.follow(y, active)
        active = active & (child >= 0)
        slot = (child + 1) * active
        if _nobody(active):
            break
    left = (0, draft.depth + 1 - len(tokens))
    emitted = nn.functional.pad(torch.stack(tokens, 1), left, value=PAD)
    slots = nn.functional.pad(torch.stack(slots, 1), left)
    return Verdict(emitted, slots, (emitted != PAD).sum(1) - 1)


def _try_sampled(
    draft: Draft, slot: Tensor, below: Tensor, law: Tensor, coin: Coin, depth: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, V) what is left of the target's law at (B,) `slot`; (B,) the sampled child kept, or -1."""
    laws = draft.laws
    assert laws is not None
    row = torch.arange(slot.shape[0], device=slot.device)
    q = laws.q[row, first(laws.owner == slot[:, None]).clamp_min(0)].to(law.dtype)  # (B, V)
    child = torch.full_like(slot, -1)
    waiting = below & laws.sampled  # (B, N) not examined yet
    for rank in range(laws.siblings):
        node = first(waiting)
        trying = active & (node >= 0) & (child < 0)
        at = draft.tokens.gather(1, node.clamp_min(0)[:, None]).clamp_min(0)  # (B, 1)
        accept, proposal = law.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
        keep = coin.flip(accept, proposal, Key(Purpose.ACCEPT, depth, rank), trying) & trying
        child = torch.where(keep, node, child)
        law = _without(law, q, trying & ~keep)
        if rank + 1 < laws.siblings:
            waiting = waiting.scatter(1, node.clamp_min(0)[:, None], value=False)
            q = q if laws.replacement else struck(q, at)
    return law, child


def _without(law: Tensor, q: Tensor, where: Tensor) -> Tensor:
    """What is left of `law`, norm (law - q)+, where a token of law q was rejected.

    Where both are equal to the last bit that has probability zero, and `law` itself serves.
    """
    if _nobody(where):
        return law
    left = (law - q).clamp_min(0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(where[..., None] & (mass > 0), left / mass, law)


def _nobody(rows: Tensor) -> bool:
    """Whether no row needs what comes next: asked on a CPU alone, where the answer costs nothing."""
    return rows.device.type == "cpu" and not rows.any()
