"""`decode=auto`: the plan with the most tokens a second, by acceptance over the measured cost of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance, acceptance
from decode.evaluation.bootstrap import interval
from decode.evaluation.replay import Counts, Rollout
from decode.generation.types import Proposer
from decode.model.target import Target
from decode.plan import Plan
from decode.planning.cost_model import PLAIN, Costs, Worth, fastest, worth
from decode.planning.policy_simulation import pace_of, rehearse
from decode.planning.round_timing import REPEATS, measure
from decode.sampling import Sampler

DECIDING = 1.02  # how much faster an adaptive chain has to be: deciding takes time that costs leave out


class Forecast(NamedTuple):
    """What a plan is predicted to do at one law and batch size."""

    plan: Plan
    tau: float
    estimate: str  # why tau is a count and no exact expectation; empty: it is exact
    round_seconds: float  # with all rows running; of an adaptive plan the mean over its rounds
    worth: Worth

    def report(self) -> dict[str, Any]:
        """For files and tables."""
        speedup, *span = self.worth.speedup
        return {
            "decode": self.plan.name,
            "tau": self.tau,
            "estimate": self.estimate,
            "round_seconds": self.round_seconds,
            "tokens_per_second": self.worth.speed,
            "speedup": speedup,
            "speedup_interval": span,
            "full_batch_tokens_per_second": self.worth.full,
            "adapt": None if self.plan.adapt is None else asdict(self.plan.adapt),
        }


def possible(drafter: Proposer, plans: Sequence[Plan]) -> list[Plan]:
    """Those that this drafter can make."""
    check: Callable[[Plan], None] | None = getattr(drafter, "check", None)
    found = []
    for plan in plans:
        try:
            if check:
                check(plan)
        except UserError:
            continue
        found.append(plan)
    return found


def forecast(
    plans: Sequence[Plan], found: Sequence[Acceptance], costs: Costs, batch: int, adapt: bool, tokens: Counts
) -> list[Forecast]:
    """Predictions for plain decoding, every plan, and the longest of each kind of chain made adaptive.

    Args:
        plans: that draft.
        found: their acceptance, on the same answers.
        costs: of the machine.
        batch: rows decoded together.
        adapt: whether chains may adapt.
        tokens: of the answers; plain decoding takes a round for each.
    """
    every = [PLAIN, *plans]
    counts = [tokens, *(one.counts for one in found)]
    known = worth(every, counts, costs, batch)
    rows = [
        Forecast(plan, one.tau, why, costs.round_seconds(plan, batch), value)
        for plan, one, why, value in zip(
            every, counts, ["", *(f.estimate for f in found)], known, strict=True
        )
    ]
    return rows + (_adaptive(plans, found, costs, batch) if adapt else [])


def _adaptive(plans: Sequence[Plan], found: Sequence[Acceptance], costs: Costs, batch: int) -> list[Forecast]:
    rows = []
    for proposal in ("fixed", "sampled"):
        chains = [
            (plan, one.keeps)
            for plan, one in zip(plans, found, strict=True)
            if plan.proposal == proposal
            and not plan.has_siblings
            and not plan.min_confidence
            and plan.depth > 1
        ]
        longest, keeps = max(chains, key=lambda chain: chain[0].depth, default=(PLAIN, None))
        if keeps is None or not any(map(len, keeps)):
            continue
        plan = replace(longest, nodes=0, adapt=pace_of(longest, keeps, costs, batch))
        played = rehearse(plan, keeps, costs, batch)
        seconds, tokens = float(played.seconds.sum()), float(played.tokens.sum())
        low, high = interval(played.plain, played.seconds)
        speedup = float(played.plain.sum()) / seconds, low, high
        why = "rehearsed" if proposal == "fixed" else "rehearsed with one draw of its coins"
        tau = tokens / played.rounds
        mean = batch * tau * seconds / tokens
        rows.append(Forecast(plan, tau, why, mean, Worth(tokens / seconds, speedup, None)))
    return rows


@dataclass(frozen=True, slots=True)
class Auto:
    """Candidates to choose from; plain decoding always is one.

    Args:
        plans: as keyword arguments of `Plan`. Those that a drafter cannot make are left out.
        prompts: decoded to time rounds, at least one batch.
        repeats: rounds of each candidate that are timed.
        adapt: chains whose length follows past acceptance are candidates as well.

    Raises:
        UserError: no candidates, or one that no draft can have.
    """

    plans: Sequence[Mapping[str, Any] | Plan]
    prompts: int = 4
    repeats: int = REPEATS
    adapt: bool = True

    def __post_init__(self) -> None:
        plans = tuple(p if isinstance(p, Plan) else Plan(**p) for p in self.plans)  # pyright: ignore[reportArgumentType]
        if not plans or min(self.prompts, self.repeats) < 1:
            raise UserError(
                "decode=auto: give decode.plans to choose from, decode.prompts and decode.repeats >= 1"
            )
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
            The plan, and of every candidate its `Forecast`, plain decoding first.
        """
        plans = possible(drafter, self.plans[1:])  # pyright: ignore[reportArgumentType]
        found = acceptance(target, drafter, rollouts, plans, sampler, **options)
        prompts = [r.prompt for r in rollouts[: max(self.prompts, batch_size)]]
        costs = measure(
            target,
            drafter,
            prompts,
            plans,
            sampler,
            [batch_size],
            max_new_tokens=options["max_new_tokens"],
            seed=options.get("seed", 0),
            repeats=self.repeats,
        )
        rows = forecast(plans, found, costs, batch_size, self.adapt, plain_counts(rollouts))
        return choice(rows).plan, [row.report() for row in rows]


def choice(rows: Sequence[Forecast]) -> Forecast:
    """The fastest; of equals the first."""
    return rows[fastest([r.worth.speed / (DECIDING if r.plan.adapt else 1.0) for r in rows])]


def plain_counts(rollouts: Sequence[Rollout]) -> Counts:
    """Plain decoding's: a round a token."""
    tokens = [len(r.answer) - 1 for r in rollouts]
    return Counts(tokens, [float(n) for n in tokens])
