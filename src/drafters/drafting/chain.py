"""Growing chains: one, each row's as long as it is confident, or several side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from decode.draft import PAD, Draft, Laws
from decode.plan import Plan
from decode.rng import Coin, Key, Purpose
from decode.sampling import Sampler
from drafters.drafting.vocabulary import Vocabulary, probs_of, target_ids

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
    """One chain of the likeliest tokens or, with `warp`, of drawn ones.

    With `plan.min_confidence` a row ends before the first node at which the product of confidences is
    lower. What is drawn there has no part in that, so the tokens that are drawn keep their laws.
    """
    first = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)
    alive = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    confident, tokens, levels = alive.to(torch.promote_types(logits.dtype, torch.float32)), [], []
    for level in range(plan.depth):
        probs = None if warp is None else probs_of(logits, warp, vocabulary)
        if plan.min_confidence:
            if confidence is not None:
                confident = confident * confidence()[:, 0].to(confident.dtype).sigmoid()
            else:  # at temperature 0 every law is sure of its token; what it was made from is not
                confident = confident * _largest(logits, probs if warp and warp.temperature else None)
            alive = alive & (confident >= plan.min_confidence)
        if probs is not None:
            levels.append(probs)
            alive = alive & (probs.amax(-1) > 0)  # a chain ends where nothing can be drawn
        if plan.min_confidence and not alive.any():  # asks the device, once a level
            break
        if probs is None:
            token = target_ids(logits.max(-1).indices, vocabulary)  # `argmax` takes twice as long on a CPU
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
        # Its rows draw by the keys of a row that drafts nothing beside one that does: a text is its own.
        none = empty.tokens
        return replace(empty, laws=Laws(levels[0][:, None][:, :0], none, (), none.bool()))
    return Draft.chain(torch.stack(tokens, 1), torch.stack(levels[: len(tokens)], 1) if levels else None)


def _largest(logits: Tensor, probs: Tensor | None) -> Tensor:
    """(B,) the largest chance in (B, V) laws or, without them, in those of the (B, V') logits."""
    return (Sampler(1.0).law(logits) if probs is None else probs).amax(-1)


def draft_parallel_chains(
    logits: Tensor, step: Step, warp: Sampler, coin: Coin, plan: Plan, vocabulary: Vocabulary | None
) -> Draft:
    """`plan.drafts` chains, each drawn by itself; node level * K + k is of chain k.

    Chains that agree so far are twins. Each of their tokens is a node of its own, as every draw has
    to be examined, but what they draw next hangs from the first of them and has its law.
    """
    rows, count = logits.shape[0], plan.drafts
    index = torch.arange(count, device=logits.device)
    twin = torch.zeros(rows, count, dtype=torch.long, device=logits.device)  # the first of each one's twins
    alive = torch.ones_like(twin, dtype=torch.bool)  # a chain ends where nothing can be drawn
    probs = probs_of(logits, warp, vocabulary)[:, None]  # (B, 1, V), then (B, K, V)
    q_levels, tokens = [probs], []
    parents, owners = [twin - 1], [twin[:, :1]]
    for level in range(plan.depth):
        # Twins' rows are equal but for rounding; all are drawn from the one that the rule will read.
        draw_probs = probs.expand(-1, count, -1).gather(1, twin[..., None].expand(-1, -1, probs.shape[-1]))
        alive = alive & (draw_probs.amax(-1) > 0)
        draws = coin.draw(draw_probs, Key(Purpose.PROPOSE, level * count), alive)
        tokens.append(draws.masked_fill(~alive, PAD))
        if level + 1 == plan.depth:
            break
        logits = step(tokens[-1].clamp_min(0), twin)
        same = (twin[:, :, None] == twin[:, None]) & (tokens[-1][:, :, None] == tokens[-1][:, None])
        twin = same.int().argmax(-1)  # (B, K)
        probs = probs_of(logits.flatten(0, 1), warp, vocabulary).unflatten(0, logits.shape[:2])
        probs = probs.expand(-1, count, -1)
        q_levels.append(probs)
        parents.append(level * count + twin)
        owners.append(torch.where(twin == index, level * count + 1 + index, -1))
    token = torch.cat(tokens, 1)
    levels, sampled = tuple(q.shape[1] for q in q_levels), torch.ones_like(token, dtype=torch.bool)
    laws = Laws(torch.cat(q_levels, 1), torch.cat(owners, 1), levels, sampled, count, replacement=True)
    return Draft(token, torch.cat(parents, 1), plan.depth, laws)
