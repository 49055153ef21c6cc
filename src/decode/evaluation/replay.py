"""Exact acceptance, without a coin: what a decoder would do on a stored rollout of the target.

Given that the decoder emits token y, it came from the draft with probability 1 if y is a fixed
child, and if a child is drawn from q with min(1, q(y) / p(y)), or q(y) where it is matched; so the
places where rounds begin on a rollout y ~ p form a Markov chain whose steps are known, and tau is a
sum over it (docs/lossless.md). The rollout must have been drawn from the very law p that is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from decode.draft import PAD, Draft
from decode.evaluation.bootstrap import interval
from decode.evaluation.stateful_replay import walk
from decode.evaluation.teacher_forced import Dictate, Rollout, Texts
from decode.generation.types import Proposer, depends_on_rounds
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler

CONFIDENCE = 0.99  # of the interval in which replay and decoder have to agree
ROUND_OFF = 1e-12  # relative, of tau in float64


class Counts(NamedTuple):
    """Tokens and verification rounds of each prompt; tau is the ratio of their sums."""

    tokens: list[int]  # past the first, which the prefill gives
    rounds: list[float]

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return sum(self.tokens) / sum(self.rounds) if sum(self.rounds) else 0.0

    def part(self, first: int, last: int | None = None) -> Counts:
        """Of some of the prompts."""
        return Counts(self.tokens[first:last], self.rounds[first:last])

    def interval(self) -> list[float]:
        """95 % bootstrap interval of tau over prompts."""
        return list(interval(self.tokens, self.rounds))


@dataclass(frozen=True, slots=True)
class Replayed:
    """Exact expectations for one plan.

    Attributes:
        counts: tokens and expected rounds of each rollout.
        reached: (2, K + 1) over all rollouts, rounds that no end cuts: those that keep at least j
            tokens, and all of them.
        keeps: of each rollout (starts, K) chances that token i past a start is kept if those before
            are; of drafts that remember earlier rounds None.
    """

    counts: Counts
    reached: np.ndarray
    keeps: list[np.ndarray] | None = None

    @property
    def survival(self) -> list[float]:
        """P(accepted >= j), j from 1."""
        return [float(x) for x in self.reached[0, 1:] / max(self.reached[1, 0], 1e-300)]


def inexact(plan: Plan, sampler: Sampler, drafter: Proposer | None = None) -> str:
    """Why a plan's acceptance is not a function of the rollout alone; empty if it is."""
    memory = drafter is not None and depends_on_rounds(drafter, plan)
    together = plan.adapt is not None and not (plan.proposal == "sampled" and plan.rule != "match")
    if memory and (together or getattr(drafter, "depends_on_batch", False)):
        return "drafts depend on the rows beside them"
    if plan.lossy:
        return f"rule {plan.rule} does not keep the target's law"
    if not plan.depth or plan.proposal_temperature(sampler.temperature) is None:
        return ""
    if memory:
        return "drafts depend on earlier rounds"
    if plan.drafts > 1:
        return f"{plan.drafts} drafts are drawn"
    if plan.rule in ("block", "traversal"):
        return f"rule {plan.rule} weighs whole paths"
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
) -> list[Replayed]:
    """Expected rounds of every plan on every rollout: one pass of the target, a draft at every start.

    Args:
        target: that wrote the rollouts.
        drafter: what is scored; of one that remembers earlier rounds, these are walked through.
        rollouts: drawn by plain decoding with `sampler`.
        plans: each with an empty `inexact`.
        sampler: the law.
        batch_size: rollouts side by side.
        progress: called with the rollouts done.
    """
    if walked := [plan for plan in plans if depends_on_rounds(drafter, plan)]:
        others = [plan for plan in plans if plan not in walked]
        plain = replay(target, drafter, rollouts, others, sampler, batch_size=batch_size) if others else []
        steps = _walked(target, drafter, rollouts, walked, sampler, batch_size)
        found = dict(zip([*others, *walked], [*plain, *steps], strict=True))
        if progress:
            progress(len(rollouts))
        return [found[plan] for plan in plans]
    forwards = [[0.0] * len(rollouts) for _ in plans]
    reached = [np.zeros((2, plan.depth + 1)) for plan in plans]
    kept = [[np.zeros((0, plan.depth))] * len(rollouts) for plan in plans]
    # Longest first, so that those still running are always the first of a batch.
    order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].answer))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        keeps = _keeps(target, drafter, [rollouts[i] for i in part], plans, sampler)
        for n, plan in enumerate(plans):
            for row, i in enumerate(part):
                kept[n][i] = keeps[n][row, : len(rollouts[i].answer) - 1]
                rounds = _Rounds(kept[n][i], plan.depth)
                forwards[n][i] = rounds.count
                reached[n] += rounds.reached
        if progress:
            progress(start + len(part))
    tokens = [len(r.answer) - 1 for r in rollouts]
    found = zip(forwards, reached, kept, strict=True)
    return [Replayed(Counts(tokens, f), r, k) for f, r, k in found]


def _walked(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_size: int,
) -> list[Replayed]:
    """`replay` of drafts with a memory."""
    tokens, found = [len(r.answer) - 1 for r in rollouts], []
    for plan in plans:
        rounds, reached = walk(target, drafter, rollouts, plan, sampler, batch_size)
        found.append(Replayed(Counts(tokens, [float(r) for r in rounds]), reached))
    return found


def _keeps(
    target: Target, drafter: Proposer, rollouts: Sequence[Rollout], plans: Sequence[Plan], sampler: Sampler
) -> list[np.ndarray]:
    """(B, starts, K) of each plan: chance that y's token i past a start is kept if those before are."""
    longest = len(rollouts[0].answer)
    deepest = max((plan.depth for plan in plans), default=0)
    texts = Texts(target, rollouts, deepest)
    masses = _masses(target, texts.read.last, rollouts, sampler, longest + deepest)
    keeps = [np.zeros((len(rollouts), max(longest - 1, 0), plan.depth)) for plan in plans]
    for place, rows, state in texts.starts(drafter):
        for n, plan in enumerate(plans):
            if not plan.depth:
                continue
            here = slice(None, rows), slice(place, place + plan.depth)
            ahead = texts.answers[here]
            draft = drafter.propose(state, target, sampler, Dictate(ahead), plan)  # pyright: ignore[reportArgumentType]
            mass = torch.ones_like(masses[here]) if plan.rule == "match" else masses[here]
            keeps[n][:rows, place - 1] = _kept(draft, ahead, mass)
    return keeps


def _masses(
    target: Target, last: Tensor, rollouts: Sequence[Rollout], sampler: Sampler, width: int
) -> Tensor:
    """(B, width) p(y) of each answer's tokens; 1 past the end, and everywhere at temperature 0."""
    wide = torch.promote_types(target.dtype, torch.float32)
    masses = torch.ones(len(rollouts), width, dtype=wide, device=target.device)
    if not sampler.temperature:
        return masses
    for row, (prompt, answer) in enumerate(rollouts):
        rows = target.head(last[row, len(prompt) - 1 : len(prompt) + len(answer) - 1])  # (n, V)
        seen = None
        if sampler.needs_history:
            text = torch.tensor(prompt + answer, device=target.device)
            seen = torch.zeros(rows.shape, dtype=torch.bool, device=target.device)
            for i in range(len(answer)):
                seen[i, text[: len(prompt) + i]] = True
        y = torch.tensor(answer, device=target.device)[:, None]
        masses[row, : len(answer)] = sampler.probs(rows, seen).gather(1, y)[:, 0]
    return masses


def _kept(draft: Draft, ahead: Tensor, mass: Tensor) -> np.ndarray:
    """(B, K) chance that each token of `ahead` is kept if those before are; 0 where there is no node.

    `mass` (B, K) is what a drawn node's law is held against: p(y), or 1 where it is matched, as it
    then is y with chance q(y).
    """
    if not draft.depth:  # no row was offered anything
        return np.zeros(ahead.shape)
    rows = torch.arange(ahead.shape[0], device=ahead.device)
    slot, alive = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    keeps = []
    for level in range(ahead.shape[1]):
        y = ahead[:, level]
        node = (draft.parents == slot[:, None] - 1) & (draft.tokens == y[:, None]) & (y != PAD)[:, None]
        keep = torch.ones_like(mass[:, 0])
        if draft.probs is not None:
            laws = draft.probs
            chosen = node & ~laws.sampled
            node = torch.where(chosen.any(1, keepdim=True), chosen, node)
            owner = (laws.owner == slot[:, None]).int().argmax(1)
            q = laws.q[rows, owner, y.clamp_min(0)].to(mass.dtype)
            keep = torch.where(chosen.any(1), 1.0, (q / mass[:, level]).clamp_max(1))
        alive = alive & node.any(1)
        keeps.append(keep * alive)
        slot = node.int().argmax(1) + 1
    return torch.stack(keeps, 1).double().cpu().numpy() if keeps else np.zeros((len(rows), 0))


class _Rounds:
    """The chain of starts on one rollout.

    Args:
        keep: (starts, K) chances; start t drafts below token t and may keep tokens t + 1, t + 2, ...
        depth: K.

    Attributes:
        count: expected rounds.
        reached: (2, K + 1) expected rounds that keep at least j tokens, and rounds, that no end cuts.
    """

    def __init__(self, keep: np.ndarray, depth: int) -> None:
        starts = len(keep)
        begins = np.zeros(starts + depth + 2)
        begins[0] = 1.0
        self.reached = np.zeros((2, depth + 1))
        for t in range(starts):
            through = begins[t] * np.cumprod(np.concatenate([[1.0], keep[t]]))  # (K + 1,) keeps >= j
            ends = through - np.append(through[1:], 0.0)  # keeps exactly j
            begins[t + 1 : t + depth + 2] += ends
            whole = ends[: starts - t]  # a round that keeps all that is left is cut
            self.reached[0, : len(whole)] += whole[::-1].cumsum()[::-1]
            self.reached[1] += whole.sum()
        self.count = float(begins[:starts].sum())


def agreement(decoder: Counts, replayed: Counts) -> list[float]:
    """Interval of the difference of the taus of the same prompts, at `CONFIDENCE`.

    Student's, over prompts, of the ratios' linearised difference; infinite for a single prompt.
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
    # Expected rounds are sums of probabilities: where nothing varies, their last bits must not decide.
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * error) + ROUND_OFF * decoder.tau
    return [difference - reach, difference + reach]
