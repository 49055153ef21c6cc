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
    going = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    sure, tokens, laws = going.to(torch.promote_types(logits.dtype, torch.float32)), [], []
    for level in range(plan.depth):
        law = None if warp is None else probs_of(logits, warp, vocabulary)
        if plan.min_confidence:
            if confidence is not None:
                sure = sure * confidence()[:, 0].to(sure.dtype).sigmoid()
            else:  # at temperature 0 every law is sure of its token; what it was made from is not
                sure = sure * _largest(logits, law if warp and warp.temperature else None)
            going = going & (sure >= plan.min_confidence)
        if law is not None:
            laws.append(law)
            going = going & (law.amax(-1) > 0)  # a chain ends where nothing can be drawn
        if plan.min_confidence and not going.any():  # asks the device, once a level
            break
        if law is None:
            token = target_ids(logits.max(-1).indices, vocabulary)  # `argmax` takes twice as long on a CPU
        else:
            token = coin.draw(law, Key(Purpose.PROPOSE, level), going)
        may_end = law is not None or plan.min_confidence
        tokens.append(token.masked_fill(~going, PAD) if may_end else token)
        if level + 1 < plan.depth:
            logits = step(token[:, None], first)[:, 0]
    if not tokens:
        empty = Draft.empty(len(going), going.device)
        if not laws:
            return empty
        # Its rows draw by the keys of a row that drafts nothing beside one that does: a text is its own.
        none = empty.tokens
        return replace(empty, laws=Laws(laws[0][:, None][:, :0], none, (), none.bool()))
    return Draft.chain(torch.stack(tokens, 1), torch.stack(laws[: len(tokens)], 1) if laws else None)


def _largest(logits: Tensor, law: Tensor | None) -> Tensor:
    """(B,) the largest chance in (B, V) laws or, without them, in those of the (B, V') logits."""
    return (Sampler(1.0).law(logits) if law is None else law).amax(-1)


def draft_parallel_chains(
    logits: Tensor, step: Step, warp: Sampler, coin: Coin, plan: Plan, vocabulary: Vocabulary | None
) -> Draft:
    """`plan.drafts` chains, each drawn by itself; node level * K + k is of chain k.

    Chains that agree so far are twins. Each of their tokens is a node of its own, as every draw has
    to be examined, but what they draw next hangs from the first of them and has its law.
    """
    rows, count = logits.shape[0], plan.drafts
    own = torch.arange(count, device=logits.device)
    twin = torch.zeros(rows, count, dtype=torch.long, device=logits.device)  # the first of each one's twins
    going = torch.ones_like(twin, dtype=torch.bool)  # a chain ends where nothing can be drawn
    law = probs_of(logits, warp, vocabulary)[:, None]  # (B, 1, V), then (B, K, V)
    laws, tokens = [law], []
    parents, owners = [twin - 1], [twin[:, :1]]
    for level in range(plan.depth):
        # Twins' rows are equal but for rounding; all are drawn from the one that the rule will read.
        drawn_from = law.expand(-1, count, -1).gather(1, twin[..., None].expand(-1, -1, law.shape[-1]))
        going = going & (drawn_from.amax(-1) > 0)
        drawn = coin.draw(drawn_from, Key(Purpose.PROPOSE, level * count), going)
        tokens.append(drawn.masked_fill(~going, PAD))
        if level + 1 == plan.depth:
            break
        logits = step(tokens[-1].clamp_min(0), twin)
        alike = (twin[:, :, None] == twin[:, None]) & (tokens[-1][:, :, None] == tokens[-1][:, None])
        twin = alike.int().argmax(-1)  # (B, K)
        law = probs_of(logits.flatten(0, 1), warp, vocabulary).unflatten(0, logits.shape[:2])
        law = law.expand(-1, count, -1)
        laws.append(law)
        parents.append(level * count + twin)
        owners.append(torch.where(twin == own, level * count + 1 + own, -1))
    token = torch.cat(tokens, 1)
    levels, sampled = tuple(q.shape[1] for q in laws), torch.ones_like(token, dtype=torch.bool)
    stated = Laws(torch.cat(laws, 1), torch.cat(owners, 1), levels, sampled, count, replacement=True)
    return Draft(token, torch.cat(parents, 1), plan.depth, stated)
