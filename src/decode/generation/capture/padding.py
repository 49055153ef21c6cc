"""Drafts of varying size in the fixed shapes of a plan."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch.nn import functional as F

from decode.draft import PAD, Draft, DraftProbs
from decode.errors import UserError
from decode.generation.capture.state import replaced
from decode.generation.capture.verification import no_store
from decode.plan import Plan


def padded(draft: Draft, plan: Plan) -> Draft:
    """The same draft with as many nodes and levels as the plan allows; those that are missing are `PAD`.

    A draft without nodes and distributions stays as it is: it is verified as in plain decoding.

    Args:
        draft: of any drafter.
        plan: that it was drafted for.

    Raises:
        UserError: the draft has more nodes or levels than the plan allows.
    """
    if not draft.depth and draft.probs is None:
        return Draft.empty(len(draft.tokens), draft.tokens.device)
    nodes, missing = plan.nodes, plan.nodes - draft.tokens.shape[1]
    if missing < 0 or draft.depth > plan.depth:
        raise UserError(
            f"a draft has {draft.tokens.shape[1]} nodes and {draft.depth} levels, but the plan {nodes} and "
            f"{plan.depth}: correct the drafter's `propose` (docs/adding.md), or set target.capture=false"
        )
    tokens = F.pad(draft.tokens, (0, missing), value=PAD)
    if draft.is_chain and not plan.has_siblings:
        parents = torch.arange(-1, nodes - 1, device=tokens.device).expand_as(tokens)
        probs = None if draft.probs is None else _padded_chain(draft.probs, nodes)
        return Draft(tokens, parents, plan.depth, probs, is_chain=True)
    probs = draft.probs
    if probs is not None:
        levels = *probs.levels, *[0] * (plan.depth - draft.depth)
        probs = replace(probs, levels=levels, sampled=F.pad(probs.sampled, (0, missing)))
    return Draft(tokens, F.pad(draft.parents, (0, missing), value=-1), plan.depth, probs)


def missing_nodes(plan: Plan, rows: int, device: torch.device) -> Draft:
    """A padded draft of fixed nodes for a plan, none of which exists."""
    return padded(Draft.chain(torch.full((rows, 1), PAD, device=device)), plan)


def _padded_chain(probs: DraftProbs, nodes: int) -> DraftProbs:
    """Distributions of a chain of `nodes` nodes; those of missing ones are never read."""
    missing = nodes - probs.q.shape[1]
    owner = torch.arange(nodes, device=probs.q.device).expand(len(probs.q), -1)
    sampled = F.pad(probs.sampled, (0, nodes - probs.sampled.shape[1]), value=True)
    q = F.pad(probs.q, (0, 0, 0, missing))
    return replace(probs, q=q, owner=owner, levels=(1,) * nodes, sampled=sampled)


def form(draft: Draft) -> Hashable:
    """The structure of a draft and the shapes of its tensors, without rows."""
    return replaced(draft, lambda part: (part.shape[1:], part.dtype), no_store)
