"""How much of a plan's drafts is accepted: exactly where replay can tell, else by decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.evaluation.replay import Counts, Rollout, inexact, replay
from decode.generation.generate import generate
from decode.generation.types import Output, Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of one plan on stored rollouts of the target.

    Attributes:
        counts: tokens and rounds of each rollout: expected ones, or those of one decoder run.
        survival: P(accepted >= j), j from 1.
        estimate: why the numbers are a decoder's count, with its noise; empty: they are exact.
        keeps: see `replay.Replayed`; None where there are none.
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
) -> list[Acceptance]:
    """Measure every plan at one law.

    Args:
        target: that wrote the rollouts.
        drafter: what is measured.
        rollouts: answers of at most `max_new_tokens`, drawn by plain decoding with `sampler`.
        plans: any.
        sampler: the law.
        max_new_tokens: that the rollouts were given.
        stop: their end tokens.
        seed: of the decoder's draws, where it has to count.
        batch_size: rollouts side by side.
        progress: called with the rollouts done, each counted once a plan.
    """
    target.check_taps(drafter)
    exact = [plan for plan in plans if not inexact(plan, sampler, drafter)]
    done = 0

    def advanced(rollouts_done: int) -> None:
        if progress:
            progress(done + rollouts_done * len(exact))

    replayed = replay(target, drafter, rollouts, exact, sampler, batch_size=batch_size, progress=advanced)
    found = {
        plan: Acceptance(one.counts, one.survival, "", one.keeps)
        for plan, one in zip(exact, replayed, strict=True)
    }
    done = len(rollouts) * len(exact)
    for plan in plans:
        if plan in found:
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
            advanced(0)
        why = inexact(plan, sampler, drafter)
        found[plan] = Acceptance(counted(outputs), survival(outputs, plan.depth), why)
    return [found[plan] for plan in plans]


def counted(outputs: Sequence[Output]) -> Counts:
    """Tokens and rounds of a decoder run."""
    return Counts([sum(o.emitted) for o in outputs], [float(len(o.emitted)) for o in outputs])


def whole_rounds(outputs: Sequence[Output]) -> list[tuple[int, int]]:
    """(accepted, offered) of every round that no end cuts.

    What a cut round would have accepted further is known, but no decoder would have emitted it.
    """
    return [
        (accepted, offered)
        for o in outputs
        for accepted, offered, emitted in zip(o.accepted, o.draft_lengths, o.emitted, strict=True)
        if emitted == accepted + 1
    ]


def survival(outputs: Sequence[Output], depth: int) -> list[float]:
    """P(accepted >= j) over whole rounds, j from 1."""
    rounds = whole_rounds(outputs)
    return [sum(a >= j for a, _ in rounds) / max(len(rounds), 1) for j in range(1, depth + 1)]
