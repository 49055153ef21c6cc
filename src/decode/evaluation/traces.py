"""Traces of decoder runs: source of every token, and its probability under target and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import PAD, Draft
from decode.evaluation.teacher_forced import ForcedTokens
from decode.generation.generate import generate
from decode.generation.types import Proposer, Round
from decode.model.target import Target
from decode.plan import Plan
from decode.rng import KeyedCoin
from decode.sampling import Sampler

ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"


class TracedToken(NamedTuple):
    """One token of a text.

    Attributes:
        token: id.
        source: accepted: from the draft; corrected: from the target, where the draft had other tokens;
            plain: from the target, without a draft.
        p: probability under the target, with temperature but no other warper.
        p_rank: rank under the target, 1 for the most likely token.
        q: probability under the drafter; None without a distribution here.
        q_rank: rank under the drafter; None if q is None or 0.
    """

    token: int
    source: str
    p: float
    p_rank: int
    q: float | None
    q_rank: int | None


def trace_tokens(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    plan: Plan,
    sampler: Sampler,
    max_new_tokens: int,
    has_probs: bool,
    stop: Sequence[int] = (),
    seed: int = 0,
    names: Sequence[int | str] | None = None,
) -> list[list[TracedToken]]:
    """Decode the prompts in one batch and record every token.

    Probabilities are at the sampler's temperature, or at 1 if it is 0.

    Args:
        target: as for `generate`.
        drafter: as for `generate`.
        prompts: token ids.
        plan: shape of the draft and verification rule.
        sampler: warpers of the text.
        max_new_tokens: per prompt.
        has_probs: whether the drafter can sample a chain of the plan's depth, so q is known.
        stop: end tokens.
        seed: of all draws.
        names: identifiers of the prompts, which key the draws.
    """
    view = Sampler(sampler.temperature or 1.0)
    recorder = _ProbsRecorder(drafter, view, plan.depth if has_probs else 0)
    traces: list[list[TracedToken]] = [[] for _ in prompts]

    def observe(done: Round) -> None:
        tokens = done.result.tokens  # (B, K + 1)
        target_side = _probs_and_ranks(_at(done.logits, done.result.slots).float() / view.temperature, tokens)
        q = recorder.probs(tokens)  # (B, K', V) or None
        draft_side = None if q is None else _probs_and_ranks(q.log(), tokens[:, : q.shape[1]])
        corrected = _has_children(done.draft, done.result.slots, done.result.accepted).tolist()
        for row, request in enumerate(done.requests):
            accepted = int(done.result.accepted[row])
            for i, token in enumerate(done.emitted[row]):
                source = ACCEPTED if i < accepted else CORRECTED if corrected[row] else PLAIN
                q_token, q_rank = (None, None) if draft_side is None else _entry(draft_side, row, i)
                traces[request].append(
                    TracedToken(
                        token,
                        source,
                        float(target_side[0][row, i]),
                        int(target_side[1][row, i]),
                        q_token,
                        q_rank if q_token else None,
                    )
                )

    generate(
        target,
        recorder,
        prompts,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        plan=plan,
        seed=seed,
        requests=names,
        stop=stop,
        on_round=observe,
    )
    return traces


class _ProbsRecorder:
    """A proposer that can repeat its draft on the emitted tokens to get their probabilities q.

    Args:
        drafter: the wrapped proposer.
        view: sampler of the recorded distributions.
        depth: number of levels to record; 0 if the drafter has no distributions.
    """

    def __init__(self, drafter: Proposer, view: Sampler, depth: int) -> None:
        self._drafter, self._view, self._depth = drafter, view, depth
        self._call: tuple[Any, Target, Sampler, KeyedCoin, Plan] | None = None
        self.new_state, self.advance = drafter.new_state, drafter.advance
        self.select, self.append = drafter.select, drafter.append
        self.traits = drafter.traits

    def propose(self, state: Any, target: Target, sampler: Sampler, coin: KeyedCoin, plan: Plan) -> Draft:
        self._call = call = state, target, sampler, coin, plan
        return self._drafter.propose(*call)

    def probs(self, text: Tensor) -> Tensor | None:
        """(B, n) emitted tokens -> (B, up to n, V) distributions that the drafter would draw them from."""
        call, self._call = self._call, None  # None in a round without a draft
        if call is None or not self._depth:
            return None
        ahead = torch.nn.functional.pad(text, (0, self._depth), value=PAD)[:, : self._depth]
        plan = Plan(self._depth, proposal="sampled")
        draft = self._drafter.propose(*call[:2], self._view, ForcedTokens(ahead), plan)  # pyright: ignore[reportArgumentType]
        self._drafter.propose(*call)  # restores the state after the real draft
        return None if draft.q is None else draft.q[:, : text.shape[1]]  # the draft may be shallower


def _at(rows: Tensor, slots: Tensor) -> Tensor:
    """Gather (B, S, V) at (B, n) slots -> (B, n, V)."""
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], slots]


def _probs_and_ranks(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) probabilities and ranks of (B, n) tokens in (B, n, V) logits."""
    token_logit = logits.gather(-1, tokens.clamp_min(0)[..., None])
    prob = logits.softmax(-1).gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    return prob.cpu(), 1 + (logits > token_logit).sum(-1).cpu()


def _entry(side: tuple[Tensor, Tensor], row: int, i: int) -> tuple[float | None, int | None]:
    """Probability and rank of one token; (None, None) past the draft's depth."""
    prob, rank = side
    return (float(prob[row, i]), int(rank[row, i])) if i < prob.shape[1] else (None, None)


def _has_children(draft: Draft, slots: Tensor, accepted: Tensor) -> Tensor:
    """(B,) whether the draft had a node below the last accepted slot."""
    end = slots.gather(1, accepted[:, None])  # (B, 1)
    return ((draft.parents == end - 1) & (draft.tokens != PAD)).any(1)
