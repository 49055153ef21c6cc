"""What states that are used again are worth: exact, on stored answers, arm against arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from decode.evaluation.replay import Counts, Rollout, agreement
from decode.evaluation.stateful_replay import NO_COIN, Step, matched, walk
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.models.lyanna import Lyanna


@contextmanager
def using(drafter: Lyanna, mode: str) -> Iterator[None]:
    """Decode with another mode of reuse."""
    before, drafter.reuse = drafter.reuse, replace(drafter.reuse, mode=mode)
    try:
        yield
    finally:
        drafter.reuse = before


def salvage(
    target: Target, drafter: Lyanna, rollouts: Sequence[Rollout], plan: Plan, sampler: Sampler
) -> dict[str, Any]:
    """What `tree_merge` gives on stored answers.

    Args:
        target: that wrote the rollouts.
        drafter: what is scored.
        rollouts: drawn by plain decoding with `sampler`.
        plan: a dynamic tree of fixed nodes.
        sampler: the law.

    Returns:
        `states_reused`: of the states at and behind a rejection, those used in the round after;
        `salvage_rate`: rounds that keep more than the plan's nodes would, all fresh; three differences
        of tau, each with its 99 % interval, paired by prompt: `equal_nodes`, the plan's nodes shared
        out between fresh and old states, over all fresh; `equal_forwards`, the old states' nodes on
        top of the plan's, over the plan; `fresh_control`, as many fresh nodes on top, over the plan.
    """
    extra = drafter.reuse.nodes
    wide = replace(plan, nodes=plan.nodes + extra)
    saved = _Saved(target, drafter, plan, sampler)

    def tau(mode: str, plan: Plan, watched: bool = False) -> Counts:
        with using(drafter, mode):
            rounds, _ = walk(target, drafter, rollouts, plan, sampler, on_step=saved if watched else None)
        return Counts([len(r.answer) - 1 for r in rollouts], [float(n) for n in rounds])

    base = tau("none", plan)
    arms = {
        "equal_nodes": tau("tree_merge", plan, watched=True),
        "equal_forwards": tau("tree_merge", wide),
        "fresh_control": tau("none", wide),
    }
    return saved.report() | {
        name: {"difference": arm.tau - base.tau, "interval": agreement(arm, base)}
        for name, arm in arms.items()
    }


class _Saved:
    """Counts as rounds pass."""

    def __init__(self, target: Target, drafter: Lyanna, fresh: Plan, sampler: Sampler) -> None:
        self._target, self._drafter, self._fresh, self._sampler = target, drafter, fresh, sampler
        self.rounds = self.deeper = self.spoilt = self.used = 0

    def __call__(self, step: Step) -> None:
        """See `walk`; the state is put back as it was."""
        drafted = step.state.drafted
        with using(self._drafter, "none"):
            alone = self._drafter.propose(step.state, self._target, self._sampler, NO_COIN, self._fresh)
        step.state.drafted = drafted
        depth = step.draft.depth
        for kept, fresh, more in zip(step.accepted, matched(alone, step.ahead), step.goes_on, strict=True):
            self.rounds += 1
            self.deeper += kept > fresh
            if more and kept < depth:
                self.spoilt += depth - kept
                self.used += depth - kept - 1

    def report(self) -> dict[str, float]:
        """Shares."""
        return {
            "states_reused": self.used / max(self.spoilt, 1),
            "salvage_rate": self.deeper / max(self.rounds, 1),
        }
