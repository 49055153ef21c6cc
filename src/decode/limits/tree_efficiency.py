"""Expected acceptance of drafts at round starts, compared with the best trees and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.generation.generate import generate
from decode.generation.types import Proposer, Round
from decode.limits.entropy_bound import read_contexts
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


class RoundStart(NamedTuple):
    """A position at which the decoder started a round."""

    request: int
    context: list[int]  # prompt and settled tokens, the root last


class TreeAcceptance(NamedTuple):
    """Exact expected number of accepted draft tokens at every start.

    Attributes:
        chosen: (M,) for the plan's tree.
        ranked: (M,) for the best tree of equal size among all nodes that the drafter expanded.
    """

    chosen: Tensor
    ranked: Tensor


def round_starts(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    *,
    batch_size: int,
    max_new_tokens: int,
    stop: Sequence[int],
    seed: int,
) -> list[RoundStart]:
    """Round starts of a decoder run; see `generate` for the arguments."""
    starts: list[RoundStart] = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        texts = [list(p) for p in part]

        def note(step: Round, first: int = first, texts: list[list[int]] = texts) -> None:
            for request, emitted in zip(step.requests, step.emitted, strict=True):
                if step.draft.depth:
                    starts.append(RoundStart(first + request, list(texts[request])))
                texts[request] += emitted

        options = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "on_round": note}
        generate(target, drafter, part, sampler=sampler, plan=plan, **options)
    return starts


def path_probs(draft: Draft, p: Tensor) -> Tensor:
    """(B, N) probability of the path to each node, given (B, S, V) `p` at the slots; 0 for padding."""
    rows, nodes = draft.tokens.shape
    path = p.new_ones(rows, nodes + 1, dtype=torch.float64)
    real = draft.tokens != PAD
    parent, tokens = draft.parents + 1, draft.tokens.clamp_min(0)
    row = torch.arange(rows, device=tokens.device)[:, None]
    token_prob = p.double()[row, parent, tokens] * real  # (B, N)
    for level in range(1, draft.depth + 1):
        current = draft.levels[:, 1:] == level
        path[:, 1:] = torch.where(current, token_prob * path.gather(1, parent), path[:, 1:])
    return path[:, 1:] * real


@torch.inference_mode()
def tree_acceptance(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 8,
) -> TreeAcceptance:
    """Expected acceptance of trees of fixed nodes at these starts, with a new drafter state.

    Args:
        target: target with the drafter's taps; its cache is reset.
        drafter: the drafter.
        contexts: at least two token ids each; the last one is the root.
        plan: plan with fixed nodes.
        sampler: the target's warpers.
        batch_size: starts per batch.
    """
    plans = [plan]
    if plan.width > 1 and not plan.tree:  # all candidates of a dynamic tree
        plans.append(replace(plan, nodes=plan.width + (plan.depth - 1) * plan.width**2))
    chosen, ranked = [], []
    for drafts in _drafts(target, drafter, contexts, plans, sampler, batch_size):
        probs = [path_probs(draft, p) for draft, p in drafts]
        chosen.append(probs[0].sum(1))
        ranked.append(probs[-1].topk(min(plan.nodes, probs[-1].shape[1]), -1).values.sum(1))
    return TreeAcceptance(torch.cat(chosen), torch.cat(ranked))


@torch.inference_mode()
def first_level_bound(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 8,
) -> Tensor:
    """(M,) upper bound of any lossless rule's acceptance probability at the first level.

    Arguments as in `tree_acceptance`, with a plan that samples. One sampled token: 1 - TV(p, q). One next to
    fixed tokens: their mass, and 1 - TV of the rest. Several sampled: the optimal transport bound for
    independent draws from q (Khisti et al., arXiv:2410.18234; Hu et al., arXiv:2502.18779).
    """
    bounds = []
    for ((draft, target_probs),) in _drafts(target, drafter, contexts, [plan], sampler, batch_size):
        assert draft.probs is not None
        first = (draft.parents == -1) & (draft.tokens != PAD)  # (B, N)
        p, q = (
            target_probs[:, 0].double(),
            draft.probs.q[:, 0].double(),
        )  # (B, V) at the root, the first owner
        sampled = draft.probs.sampled
        fixed = (p.gather(1, draft.tokens.clamp_min(0)) * (first & ~sampled)).sum(1)
        bounds.append(fixed + transport(p, q, (first & sampled).sum(1)))
    return torch.cat(bounds)


def transport(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """(B,) maximum acceptance probability of k independent draws: 1 + min over sets H of p(H) - q(H)^k.

    The minimum is attained at a level set of p / q.

    Args:
        p: (B, V) the target's distributions.
        q: (B, V) the draft's distributions.
        draws: (B,) number of draws k.
    """
    order = (p / q.clamp_min(1e-300)).argsort(-1)
    q_power = q.gather(1, order).cumsum(-1).clamp_max(1) ** draws[:, None]
    return 1 + (p.gather(1, order).cumsum(-1) - q_power).amin(-1).clamp_max(0)


def _drafts(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_size: int,
) -> Iterator[list[tuple[Draft, Tensor]]]:
    """For each batch of starts and each plan, the draft and the target's (B, S, V) distributions."""
    for first in range(0, len(contexts), batch_size):
        part = contexts[first : first + batch_size]
        rows = len(part)
        tokens, counts, root, output = read_contexts(target, part, room=1 + max(plan.nodes for plan in plans))
        state = drafter.new_state(rows)
        drafter.advance(state, target, tokens, output.taps, counts, root)
        drafts = []
        for plan in plans:
            coin = KeyedCoin(0, range(first, first + rows))
            draft = drafter.propose(state, target, sampler, coin, plan)
            p = sampler.probs(target.head(target.extend(root[:, None], draft).last))
            drafts.append((draft, p))
        yield drafts
