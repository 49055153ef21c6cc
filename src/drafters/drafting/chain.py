"""Draft chains: one per row, optionally ended by low confidence, or several in parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from decode.draft import PAD, Draft, DraftProbs
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler
from decode.transfer import on_device_only
from drafters.vocabulary import Vocabulary, probs_of, target_ids

Step = Callable[[Tensor, Tensor], Tensor]  # see `expand`


def draft_chain(
    logits: Tensor,
    step: Step,
    warp: Sampler | None,
    coin: Coin,
    plan: Plan,
    vocabulary: Vocabulary | None,
    confidence: Callable[[], Tensor] | None,
) -> Draft:
    """One chain per row of the most likely tokens or, with `warp`, of sampled ones.

    With `plan.min_confidence` a row ends before the first node where the product of confidences is below
    it. The decision does not depend on the token sampled there, so sampled tokens keep their distribution
    and verification stays lossless.
    """
    first = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)
    alive = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    confident = alive.to(torch.promote_types(logits.dtype, torch.float32))  # (B,) product so far
    tokens, levels = [], []  # (B,) and, if sampled, (B, V) of each level
    for level in range(plan.depth):
        probs = None if warp is None else probs_of(logits, warp, vocabulary)
        if plan.min_confidence:
            if confidence is not None:
                confident = confident * confidence()[:, 0].to(confident.dtype).sigmoid()
            else:  # at temperature 0 `probs` is one-hot: use the distribution before warping
                confident = confident * _largest(logits, probs if warp and warp.temperature else None)
            alive = alive & (confident >= plan.min_confidence)
        if probs is not None:
            levels.append(probs)
            alive = alive & (probs.amax(-1) > 0)  # a chain ends where nothing can be drawn
        # One synchronisation with the device per level.
        if plan.min_confidence and not on_device_only() and not alive.any():
            break
        if probs is None:
            token = target_ids(logits.max(-1).indices, vocabulary)  # faster than `argmax` on a CPU
        else:
            token = coin.draw(probs, Key(Purpose.PROPOSE, level), alive)
        may_end = probs is not None or plan.min_confidence
        tokens.append(token.masked_fill(~alive, PAD) if may_end else token)
        if level + 1 < plan.depth:
            logits = step(token[:, None], first)[:, 0]
    if not tokens:
        empty = Draft.empty(len(alive), alive.device)
        if not levels:
            return empty
        # With empty probs these rows use the same random keys as rows without a draft in a mixed batch.
        none = empty.tokens
        return replace(empty, probs=DraftProbs(levels[0][:, None][:, :0], none, (), none.bool()))
    return Draft.chain(torch.stack(tokens, 1), torch.stack(levels[: len(tokens)], 1) if levels else None)


def _largest(logits: Tensor, probs: Tensor | None) -> Tensor:
    """(B,) largest probability of (B, V) `probs` or, without them, of softmax((B, V') logits)."""
    return (Sampler(1.0).probs(logits) if probs is None else probs).amax(-1)


def draft_parallel_chains(
    logits: Tensor, step: Step, warp: Sampler, coin: Coin, plan: Plan, vocabulary: Vocabulary | None
) -> Draft:
    """`plan.drafts` chains, sampled independently; node level * K + k belongs to chain k.

    Chains with equal tokens so far are twins. Each token stays a separate node, since verification examines
    every draw, but the next tokens of twins are children of the first twin and share its distribution.
    """
    rows, count = logits.shape[0], plan.drafts
    index = torch.arange(count, device=logits.device)
    twin = torch.zeros(rows, count, dtype=torch.long, device=logits.device)  # (B, K) first twin of each chain
    alive = torch.ones_like(twin, dtype=torch.bool)  # a chain ends where nothing can be drawn
    probs = probs_of(logits, warp, vocabulary)[:, None]  # (B, 1, V), then (B, K, V)
    q_levels, tokens = [probs], []
    parents, owners = [twin - 1], [twin[:, :1]]
    for level in range(plan.depth):
        # Rows of twins differ only by rounding; sample all from the row that verification reads. (B, K, V)
        draw_probs = probs.expand(-1, count, -1).gather(1, twin[..., None].expand(-1, -1, probs.shape[-1]))
        alive = alive & (draw_probs.amax(-1) > 0)
        draws = coin.draw(draw_probs, Key(Purpose.PROPOSE, level * count), alive)
        tokens.append(draws.masked_fill(~alive, PAD))
        if level + 1 == plan.depth:
            break
        logits = step(tokens[-1].clamp_min(0), twin)
        # (B, K, K): earlier twins that drew the same token; the first of them is the new twin.
        same = (twin[:, :, None] == twin[:, None]) & (tokens[-1][:, :, None] == tokens[-1][:, None])
        twin = same.int().argmax(-1)  # (B, K)
        probs = probs_of(logits.flatten(0, 1), warp, vocabulary).unflatten(0, logits.shape[:2])
        probs = probs.expand(-1, count, -1)
        q_levels.append(probs)
        parents.append(level * count + twin)
        owners.append(torch.where(twin == index, level * count + 1 + index, -1))
    token = torch.cat(tokens, 1)
    levels, sampled = tuple(q.shape[1] for q in q_levels), torch.ones_like(token, dtype=torch.bool)
    dist = DraftProbs(torch.cat(q_levels, 1), torch.cat(owners, 1), levels, sampled, count, replacement=True)
    return Draft(token, torch.cat(parents, 1), plan.depth, dist)
