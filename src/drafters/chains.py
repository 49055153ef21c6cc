"""Growing chains: one, or several side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decode.coin import Coin, Key, Purpose
from decode.draft import Draft, Laws
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.vocabulary import Vocabulary, law_of, names

Step = Callable[[Tensor, Tensor], Tensor]  # see `expand`


def chain(
    logits: Tensor, step: Step, warp: Sampler | None, coin: Coin, plan: Plan, vocabulary: Vocabulary | None
) -> Draft:
    """One chain of the likeliest tokens or, with `warp`, of drawn ones."""
    first = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)
    everyone = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    tokens, laws = [], []
    for level in range(plan.depth):
        if warp is None:
            token = names(logits.max(-1).indices, vocabulary)  # `argmax` takes twice as long on a CPU
        else:
            laws.append(law_of(logits, warp, vocabulary))
            token = coin.draw(laws[-1], Key(Purpose.PROPOSE, level), everyone)
        tokens.append(token)
        if level + 1 < plan.depth:
            logits = step(token[:, None], first)[:, 0]
    return Draft.chain(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)


def side_by_side(
    logits: Tensor, step: Step, warp: Sampler, coin: Coin, plan: Plan, vocabulary: Vocabulary | None
) -> Draft:
    """`plan.drafts` chains, each drawn by itself; node level * K + k is of chain k.

    Chains that agree so far are twins. Each of their tokens is a node of its own, as every draw has
    to be examined, but what they draw next hangs from the first of them and has its law.
    """
    rows, count = logits.shape[0], plan.drafts
    own = torch.arange(count, device=logits.device)
    twin = torch.zeros(rows, count, dtype=torch.long, device=logits.device)  # the first of each one's twins
    everyone = torch.ones_like(twin, dtype=torch.bool)
    law = law_of(logits, warp, vocabulary)[:, None]  # (B, 1, V), then (B, K, V)
    laws, tokens = [law], []
    parents, owners = [twin - 1], [twin[:, :1]]
    for level in range(plan.depth):
        # Twins' rows are equal but for rounding; all are drawn from the one that the rule will read.
        drawn_from = law.expand(-1, count, -1).gather(1, twin[..., None].expand(-1, -1, law.shape[-1]))
        tokens.append(coin.draw(drawn_from, Key(Purpose.PROPOSE, level * count), everyone))
        if level + 1 == plan.depth:
            break
        logits = step(tokens[-1], twin)
        alike = (twin[:, :, None] == twin[:, None]) & (tokens[-1][:, :, None] == tokens[-1][:, None])
        twin = alike.int().argmax(-1)  # (B, K)
        law = law_of(logits.flatten(0, 1), warp, vocabulary).unflatten(0, logits.shape[:2])
        law = law.expand(-1, count, -1)
        laws.append(law)
        parents.append(level * count + twin)
        owners.append(torch.where(twin == own, level * count + 1 + own, -1))
    token = torch.cat(tokens, 1)
    levels, sampled = tuple(q.shape[1] for q in laws), torch.ones_like(token, dtype=torch.bool)
    drawn = Laws(torch.cat(laws, 1), torch.cat(owners, 1), levels, sampled, count, replacement=True)
    return Draft(token, torch.cat(parents, 1), plan.depth, drawn)
