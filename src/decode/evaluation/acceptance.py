"""Acceptance of plans on stored rollouts: exact by replay if possible, otherwise estimated by decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.evaluation.estimates import decoded_counts, kaplan_meier
from decode.evaluation.replay import Counts, Rollout, replay, why_inexact
from decode.evaluation.teacher_forced import Read
from decode.generation.generate import generate
from decode.generation.types import Output, Proposer, ReadsTaps
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of one plan on stored rollouts of the target.

    Attributes:
        counts: tokens and rounds of each rollout; expected values, or counts of one decoder run.
        survival: P(accepted >= j), j from 1; see `evaluation.estimates`.
        estimate: reason why decoding had to estimate the numbers; "" if they are exact.
        keeps: see `replay.ReplayResult`.
    """

    counts: Counts
    survival: list[float]
    estimate: str
    keeps: list[np.ndarray] | None = None


def acceptance(
    target: Target,
    drafter: Proposer,
    rollouts: Sequence[Rollout],
    plans: Sequence[Plan],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    read: Read | None = None,
    every_start: bool = False,
) -> list[Acceptance]:
    """Measure the acceptance of every plan with one sampler.

    Args:
        target: the model that generated the rollouts.
        drafter: the drafter to measure.
        rollouts: answers of at most `max_new_tokens`, drawn by plain decoding with `sampler`.
        plans: plans to measure.
        sampler: of the rollouts.
        max_new_tokens: limit of the rollouts.
        stop: end tokens of the rollouts.
        seed: of the draws, for plans that are decoded.
        batch_size: rollouts per batch.
        progress: called with the number of rollouts done, summed over plans.
        read: reads the texts; default `target.read`.
        every_start: see `replay.replay`.
    """
    if isinstance(drafter, ReadsTaps):
        target.check_taps(drafter.taps)
    exact = [plan for plan in plans if not why_inexact(plan, sampler, drafter)]
    how = {"batch_size": batch_size, "progress": progress, "read": read, "every_start": every_start}
    replayed = replay(target, drafter, rollouts, exact, sampler, **how)
    results = {
        plan: Acceptance(one.counts, one.survival, "", one.keeps)
        for plan, one in zip(exact, replayed, strict=True)
    }
    done = len(rollouts) * len(exact)
    for plan in plans:
        if plan in results:
            continue
        outputs: list[Output] = []
        for start in range(0, len(rollouts), batch_size):
            part = [r.prompt for r in rollouts[start : start + batch_size]]
            outputs += generate(
                target,
                drafter,
                part,
                plan=plan,
                sampler=sampler,
                max_new_tokens=max_new_tokens,
                stop=stop,
                seed=seed,
                requests=[f"estimate-{start + i}" for i in range(len(part))],
            ).outputs
            done += len(part)
            if progress:
                progress(done)
        reason = why_inexact(plan, sampler, drafter)
        survival = kaplan_meier(decoded_counts(outputs, plan.depth))
        results[plan] = Acceptance(round_counts(outputs), survival, reason)
    return [results[plan] for plan in plans]


def round_counts(outputs: Sequence[Output]) -> Counts:
    """Tokens and rounds of each output."""
    return Counts([sum(o.emitted) for o in outputs], [float(len(o.emitted)) for o in outputs])
