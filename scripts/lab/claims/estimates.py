"""Means and differences of tau with 95 % intervals, whose unit is seeds where there are several.

One seed shows only how prompts differ. Another seed gives another drafter, so the interval of a single seed
also has the noise of seeds: the standard deviation of tau over the seeds of all lines that have several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, variance

from scipy import stats

from claims.cards import Line, common_seeds
from distill.scoring.paired import tau_difference


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        value: the number.
        low, high: ends of the interval.
        unit: what the interval is over: seeds, prompts, or prompts and the noise of a seed.
    """

    value: float
    low: float
    high: float
    unit: str

    def __format__(self, form: str) -> str:
        low, high = format(self.low, form), format(self.high, form)
        return f"{format(self.value, form)} ({low}..{high})"


@dataclass(frozen=True, kw_only=True)
class SeedNoise:
    """Noise of tau over seeds, pooled over lines.

    Attributes:
        deviation: standard deviation of one seed's tau.
        freedom: degrees of freedom.
    """

    deviation: float
    freedom: int

    def width(self, seeds: int) -> float:
        """Half of the 95 % interval of a sum or difference of so many seeds' taus."""
        return float(stats.t.ppf(0.975, self.freedom)) * self.deviation * math.sqrt(seeds)


def seed_noise(lines: Iterable[Line], temperature: float) -> SeedNoise | None:
    """Noise of tau over the seeds of trained lines, by their first plans; None where all have one seed."""
    total, freedom = 0.0, 0
    for line in lines:
        rows = [result.row(temperature) for result in line.results]
        taus = [row.acceptance.tau for row in rows if row]
        if line.trained and len(taus) > 1:
            total += variance(taus) * (len(taus) - 1)
            freedom += len(taus) - 1
    return SeedNoise(deviation=math.sqrt(total / freedom), freedom=freedom) if freedom else None


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of at least two values, with Student's interval."""
    value = mean(values)
    wide = float(stats.t.ppf(0.975, len(values) - 1)) * math.sqrt(variance(values) / len(values))
    return Estimate(value=value, low=value - wide, high=value + wide, unit=f"{len(values)} seeds")


def tau(line: Line, temperature: float, plan: str = "") -> Estimate | None:
    """Mean tau of a line; of one seed with the interval over prompts. None where it was not scored."""
    parts = [row.acceptance for result in line.results if (row := result.row(temperature, plan))]
    if not parts:
        return None
    if len(parts) > 1:
        return mean_over_seeds([part.tau for part in parts])
    low, high = parts[0].tau_interval
    return Estimate(value=parts[0].tau, low=low, high=high, unit="prompts")


def difference(
    line: Line, other: Line, temperature: float, noise: SeedNoise | None, plan: str = ""
) -> Estimate | None:
    """Tau of a line minus another's.

    Two or more seeds that are in both: paired by seed, Student's interval. Else paired by prompt, one seed of
    each, with the bootstrap's interval; `noise` widens it for each of the two that is trained.

    Args:
        line: the first.
        other: the second.
        temperature: of the sampler.
        noise: of seeds; None: unknown, so that trained lines of one seed are not compared.
        plan: of both; "": their first.

    Returns:
        None where they cannot be paired: no common seed, other answers, too few prompts, or no noise known.
    """
    both = [[one.row(temperature, plan) for one in each.results] for each in common_seeds(line, other)]
    pairs = [(mine, theirs) for mine, theirs in zip(*both, strict=True) if mine and theirs]
    if len(pairs) > 1:
        return mean_over_seeds([mine.acceptance.tau - theirs.acceptance.tau for mine, theirs in pairs])
    if not pairs:
        return None
    first, second = pairs[0]
    paired = tau_difference(first, second)
    if paired is None or paired.interval is None:
        return None
    value, unit = paired.value, f"{len(first.counts.tokens)} prompts"
    trained = line.trained + other.trained
    if not trained:
        return Estimate(value=value, low=paired.interval[0], high=paired.interval[1], unit=unit)
    if noise is None:
        return None
    low, high = (math.hypot(value - end, noise.width(trained)) for end in paired.interval)
    return Estimate(value=value, low=value - low, high=value + high, unit=f"{unit}, one seed")
