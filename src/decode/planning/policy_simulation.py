"""Adaptive chains on stored answers: what a `DepthPolicy` would have done, on the host alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from decode.depth_policy import DepthPolicy
from decode.plan import Plan
from decode.planning.cost_model import PLAIN, Costs


class Played(NamedTuple):
    """Of every batch.

    Attributes:
        tokens: that its rows emit, past the first of each.
        seconds: that it takes.
        plain: seconds of plain decoding.
        rounds: of its rows, together.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    plain: np.ndarray
    rounds: int


def pace_of(plan: Plan, keeps: Sequence[np.ndarray], costs: Costs, batch: int) -> DepthPolicy:
    """The policy at which a chain adapts: mean acceptance, and the costs of all depths up to a batch size."""
    chances = np.concatenate([keep for keep in keeps if len(keep)])
    tried = np.cumprod(np.concatenate([np.ones((len(chances), 1)), chances[:, :-1]], 1), 1)
    prior = float((tried * chances).sum() / max(tried.sum(), 1e-300))
    sizes = sorted({1, batch, *(2**i for i in range(batch.bit_length()) if 2**i <= batch)})
    curves = []
    for size in sizes:
        plain = costs.round_seconds(PLAIN, size)
        chains = [costs.round_seconds(shortened(plan, k), size) for k in range(1, plan.depth + 1)]
        curves.append((size, tuple(round(c / plain, 3) for c in (costs.idle_seconds(size), *chains))))
    return DepthPolicy(round(prior, 3), tuple(curves))


def shortened(plan: Plan, depth: int) -> Plan:
    """The same chain with fewer tokens."""
    return replace(plan, depth=depth, nodes=0, adapt=None)


def rehearse(plan: Plan, keeps: Sequence[np.ndarray], costs: Costs, batch: int) -> Played:
    """Play the rounds of an adaptive chain, batch by batch, rows leaving as they end.

    How long a chosen chain would have been kept at a place does not depend on how deep it was grown, so
    this is what the decoder does; of drawn ones it is one draw of what it may do.

    Args:
        plan: with its `adapt`.
        keeps: of each answer (starts, K), see `replay.Replayed`.
        costs: of the machine.
        batch: rows decoded together; few answers are taken again to fill it.
    """
    assert plan.adapt is not None
    dice = np.random.default_rng(0)
    price = _Prices(plan, costs)
    rows = -(-len(keeps) // batch) * batch
    order = [keeps[i % len(keeps)] for i in range(rows)]
    found, rounds = [], 0
    for first in range(0, rows, batch):
        part = [keep for keep in order[first : first + batch] if len(keep)]
        chance = [keep if plan.proposal == "fixed" else dice.random(keep.shape) < keep for keep in part]
        kept = [np.cumprod(keep >= 0.5, 1).sum(1) for keep in chance]  # (starts,) of each row
        lengths = np.array([len(one) for one in kept])
        place, counts, seconds = np.zeros(len(kept), int), plan.adapt.initial_counts(len(kept)), 0.0
        running = np.arange(len(kept))
        while len(running):
            depths = plan.adapt.depths(counts, plan.proposal != "fixed" and plan.rule != "match")
            seconds += price(max(depths), len(running))
            rounds += len(running)
            accepted = [min(int(kept[r][place[r]]), k) for r, k in zip(running, depths, strict=True)]
            counts = plan.adapt.update(counts, accepted, depths)
            place[running] += np.array(accepted) + 1
            on = place[running] < lengths[running]
            running, counts = running[on], counts[:, on]
        ends = np.sort(lengths)
        each = [price.plain(b) for b in range(len(part), 0, -1)]
        plain = float((np.diff(ends, prepend=0) * each).sum())
        found.append((int(lengths.sum()), seconds, plain))
    tokens, seconds, plain = (np.array(column) for column in zip(*found, strict=True))
    return Played(tokens, seconds, plain, rounds)


class _Prices:
    """Costs, each asked for once."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.known: dict[tuple[int, int], float] = {}

    def __call__(self, depth: int, batch: int) -> float:
        if (depth, batch) not in self.known:
            one = self.costs.round_seconds(shortened(self.plan, depth), batch) if depth else None
            self.known[depth, batch] = self.costs.idle_seconds(batch) if one is None else one
        return self.known[depth, batch]

    def plain(self, batch: int) -> float:
        if (-1, batch) not in self.known:
            self.known[-1, batch] = self.costs.round_seconds(PLAIN, batch)
        return self.known[-1, batch]
