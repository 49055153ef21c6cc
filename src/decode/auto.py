"""`decode=auto`: the plan with the most tokens a second, by acceptance over the measured cost of a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.acceptance import acceptance
from decode.errors import UserError
from decode.generate import generate
from decode.plan import Plan
from decode.replay import Rollout
from decode.rounds import Proposer, Times
from decode.sampling import Sampler
from decode.target import Target

PLAIN = Plan()


@dataclass(frozen=True, slots=True)
class Auto:
    """Candidates to choose from; plain decoding always is one.

    Args:
        plans: as keyword arguments of `Plan`.
        prompts: decoded with each candidate to time a round, at least one batch.

    Raises:
        UserError: no candidates, or one that no draft can have.
    """

    plans: Sequence[Mapping[str, Any] | Plan]
    prompts: int = 4

    def __post_init__(self) -> None:
        plans = tuple(p if isinstance(p, Plan) else Plan(**p) for p in self.plans)  # pyright: ignore[reportArgumentType]
        if not plans or self.prompts < 1:
            raise UserError("decode=auto: give decode.plans to choose from and decode.prompts >= 1")
        if any(plan.lossy for plan in plans):
            raise UserError("decode=auto chooses among lossless plans; take out the lossy ones")
        object.__setattr__(self, "plans", (PLAIN, *plans))

    def choose(
        self,
        target: Target,
        drafter: Proposer,
        rollouts: Sequence[Rollout],
        sampler: Sampler,
        batch_size: int,
        **options: Any,
    ) -> tuple[Plan, list[dict[str, Any]]]:
        """The fastest plan at one law and batch size, and the cost curve it was read from.

        Args:
            target: to decode with.
            drafter: to draft with.
            rollouts: of the target at this law.
            sampler: the law.
            batch_size: requests decoded together.
            options: max_new_tokens, stop and seed, as `generate` takes them.

        Returns:
            The plan, and of every candidate its name, tau, seconds a round and tokens a second of
            one request, plain decoding first.
        """
        plans: list[Plan] = list(self.plans)  # pyright: ignore[reportAssignmentType]
        found = acceptance(target, drafter, rollouts, plans[1:], sampler, **options)
        taus = [1.0, *(one.counts.tau for one in found)]
        prompts = [r.prompt for r in rollouts[: max(self.prompts, batch_size)]]
        curve = []
        for plan, tau, seconds in zip(
            plans, taus, _seconds(target, drafter, prompts, plans, sampler, batch_size, options), strict=True
        ):
            row = {"decode": plan.name, "tau": tau, "round_seconds": seconds}
            curve.append(row | {"tokens_per_second": tau / seconds})
        fastest = max(range(len(plans)), key=lambda i: curve[i]["tokens_per_second"])
        return plans[fastest], curve


def _seconds(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    sampler: Sampler,
    batch_size: int,
    options: Mapping[str, Any],
) -> Iterable[float]:
    """Seconds of one round of each plan, all plans taking turns.

    The longest output of a batch has as many rounds as the batch took.
    """
    times, rounds = [Times() for _ in plans], [0] * len(plans)
    for start in range(0, len(prompts), batch_size):
        for i, plan in enumerate(plans):
            part = prompts[start : start + batch_size]
            run = generate(
                target, drafter if plan.depth else None, part, plan=plan, sampler=sampler, **options
            )
            times[i].total += run.times.total
            rounds[i] += max(len(o.emitted) for o in run.outputs)
    return [t.total / max(n, 1) for t, n in zip(times, rounds, strict=True)]
