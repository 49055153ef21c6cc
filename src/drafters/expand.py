"""Growing a draft level by level, for any drafter that conditions on its own tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decode.coin import Coin, Key, Purpose
from decode.draft import Draft
from decode.plan import Plan
from decode.sampling import Sampler

Step = Callable[[Tensor, Tensor], Tensor]


def expand(logits: Tensor, step: Step, sampler: Sampler, coin: Coin, plan: Plan) -> Draft:
    """Draft from the logits below the root.

    Args:
        logits: (B, V) of the root's children.
        step: (tokens (B, W), parent (B, W)) -> (B, W, V) logits of the tokens' children, where
            `parent` indexes the W entries of the previous call (in the first call all are 0).
        sampler: the law that a sampled chain draws from.
        coin: for sampled chains.
        plan: shape.
    """
    if plan.width == 1:
        return _chain(logits, step, sampler, coin, plan)
    return _tree(logits, step, plan)


def _chain(logits: Tensor, step: Step, sampler: Sampler, coin: Coin, plan: Plan) -> Draft:
    first = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)
    everyone = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    # The drafter's own warpers may be anything; a penalty would need the history it has not.
    warp = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p)
    tokens, laws = [], []
    for depth in range(plan.depth):
        if plan.proposal == "fixed":
            token = logits.argmax(-1)
        else:
            laws.append(warp.law(logits))
            token = coin.draw(laws[-1], Key(Purpose.PROPOSE, depth), everyone)
        tokens.append(token)
        if depth + 1 < plan.depth:
            logits = step(token[:, None], first)[:, 0]
    return Draft.chain(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None)


def _tree(logits: Tensor, step: Step, plan: Plan) -> Draft:
    """EAGLE-2's tree (arXiv:2406.16858, section 4): expand the best, then keep the best of all.

    Scores are log-probabilities of whole paths, so a child never outranks its parent and the
    kept set is a tree. Every node is fixed: chosen without looking at any coin.
    """
    rows, vocab = logits.shape
    width = min(plan.width, vocab)
    score, token = logits.float().log_softmax(-1).topk(width)  # (B, W)
    scores, tokens = [score], [token]
    parents = [torch.full_like(token, -1)]
    slot = torch.arange(width, device=logits.device).expand(rows, -1)  # candidate index of beams
    beam_parent = torch.zeros_like(token)
    total = width
    for _ in range(plan.depth - 1):
        child_logits = step(token, beam_parent)  # (B, W, V)
        child, child_token = child_logits.float().log_softmax(-1).topk(width)  # (B, W, W)
        flat = (score[..., None] + child).flatten(1)  # (B, W * W)
        scores.append(flat)
        tokens.append(child_token.flatten(1))
        parents.append(slot.repeat_interleave(width, 1))
        score, best = flat.topk(width)
        token = tokens[-1].gather(1, best)
        beam_parent, slot = best // width, best + total
        total += width * width
    score, token, parent = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1)
    kept = score.topk(min(plan.nodes, total)).indices.sort(-1).values  # parents before children
    order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    rank = torch.zeros_like(parent).scatter(1, kept, order)  # candidate -> node
    above = parent.gather(1, kept)
    above = torch.where(above < 0, above, rank.gather(1, above.clamp_min(0)))
    return Draft(token.gather(1, kept), above, depth=plan.depth)
