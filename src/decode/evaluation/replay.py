"""Exact acceptance on stored rollouts of the target, without random draws.

Given that the decoder emits token y, y is an accepted draft token with probability 1 if it is a fixed child,
min(1, q(y) / p(y)) if the child is drawn from q and verified by rejection, and q(y) if it is drawn from q
and matched. So the starts of rounds on a rollout y ~ p form a Markov chain with known transition
probabilities, and tau is a sum over this chain (docs/lossless.md). The rollout must have been drawn from
the distribution p of the scored sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from decode.draft import PAD, Draft
from decode.evaluation.estimates import interval, kaplan_meier
from decode.evaluation.fixed_replay import walk
from decode.evaluation.teacher_forced import STORED, ForcedTokens, Read, Rollout, TeacherForcedTexts
from decode.generation.finite import check_logits
from decode.generation.types import Observes, Proposer, depends_on_rounds
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from decode.verification.result import drawn_from

CONFIDENCE = 0.99  # level of the interval of decoder minus replay
ROUND_OFF = 1e-12  # relative error of tau in float64
SHORTEST = 128  # context length of the first `ContextPart`; each later part doubles the range


class Counts(NamedTuple):
    """Tokens and verification rounds of each prompt; tau is the ratio of their sums."""

    tokens: list[int]  # without the first token, which the prefill emits
    rounds: list[float]

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else 0.0

    def part(self, first: int, last: int | None = None) -> Counts:
        """Counts of prompts first .. last."""
        return Counts(self.tokens[first:last], self.rounds[first:last])

    def interval(self) -> list[float]:
        """95 % bootstrap interval of tau over prompts."""
        return list(interval(self.tokens, self.rounds))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Exact expected values for one plan.

    Attributes:
        counts: tokens and expected rounds of each rollout.
        reached: (2, K + 1) expected rounds over all rollouts; see `kaplan_meier`. Row 0 accepts token j of
            the text, row 1 all tokens before it.
        keeps: for each rollout (starts, K), P(token i after a start is accepted | tokens before it are);
            0 where no round can start, unless every start was asked for; None if they were, and drafts
            depend on earlier rounds.
    """

    counts: Counts
    reached: np.ndarray
    keeps: list[np.ndarray] | None

    @property
    def survival(self) -> list[float]:
        """P(accepted >= j), j from 1; see `evaluation.estimates`."""
        return kaplan_meier(self.reached)


def why_inexact(plan: Plan, sampler: Sampler, drafter: Proposer | None = None) -> str:
    """Reason why acceptance depends on more than the rollout and cannot be replayed exactly; "" if it can."""
    stateful = drafter is not None and depends_on_rounds(drafter, plan)
    shared_depth = plan.adapt is not None and not (plan.proposal == "sampled" and not plan.rule.keeps_text)
    if drafter is not None and stateful and (shared_depth or drafter.traits.depends_on_batch):
        return "drafts depend on the other rows of the batch"
    if isinstance(drafter, Observes) and plan.depth:
        return "drafts depend on what the target answers to rejected tokens"
    if plan.lossy:
        return f"rule {plan.rule.name} does not keep the target's distribution"
    if not plan.depth or plan.proposal_temperature(sampler.temperature) is None:
        return ""
    if stateful:
        return "drafts depend on earlier rounds"
    if plan.drafts > 1:
        return f"{plan.drafts} drafts are drawn"
    if plan.rule.weighs_paths:
        return f"rule {plan.rule.name} weighs whole paths"
    if plan.proposal == "sampled":
        return "siblings are sampled" if plan.width > 1 else ""
    return "" if plan.tree else "the tree's shape depends on what was drawn"


@torch.inference_mode()
def replay(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plans: Sequence[Plan],
    sampler: Sampler,
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    read: Read | None = None,
    every_start: bool = False,
) -> list[ReplayResult]:
    """Expected rounds of every plan on every rollout, by a draft at every start that a round can have.

    Args:
        target: the model that generated the rollouts.
        drafter: the drafter to score.
        rollouts: from plain decoding with `sampler`.
        plans: plans for which `why_inexact` is empty.
        sampler: sampler of the rollouts.
        batch_size: rollouts per batch.
        progress: called with the number of rollouts done, summed over plans.
        read: reads the texts; default `target.read`.
        every_start: draft where no round can start, too, unless drafts depend on earlier rounds.
    """
    fixed = [plan for plan in plans if plan.depth and plan.proposal_temperature(sampler.temperature) is None]
    walked = [plan for plan in fixed if not every_start or depends_on_rounds(drafter, plan)]
    drawn = [plan for plan in plans if plan not in walked]
    progress = progress or (lambda _: None)
    every = _at_every_start(target, drafter, rollouts, drawn, sampler, batch_size, progress, read)
    keeps = dict(zip(drawn, every, strict=True))
    for plan in walked:
        keeps[plan] = walk(target, drafter, rollouts, plan, sampler, batch_size, read=read)
        progress(len(rollouts) * len(keeps))
    results = [_result(rollouts, keeps[plan], plan.depth) for plan in plans]
    if every_start:
        return [replace(r, keeps=None) if p in walked else r for r, p in zip(results, plans, strict=True)]
    return results


def _result(rollouts: Sequence[Rollout], keeps: list[np.ndarray], depth: int) -> ReplayResult:
    chains = [RoundStarts(keep, depth) for keep in keeps]
    counts = Counts([len(r.answer) - 1 for r in rollouts], [chain.count for chain in chains])
    return ReplayResult(counts, sum((c.reached for c in chains), np.zeros((2, depth + 1))), keeps)


def _at_every_start(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_size: int,
    progress: Callable[[int], None],
    read: Read | None,
) -> list[list[np.ndarray]]:
    """`ReplayResult.keeps` of each plan, by drafts at every start."""
    found = [[np.zeros((0, plan.depth))] * len(rollouts) for plan in plans]
    # Longest first, so that running rows always come first.
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].answer))
    for start in range(0, len(order) if plans else 0, batch_size):
        part = order[start : start + batch_size]
        keeps = _keeps(target, drafter, [rollouts[i] for i in part], plans, sampler, read)
        for n in range(len(plans)):
            for row, i in enumerate(part):
                found[n][i] = keeps[n][row, : len(rollouts[i].answer) - 1]
        progress((start + len(part)) * len(plans))
    return found


def _keeps(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plans: Sequence[Plan],
    sampler: Sampler,
    read: Read | None,
) -> list[np.ndarray]:
    """For each plan (B, starts, K): P(token i after a start is accepted | tokens before it are)."""
    longest = len(rollouts[0].answer)
    deepest = max((plan.depth for plan in plans), default=0)
    texts = TeacherForcedTexts(target, rollouts, deepest, read)
    token_probs = _token_probs(target, texts.output.last, rollouts, sampler, longest + deepest)
    keeps = [np.zeros((len(rollouts), max(longest - 1, 0), plan.depth)) for plan in plans]
    for place, rows, state in texts.starts(drafter):
        for n, plan in enumerate(plans):
            if not plan.depth:
                continue
            here = slice(None, rows), slice(place, place + plan.depth)
            ahead = texts.answers[here]
            draft = drafter.propose(state, target, sampler, ForcedTokens(ahead), plan)  # pyright: ignore[reportArgumentType]
            # A matched draw equals y with probability q(y): the same formula with p(y) replaced by 1.
            p = torch.ones_like(token_probs[here]) if plan.rule.keeps_text else token_probs[here]
            keeps[n][:rows, place - 1] = _keep_chances(draft, ahead, p)
    return keeps


def _token_probs(
    target: Target, last: Tensor, rollouts: Sequence[Rollout], sampler: Sampler, width: int
) -> Tensor:
    """(B, width) p(y) of each answer's tokens; 1 after the end, and everywhere at temperature 0."""
    wide = torch.promote_types(target.dtype, torch.float32)
    probs = torch.ones(len(rollouts), width, dtype=wide, device=target.device)
    if not sampler.temperature:
        return probs
    for row, (prompt, answer) in enumerate(rollouts):
        logits = target.head(last[row, len(prompt) - 1 : len(prompt) + len(answer) - 1])  # (n, V)
        check_logits(target, logits, prompt + answer, len(prompt), STORED)
        seen = None
        if sampler.needs_history:
            text = torch.tensor(prompt + answer, device=target.device)
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=target.device)
            for i in range(len(answer)):
                seen[i, text[: len(prompt) + i]] = True
        y = torch.tensor(answer, device=target.device)[:, None]
        probs[row, : len(answer)] = sampler.probs(logits, seen).gather(1, y)[:, 0]
    return probs


def _keep_chances(draft: Draft, ahead: Tensor, p: Tensor) -> np.ndarray:
    """(B, K) P(token of `ahead` is accepted | tokens before it are); 0 if no node can have the token.

    Args:
        draft: draft of one round.
        ahead: (B, K) tokens after the root, then `PAD`.
        p: (B, K) the target's probability of these tokens, or 1 if sampled nodes are matched.
    """
    if not draft.depth:  # no row has a draft
        return np.zeros(ahead.shape)
    rows = torch.arange(ahead.shape[0], device=ahead.device)
    slot, on_path = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    keeps = []
    for level in range(ahead.shape[1]):
        y = ahead[:, level]
        node = (draft.parents == slot[:, None] - 1) & (draft.tokens == y[:, None]) & (y != PAD)[:, None]
        keep = torch.ones_like(p[:, 0])
        if draft.probs is not None:
            drafted = draft.probs
            fixed = node & ~drafted.sampled  # (B, N) a fixed child with token y is always accepted
            node = torch.where(fixed.any(1, keepdim=True), fixed, node)
            q = drawn_from(drafted, slot, p.dtype).gather(1, y.clamp_min(0)[:, None])[:, 0]  # (B,) q(y)
            keep = torch.where(fixed.any(1), 1.0, (q / p[:, level]).clamp_max(1))
        on_path = on_path & node.any(1)
        keeps.append(keep * on_path)
        slot = node.int().argmax(1) + 1
    return torch.stack(keeps, 1).double().cpu().numpy() if keeps else np.zeros((len(rows), 0))


class RoundStarts:
    """Markov chain of round starts on one rollout.

    Args:
        keep: (starts, K) P(token t + j accepted | tokens before it are), for a draft after token t.
        depth: K.

    Attributes:
        begins: (starts,) P(a round starts at t).
        tokens: (starts,) expected tokens of these rounds, cut at the end.
        count: expected number of rounds.
        reached: (2, K + 1) expected rounds that accept token j of the text, and that accept all tokens before
            it; see `kaplan_meier`.
    """

    def __init__(self, keep: np.ndarray, depth: int) -> None:
        starts = len(keep)
        begins, self.tokens = np.zeros(starts + depth + 2), np.zeros(starts)
        begins[0] = 1.0
        self.reached = np.zeros((2, depth + 1))
        for t in range(starts):
            through = begins[t] * np.cumprod(np.concatenate([[1.0], keep[t]]))  # (K + 1,) accepts >= j
            ends = through - np.append(through[1:], 0.0)  # accepts exactly j
            begins[t + 1 : t + depth + 2] += ends  # the next round starts j + 1 tokens later
            self.tokens[t] = ends @ np.minimum(np.arange(1, depth + 2), starts - t)
            here = min(depth, starts - t) + 1  # later tokens do not exist
            self.reached[0, :here] += through[:here]
            self.reached[1, :here] += np.concatenate([through[:1], through[: here - 1]])
        self.begins = begins[:starts]
        self.count = float(self.begins.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """Rounds with a context, root included, of `low` to `high` - 1 tokens.

    Attributes:
        low: smallest context.
        high: largest context + 1.
        tokens: expected tokens of these rounds.
        rounds: expected number of rounds.
    """

    low: int
    high: int
    tokens: float
    rounds: float

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return self.tokens / self.rounds


def by_context(rollouts: Sequence[Rollout], keeps: Sequence[np.ndarray], depth: int) -> list[ContextPart]:
    """Replayed rounds grouped by context length, shortest first, without empty groups.

    Args:
        rollouts: replayed rollouts.
        keeps: for each rollout; see `ReplayResult`.
        depth: of the draft.
    """
    places, tokens, rounds = [], [], []
    for rollout, keep in zip(rollouts, keeps, strict=True):
        starts = RoundStarts(keep, depth)
        places.append(len(rollout.prompt) + 1 + np.arange(len(keep)))
        tokens.append(starts.tokens)
        rounds.append(starts.begins)
    place, token, begun = (np.concatenate(part or [np.zeros(0)]) for part in (places, tokens, rounds))
    part = np.maximum(0, np.ceil(np.log2((place + 1) / SHORTEST))).astype(int)
    parts = []
    for number in np.unique(part):
        here, high = part == number, SHORTEST << int(number)
        if begun[here].sum():
            sums = {"tokens": float(token[here].sum()), "rounds": float(begun[here].sum())}
            parts.append(ContextPart(low=high // 2 if number else 0, high=high, **sums))
    return parts


def agreement(decoder: Counts, replayed: Counts, confidence: float = CONFIDENCE) -> list[float]:
    """Confidence interval of the decoder's tau minus the replay's.

    Student's t over prompts for the linearised difference of both ratios; infinite for a single prompt.
    """
    n = len(decoder.tokens)
    parts = []
    for counts in (decoder, replayed):
        rounds = np.array(counts.rounds)
        parts.append((np.array(counts.tokens) - counts.tau * rounds) / max(rounds.mean(), 1e-300))
    difference = decoder.tau - replayed.tau
    if n < 2:
        return [-math.inf, math.inf]
    error = (parts[0] - parts[1]).std(ddof=1) / math.sqrt(n)
    # Expected rounds are sums of probabilities; without variation, rounding must not decide.
    half_width = float(stats.t.ppf((1 + confidence) / 2, n - 1) * error) + ROUND_OFF * decoder.tau
    return [difference - half_width, difference + half_width]
