"""What a round costs by what was measured, and what plans are worth by it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from decode.evaluation.bootstrap import DRAWS
from decode.evaluation.replay import Counts
from decode.plan import Plan

PLAIN = Plan()


class Costs(Protocol):
    """All that a choice has to know of a machine."""

    def round_seconds(self, plan: Plan, batch: int) -> float:
        """Of one round of so many rows."""
        ...

    def idle_seconds(self, batch: int) -> float:
        """Of one in which a drafter is there and drafts nothing."""
        ...


class Timed(NamedTuple):
    """One round on the clock, in seconds."""

    plan: Plan
    batch: int
    slots: int  # tokens a row that the target read, the root included
    draft: float  # proposing, and absorbing what was settled
    verify: float  # the target's pass, its head included
    other: float  # the rule and the loop


def typical(seconds: Sequence[float]) -> float:
    """Their lower quartile. What others do on a machine only ever adds, for a while at a time: where it is
    there for half of the rounds a median is now the one speed, now the other."""
    return float(np.quantile(seconds, 0.25))


@dataclass(frozen=True)
class Curve:
    """Non-decreasing and linear between knots; beyond the last it goes on as between the last two.

    Args:
        x: (n,) ascending.
        y: (n,) values.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def fit(cls, points: Mapping[float, Sequence[float]]) -> Curve:
        """Through what was measured; where that falls, which is noise, neighbours are pooled."""
        x = sorted(points)
        weights = [len(points[at]) for at in x]
        y = isotonic_regression([typical(points[at]) for at in x], weights=weights).x
        return cls(tuple(x), tuple(float(value) for value in y))

    def __call__(self, at: float) -> float:
        """Value at one place."""
        if at > self.x[-1] and len(self.x) > 1:
            (a, b), (low, high) = self.x[-2:], self.y[-2:]
            return high + (at - b) * (high - low) / (b - a)
        return float(np.interp(at, self.x, self.y))


@dataclass(frozen=True)
class _Sized:
    """Curves at one batch size.

    Attributes:
        verify: slots -> seconds of the target's pass, from all plans together.
        draft: a family of plans -> depth -> seconds of the drafter.
        other: kind of plan -> slots -> seconds.
        slots: plan -> share of its rounds that had so many slots, where these vary.
        absorb: seconds of the drafter in a round that drafts nothing.
    """

    verify: Curve
    draft: Mapping[tuple, Curve]
    other: Mapping[tuple, Curve]
    slots: Mapping[Plan, Mapping[int, float]]
    absorb: float

    def seconds(self, plan: Plan) -> float:
        if not plan.depth:
            return self.verify(1) + self.other[_kind(plan)](1)
        shares = self.slots.get(plan) or {plan.nodes + 1: 1.0}
        other = self.other[_kind(plan)]
        read = sum(share * (self.verify(n) + other(n)) for n, share in shares.items())
        return self.draft[family(plan)](plan.depth) + read


def family(plan: Plan) -> tuple:
    """Plans that differ in nothing but size: the drafter's time is one function of their depth."""
    drawn = (plan.proposal, plan.drafts, plan.draft_temperature, plan.min_confidence, plan.replacement)
    return plan.width, plan.tree, *drawn


def _kind(plan: Plan) -> tuple:
    """Plans whose rounds the loop and the rule go through alike."""
    return (plan.depth > 0, plan.has_siblings, plan.proposal, plan.rule) if plan.depth else (False,)


class Measured:
    """Costs from rounds on the clock.

    What the target's pass over n slots costs is one curve for all plans; the drafter's time is a
    curve over the depth for every family of plans. So a few plans of each family give the costs of
    all; between batch sizes costs are taken in proportion.

    Args:
        rounds: with plain ones, at every batch size.
    """

    def __init__(self, rounds: Iterable[Timed]) -> None:
        sizes: dict[int, list[Timed]] = defaultdict(list)
        for one in rounds:
            sizes[one.batch].append(one)
        self.sizes = {batch: _fit(sizes[batch]) for batch in sorted(sizes)}

    def round_seconds(self, plan: Plan, batch: int) -> float:
        """Of one round of so many rows, all of them drafting."""
        return self._between(batch, [one.seconds(plan) for one in self.sizes.values()])

    def idle_seconds(self, batch: int) -> float:
        """Of a round in which a drafter is there and drafts nothing."""
        found = [one.seconds(PLAIN) + one.absorb for one in self.sizes.values()]
        return self._between(batch, found)

    def _between(self, batch: int, seconds: list[float]) -> float:
        return Curve(tuple(self.sizes), tuple(seconds))(batch)

    def table(self, batch: int) -> dict[str, Any]:
        """The knots at a batch size that was measured, for people."""
        one = self.sizes[batch]
        drafts = [
            {"width": key[0], "proposal": key[2], "depth": list(curve.x), "seconds": list(curve.y)}
            for key, curve in one.draft.items()
        ]
        return {
            "batch_size": batch,
            "verify": {"slots": list(one.verify.x), "seconds": list(one.verify.y)},
            "draft": drafts,
            "absorb": one.absorb,
        }


def _fit(rounds: Sequence[Timed]) -> _Sized:
    verify, draft, other = (defaultdict(lambda: defaultdict(list)) for _ in range(3))
    shapes: dict[Plan, Counter[int]] = defaultdict(Counter)
    absorb = []
    for one in rounds:
        verify[()][one.slots].append(one.verify)
        other[_kind(one.plan)][one.slots].append(one.other)
        shapes[one.plan][one.slots] += 1
        if one.plan.depth:
            draft[family(one.plan)][one.plan.depth].append(one.draft)
        else:
            absorb.append(one.draft)

    def curves(found: Mapping[Any, Mapping[float, Sequence[float]]]) -> dict[Any, Curve]:
        return {key: Curve.fit(points) for key, points in found.items()}

    shares = {
        plan: {n: count / seen.total() for n, count in seen.items()}
        for plan, seen in shapes.items()
        if set(seen) != {plan.nodes + 1}
    }
    return _Sized(curves(verify)[()], curves(draft), curves(other), shares, typical(absorb))


def spanning(plans: Sequence[Plan]) -> list[Plan]:
    """Plans whose rounds tell those of all: of every family the ends and the middle, in depth and nodes."""
    families: dict[tuple, list[Plan]] = defaultdict(list)
    for plan in plans:
        families[(*family(plan), _kind(plan))].append(plan)  # a rule takes time of its own
    chosen: dict[Plan, None] = {}
    for members in families.values():
        for size in (lambda p: (p.depth, p.nodes), lambda p: (p.nodes, p.depth)):
            ordered = sorted(members, key=size)
            chosen |= dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]])
    return list(chosen)


# -- what a plan is worth ----------------------------------------------------------------------------


def batch_seconds(rounds: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Seconds of batches whose rows leave as they end, and are not replaced.

    Args:
        rounds: (..., B) of each row.
        price: (B,) seconds of a round with 1, 2, ... B rows.
    """
    ends = np.sort(rounds, -1)
    return np.diff(ends, axis=-1, prepend=0) @ price[::-1]


@dataclass(frozen=True)
class Worth:
    """What a plan is predicted to do at one batch size.

    Attributes:
        speed: tokens a second of the whole batch, rows leaving as they end; past the prefill.
        speedup: over plain decoding, and its 95 % interval over prompts; of an adaptive plan over batches,
            so of a single batch it has no width.
        full: tokens a second where rows that end are replaced, as a server does; None: not known.
    """

    speed: float
    speedup: tuple[float, float, float]
    full: float | None


def worth(plans: Sequence[Plan], counts: Sequence[Counts], costs: Costs, batch: int) -> list[Worth]:
    """Of every plan, the first being plain.

    Tokens a second are sums over sums: all tokens, by the seconds of all batches. A batch takes as
    many rounds as its last row, each at the cost of the rows still there; its prompts are those that
    stand side by side, and few prompts are taken again to fill it. Rounds are expected ones, so where
    tokens are drawn the last row's are a little too few, for all plans alike. At batch 1 it is
    tau / round_seconds.

    Args:
        plans: candidates.
        counts: of each, by replay on the same prompts; of the plain plan a round a token.
        costs: of the machine.
        batch: rows decoded together.
    """
    prices = [np.array([costs.round_seconds(plan, b) for b in range(1, batch + 1)]) for plan in plans]
    n = len(counts[0].tokens)
    draws = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    first, *every = (
        [_speed(one, price, index) for index in (np.arange(n)[None], draws)]
        for one, price in zip(counts, prices, strict=True)
    )
    found = []
    for plan_counts, price, (speed, drawn) in zip(counts, prices, [first, *every], strict=True):
        low, high = np.quantile(drawn / first[1], (0.025, 0.975))
        full = batch * plan_counts.tau / price[-1]
        found.append(Worth(float(speed[0]), (float(speed[0] / first[0][0]), float(low), float(high)), full))
    return found


def _speed(counts: Counts, price: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """(D,) tokens a second on (D, N) choices of prompts."""
    batch, n = len(price), prompts.shape[1]
    rows = -(-n // batch) * batch
    chosen = prompts[:, np.arange(rows) % n]
    tokens, rounds = np.asarray(counts.tokens, float), np.asarray(counts.rounds, float)
    seconds = batch_seconds(rounds[chosen].reshape(len(prompts), -1, batch), price).sum(1)
    return tokens[chosen].sum(1) / seconds


def fastest(speeds: ArrayLike) -> int:
    """Of equals the first, so that plain decoding and small drafts come before others."""
    return int(np.argmax(speeds))
