"""Simulate a `DepthPolicy` on stored answers, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from decode.depth_policy import DepthPolicy
from decode.plan import Plan
from decode.planning.cost_model import PLAIN, Costs


class Simulation(NamedTuple):
    """Result of a simulation; arrays have one entry per batch.

    Attributes:
        tokens: emitted by the rows, without the first of each.
        seconds: seconds of adaptive decoding.
        plain: seconds of plain decoding.
        rounds: number of rounds, summed over rows.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    plain: np.ndarray
    rounds: int


def fit_policy(plan: Plan, keeps: Sequence[np.ndarray], costs: Costs, batch: int) -> DepthPolicy:
    """Fit a policy: mean acceptance as the prior, and costs of all depths for batch sizes up to `batch`."""
    accept = np.concatenate([keep for keep in keeps if len(keep)])
    tried = np.cumprod(np.concatenate([np.ones((len(accept), 1)), accept[:, :-1]], 1), 1)
    prior = float((tried * accept).sum() / max(tried.sum(), 1e-300))
    sizes = sorted({1, batch, *(2**i for i in range(batch.bit_length()) if 2**i <= batch)})
    curves = []
    for size in sizes:
        plain = costs.round_seconds(PLAIN, size)
        chains = [costs.round_seconds(with_depth(plan, k), size) for k in range(1, plan.depth + 1)]
        curves.append((size, tuple(round(c / plain, 3) for c in (costs.idle_seconds(size), *chains))))
    return DepthPolicy(round(prior, 3), tuple(curves))


def with_depth(plan: Plan, depth: int) -> Plan:
    """The same chain with another draft length."""
    return replace(plan, depth=depth, nodes=0, adapt=None)


def simulate(plan: Plan, keeps: Sequence[np.ndarray], costs: Costs, batch: int) -> Simulation:
    """Simulate the rounds of an adaptive chain, batch by batch; finished rows are removed.

    For fixed chains the number of accepted tokens does not depend on the draft length, so this equals the
    decoder's result; for sampled chains it is one random draw.

    Args:
        plan: plan with `adapt`.
        keeps: for each answer (starts, K); see `replay.ReplayResult`.
        costs: round costs of the machine.
        batch: rows decoded together; answers are repeated to fill the last batch.
    """
    assert plan.adapt is not None
    dice = np.random.default_rng(0)
    price = _Prices(plan, costs)
    rows = -(-len(keeps) // batch) * batch
    order = [keeps[i % len(keeps)] for i in range(rows)]
    results, rounds = [], 0
    for first in range(0, rows, batch):
        part = [keep for keep in order[first : first + batch] if len(keep)]
        accept = [keep if plan.proposal == "fixed" else dice.random(keep.shape) < keep for keep in part]
        accepted_at = [
            np.cumprod(keep >= 0.5, 1).sum(1) for keep in accept
        ]  # (starts,) tokens accepted, per row
        lengths = np.array([len(one) for one in accepted_at])
        place, counts, seconds = (
            np.zeros(len(accepted_at), int),
            plan.adapt.initial_counts(len(accepted_at)),
            0.0,
        )
        running = np.arange(len(accepted_at))
        while len(running):
            depths = plan.adapt.depths(counts, plan.proposal != "fixed" and not plan.rule.keeps_text)
            seconds += price(max(depths), len(running))
            rounds += len(running)
            accepted = [min(int(accepted_at[r][place[r]]), k) for r, k in zip(running, depths, strict=True)]
            counts = plan.adapt.update(counts, accepted, depths)
            place[running] += np.array(accepted) + 1
            unfinished = place[running] < lengths[running]
            running, counts = running[unfinished], counts[:, unfinished]
        ends = np.sort(lengths)
        plain_price = [price.plain(b) for b in range(len(part), 0, -1)]
        plain = float((np.diff(ends, prepend=0) * plain_price).sum())
        results.append((int(lengths.sum()), seconds, plain))
    tokens, seconds, plain = (np.array(column) for column in zip(*results, strict=True))
    return Simulation(tokens, seconds, plain, rounds)


class _Prices:
    """Cached round costs."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.cache: dict[tuple[int, int], float] = {}

    def __call__(self, depth: int, batch: int) -> float:
        if (depth, batch) not in self.cache:
            seconds = self.costs.round_seconds(with_depth(self.plan, depth), batch) if depth else None
            self.cache[depth, batch] = self.costs.idle_seconds(batch) if seconds is None else seconds
        return self.cache[depth, batch]

    def plain(self, batch: int) -> float:
        if (-1, batch) not in self.cache:
            self.cache[-1, batch] = self.costs.round_seconds(PLAIN, batch)
        return self.cache[-1, batch]
