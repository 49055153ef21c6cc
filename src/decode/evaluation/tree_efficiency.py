"""What a drafter's drafts keep where rounds begin, beside what the best trees would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.evaluation.entropy_bound import settle
from decode.generation.generate import generate
from decode.generation.types import Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler


class Begun(NamedTuple):
    """A place where the decoder began a round."""

    request: int
    context: list[int]  # prompt and what was settled, the root last


class Kept(NamedTuple):
    """Draft tokens that are kept on average at every start; exact, no coin is thrown.

    Attributes:
        chosen: (M,) by the plan's tree.
        ranked: (M,) by the best tree of as many of the nodes that the drafter looked at.
    """

    chosen: Tensor
    ranked: Tensor


def begun(
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
) -> list[Begun]:
    """Where the rounds of a real run begin; see `generate` for what the arguments mean."""
    found: list[Begun] = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        texts = [list(p) for p in part]

        def note(step: Round, first: int = first, texts: list[list[int]] = texts) -> None:
            for request, emitted in zip(step.requests, step.emitted, strict=True):
                if step.draft.depth:
                    found.append(Begun(first + request, list(texts[request])))
                texts[request] += emitted

        options = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "on_round": note}
        generate(target, drafter, part, sampler=sampler, plan=plan, **options)
    return found


def masses(draft: Draft, laws: Tensor) -> Tensor:
    """(B, N) probability of the path to each node, by (B, S, V) laws of the slots; 0 for padding."""
    rows, nodes = draft.tokens.shape
    mass = laws.new_ones(rows, nodes + 1, dtype=torch.float64)
    real = draft.tokens != PAD
    above, tokens = draft.parents + 1, draft.tokens.clamp_min(0)
    own = laws.double()[torch.arange(rows, device=tokens.device)[:, None], above, tokens] * real  # (B, N)
    for level in range(1, draft.depth + 1):
        here = draft.levels[:, 1:] == level
        mass[:, 1:] = torch.where(here, own * mass.gather(1, above), mass[:, 1:])
    return mass[:, 1:] * real


@torch.inference_mode()
def kept(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 8,
) -> Kept:
    """What trees of fixed nodes keep at these starts, whatever the drafter remembers of earlier rounds.

    Args:
        target: its cache is begun anew.
        drafter: `target` has its taps.
        contexts: token ids, the root last; two or more each.
        plan: of fixed nodes.
        sampler: the law.
        batch_size: starts side by side.
    """
    plans = [plan]
    if plan.width > 1 and not plan.tree:  # all that a dynamic tree is chosen from
        plans.append(replace(plan, nodes=plan.width + (plan.depth - 1) * plan.width**2))
    chosen, ranked = [], []
    for found in _drafts(target, drafter, contexts, plans, sampler, batch_size):
        every = [masses(draft, laws) for draft, laws in found]
        chosen.append(every[0].sum(1))
        ranked.append(every[-1].topk(min(plan.nodes, every[-1].shape[1]), -1).values.sum(1))
    return Kept(torch.cat(chosen), torch.cat(ranked))


@torch.inference_mode()
def acceptance(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plan: Plan,
    sampler: Sampler,
    batch_size: int = 8,
) -> Tensor:
    """(M,) the most that any lossless rule accepts of the first level's candidates at these starts.

    The arguments are those of `kept`, with a plan that draws. One drawn token: 1 - TV(p, q). One beside
    fixed ones: their mass and 1 - TV beyond them. Several drawn: the optimal transport bound, as if each
    were drawn from the whole of q (Khisti et al., arXiv:2410.18234; Hu et al., arXiv:2502.18779).
    """
    most = []
    for ((draft, laws),) in _drafts(target, drafter, contexts, [plan], sampler, batch_size):
        assert draft.probs is not None
        first = (draft.parents == -1) & (draft.tokens != PAD)  # (B, N)
        p, q = laws[:, 0].double(), draft.probs.q[:, 0].double()  # (B, V): the root is the first owner
        sampled = draft.probs.sampled
        fixed = (p.gather(1, draft.tokens.clamp_min(0)) * (first & ~sampled)).sum(1)
        most.append(fixed + transport(p, q, (first & sampled).sum(1)))
    return torch.cat(most)


def transport(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """(B,) the most that can be accepted of independent draws: 1 + min over sets H of p(H) - q(H)^k.

    The minimum is at a level set of p / q.

    Args:
        p: (B, V) the target's law.
        q: (B, V) the draft's law.
        draws: (B,) k.
    """
    order = (p / q.clamp_min(1e-300)).argsort(-1)
    drawn = q.gather(1, order).cumsum(-1).clamp_max(1) ** draws[:, None]
    return 1 + (p.gather(1, order).cumsum(-1) - drawn).amin(-1).clamp_max(0)


def _drafts(
    target: Target,
    drafter: Proposer,
    contexts: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_size: int,
) -> Iterator[list[tuple[Draft, Tensor]]]:
    """For every batch of starts and plan the draft, and the target's (B, S, V) laws of its slots."""
    for first in range(0, len(contexts), batch_size):
        part = contexts[first : first + batch_size]
        rows = len(part)
        tokens, counts, root, read = settle(target, part, room=1 + max(plan.nodes for plan in plans))
        state = drafter.new_state(rows)
        drafter.advance(state, target, tokens, read.taps, counts, root)
        found = []
        for plan in plans:
            coin = KeyedCoin(0, range(first, first + rows))
            draft = drafter.propose(state, target, sampler, coin, plan)
            laws = sampler.probs(target.head(target.extend(root[:, None], draft).last))
            found.append((draft, laws))
        yield found
