"""Cost model of a decoding round, fitted to timings, and the throughput that it predicts for plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from decode.evaluation.estimates import DRAWS
from decode.evaluation.replay import Counts
from decode.plan import Plan

PLAIN = Plan()


class Costs(Protocol):
    """Round costs of a machine."""

    def round_seconds(self, plan: Plan, batch: int) -> float:
        """Seconds of one round with `batch` rows."""
        ...

    def idle_seconds(self, batch: int) -> float:
        """Seconds of one round in which the drafter drafts nothing."""
        ...


class RoundTiming(NamedTuple):
    """Times of one round, in seconds."""

    plan: Plan
    batch: int
    slots: int  # slots per row in the target's pass, including the root
    draft: float  # `propose` and `advance` of the drafter
    verify: float  # the target's pass, including its head
    other: float  # acceptance rule and loop
    passes: str = ""  # how the target's pass ran; see `Generation`


def typical(seconds: Sequence[float]) -> float:
    """Lower quartile; the median would jump whenever other programs slow the machine for a while."""
    return float(np.quantile(seconds, 0.25))


@dataclass(frozen=True)
class Curve:
    """Non-decreasing piecewise linear function, extrapolated with its last slope.

    Args:
        x: (n,) knots, ascending.
        y: (n,) values.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def fit(cls, points: Mapping[float, Sequence[float]]) -> Curve:
        """Isotonic regression of the typical value at each knot; decreases are treated as noise."""
        x = sorted(points)
        weights = [len(points[at]) for at in x]
        y = isotonic_regression([typical(points[at]) for at in x], weights=weights).x
        return cls(tuple(x), tuple(float(value) for value in y))

    def __call__(self, at: float) -> float:
        """Value at one point."""
        if at > self.x[-1] and len(self.x) > 1:
            (a, b), (low, high) = self.x[-2:], self.y[-2:]
            return high + (at - b) * (high - low) / (b - a)
        return float(np.interp(at, self.x, self.y))


@dataclass(frozen=True)
class _BatchCosts:
    """Cost curves at one batch size.

    Attributes:
        verify: slots -> seconds of the target's pass, for all plans.
        draft: `family` -> depth -> seconds of the drafter.
        other: `_kind` -> slots -> seconds of everything else.
        slots: plan -> number of slots -> share of rounds, for plans with varying size.
        absorb: seconds of the drafter in a round without a draft.
        passes: how the target's passes ran; see `Generation`.
    """

    verify: Curve
    draft: Mapping[tuple, Curve]
    other: Mapping[tuple, Curve]
    slots: Mapping[Plan, Mapping[int, float]]
    absorb: float
    passes: str

    def seconds(self, plan: Plan) -> float:
        if not plan.depth:
            return self.verify(1) + self.other[_kind(plan)](1)
        shares = self.slots.get(plan) or {plan.nodes + 1: 1.0}
        other = self.other[_kind(plan)]
        rest = sum(share * (self.verify(n) + other(n)) for n, share in shares.items())
        return self.draft[family(plan)](plan.depth) + rest


def family(plan: Plan) -> tuple:
    """Key of plans that differ only in size, so that the drafter's time is a function of depth."""
    proposal = (plan.proposal, plan.drafts, plan.draft_temperature, plan.min_confidence, plan.replacement)
    return plan.width, plan.tree, *proposal


def _kind(plan: Plan) -> tuple:
    """Key of plans with the same work in the loop and the acceptance rule."""
    return (plan.depth > 0, plan.has_siblings, plan.proposal, plan.rule.name) if plan.depth else (False,)


class MeasuredCosts:
    """Costs fitted to timed rounds.

    The target's pass is one curve over slots for all plans; the drafter is one curve over depth per family
    of plans. So timings of a few plans per family give the costs of all. Costs are interpolated linearly
    between batch sizes.

    Args:
        rounds: timings, including plain decoding, at every batch size.
    """

    def __init__(self, rounds: Iterable[RoundTiming]) -> None:
        sizes: dict[int, list[RoundTiming]] = defaultdict(list)
        for timing in rounds:
            sizes[timing.batch].append(timing)
        self.sizes = {batch: _fit(sizes[batch]) for batch in sorted(sizes)}

    def round_seconds(self, plan: Plan, batch: int) -> float:
        """Seconds of one round with `batch` rows, all drafting."""
        return self._between(batch, [one.seconds(plan) for one in self.sizes.values()])

    def idle_seconds(self, batch: int) -> float:
        """Seconds of one round in which the drafter drafts nothing."""
        seconds = [one.seconds(PLAIN) + one.absorb for one in self.sizes.values()]
        return self._between(batch, seconds)

    def _between(self, batch: int, seconds: list[float]) -> float:
        return Curve(tuple(self.sizes), tuple(seconds))(batch)

    def table(self, batch: int) -> dict[str, Any]:
        """Knots of the curves at a measured batch size, as a JSON object."""
        one = self.sizes[batch]
        drafts = [
            {"width": key[0], "proposal": key[2], "depth": list(curve.x), "seconds": list(curve.y)}
            for key, curve in one.draft.items()
        ]
        return {
            "batch_size": batch,
            "passes": one.passes,
            "verify": {"slots": list(one.verify.x), "seconds": list(one.verify.y)},
            "draft": drafts,
            "absorb": one.absorb,
        }


def _fit(rounds: Sequence[RoundTiming]) -> _BatchCosts:
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

    def curves(groups: Mapping[Any, Mapping[float, Sequence[float]]]) -> dict[Any, Curve]:
        return {key: Curve.fit(points) for key, points in groups.items()}

    shares = {
        plan: {n: count / sizes.total() for n, count in sizes.items()}
        for plan, sizes in shapes.items()
        if set(sizes) != {plan.nodes + 1}
    }
    passes = " and ".join(dict.fromkeys(one.passes for one in rounds))
    return _BatchCosts(curves(verify)[()], curves(draft), curves(other), shares, typical(absorb), passes)


def representative_plans(plans: Sequence[Plan]) -> list[Plan]:
    """Plans to time: smallest, middle and largest of every family, by depth and by nodes."""
    families: dict[tuple, list[Plan]] = defaultdict(list)
    for plan in plans:
        families[(*family(plan), _kind(plan))].append(plan)  # verification rules differ in time
    selected: dict[Plan, None] = {}
    for members in families.values():
        for size in (lambda p: (p.depth, p.nodes), lambda p: (p.nodes, p.depth)):
            ordered = sorted(members, key=size)
            selected |= dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]])
    return list(selected)


# -- throughput --------------------------------------------------------------------------------------


def batch_seconds(rounds: np.ndarray, price: np.ndarray) -> np.ndarray:
    """Seconds of batches in which finished rows leave and are not replaced.

    Args:
        rounds: (..., B) number of rounds of each row.
        price: (B,) seconds of a round with 1, 2, ... B rows.
    """
    ends = np.sort(rounds, -1)
    return np.diff(ends, axis=-1, prepend=0) @ price[::-1]


@dataclass(frozen=True)
class Throughput:
    """Predicted throughput of a plan at one batch size.

    Attributes:
        speed: tokens per second of the whole batch, without prefill; finished rows are not replaced.
        speedup: (value, low, high) over plain decoding; 95 % interval over prompts, or over batches for an
            adaptive plan, where one batch gives no width.
        full: tokens per second if finished rows are replaced, as in a server; None: unknown.
    """

    speed: float
    speedup: tuple[float, float, float]
    full: float | None


def throughputs(
    plans: Sequence[Plan], counts: Sequence[Counts], costs: Costs, batch: int
) -> list[Throughput]:
    """Throughput of every plan; the first plan must be plain decoding.

    Tokens per second are all tokens over the seconds of all batches. A batch runs until its last row is
    finished, and each round costs as much as its running rows. Batches are consecutive prompts, repeated to
    fill the last batch. Rounds are expected values, so with sampling the rounds of the last row are slightly
    underestimated, equally for all plans. At batch size 1 the result is tau (tokens per round) / seconds.

    Args:
        plans: candidates.
        counts: of each plan's tokens and rounds on the same prompts; plain decoding has one round per token.
        costs: round costs of the machine.
        batch: rows decoded together.
    """
    prices = [np.array([costs.round_seconds(plan, b) for b in range(1, batch + 1)]) for plan in plans]
    n = len(counts[0].tokens)
    draws = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    plain, *others = (
        [_speed(one, price, index) for index in (np.arange(n)[None], draws)]
        for one, price in zip(counts, prices, strict=True)
    )
    results = []
    for plan_counts, price, (speed, resampled) in zip(counts, prices, [plain, *others], strict=True):
        low, high = np.quantile(resampled / plain[1], (0.025, 0.975))
        full = batch * plan_counts.tau / price[-1]
        speedup = float(speed[0] / plain[0][0]), float(low), float(high)
        results.append(Throughput(float(speed[0]), speedup, full))
    return results


def _speed(counts: Counts, price: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """(D,) tokens per second on D resamples of prompts, given as (D, N) indices."""
    batch, n = len(price), prompts.shape[1]
    rows = -(-n // batch) * batch
    index = prompts[:, np.arange(rows) % n]
    tokens, rounds = np.asarray(counts.tokens, float), np.asarray(counts.rounds, float)
    seconds = batch_seconds(rounds[index].reshape(len(prompts), -1, batch), price).sum(1)
    return tokens[index].sum(1) / seconds


def fastest(speeds: ArrayLike) -> int:
    """Index of the highest speed; the first if equal, so plain decoding and small drafts are preferred."""
    return int(np.argmax(speeds))
