"""`decode=auto`: choose the plan with the most tokens per second, by acceptance and round costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from decode.errors import UserError
from decode.evaluation.acceptance import Acceptance, acceptance
from decode.evaluation.estimates import interval
from decode.evaluation.replay import Counts, Rollout
from decode.generation.types import ChecksPlans, Proposer
from decode.integers import whole_number
from decode.model.target import Target
from decode.plan import Plan, plan_of
from decode.planning.cost_model import PLAIN, Costs, Throughput, fastest, throughputs
from decode.planning.policy_simulation import fit_policy, simulate
from decode.planning.round_timing import REPEATS, measure
from decode.sampling import Sampler

ADAPT_MARGIN = 1.02  # required advantage of an adaptive chain; its decision time is not in the costs


class Forecast(NamedTuple):
    """Predicted speed of a plan for one sampler and batch size."""

    plan: Plan
    tau: float
    estimate: str  # reason why tau is an estimate; "" if it is exact
    round_seconds: float  # with all rows running; an adaptive plan's mean over rounds
    throughput: Throughput

    def report(self) -> dict[str, Any]:
        """As a JSON object, for files and tables."""
        speedup, *speedup_interval = self.throughput.speedup
        return {
            "decode": self.plan.name,
            "tau": self.tau,
            "estimate": self.estimate,
            "round_seconds": self.round_seconds,
            "tokens_per_second": self.throughput.speed,
            "speedup": speedup,
            "speedup_interval": speedup_interval,
            "full_batch_tokens_per_second": self.throughput.full,
            "adapt": None if self.plan.adapt is None else asdict(self.plan.adapt),
        }


def supported_plans(drafter: Proposer, plans: Sequence[Plan]) -> list[Plan]:
    """The plans that this drafter supports."""
    refused = refused_plans(drafter, plans)
    return [plan for plan in plans if plan not in refused]


def refused_plans(drafter: Proposer, plans: Sequence[Plan]) -> dict[Plan, UserError]:
    """The plans that this drafter does not support, and why."""
    refused = {}
    for plan in plans:
        try:
            if isinstance(drafter, ChecksPlans):
                drafter.check(plan)
        except UserError as reason:
            refused[plan] = reason
    return refused


def forecast(
    plans: Sequence[Plan], found: Sequence[Acceptance], costs: Costs, batch: int, adapt: bool, tokens: Counts
) -> list[Forecast]:
    """Predict plain decoding, every plan, and an adaptive version of the longest chain of each proposal.

    Args:
        plans: plans that draft.
        found: acceptance of each on the same answers.
        costs: round costs of the machine.
        batch: rows decoded together.
        adapt: whether to add adaptive chains.
        tokens: counts of plain decoding on the answers.
    """
    all_plans = [PLAIN, *plans]
    counts = [tokens, *(one.counts for one in found)]
    speeds = throughputs(all_plans, counts, costs, batch)
    rows = [
        Forecast(plan, one.tau, estimate, costs.round_seconds(plan, batch), speed)
        for plan, one, estimate, speed in zip(
            all_plans, counts, ["", *(f.estimate for f in found)], speeds, strict=True
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
        plan = replace(longest, nodes=0, adapt=fit_policy(longest, keeps, costs, batch))
        run = simulate(plan, keeps, costs, batch)
        seconds, tokens = float(run.seconds.sum()), float(run.tokens.sum())
        low, high = interval(run.plain, run.seconds)
        speedup = float(run.plain.sum()) / seconds, low, high
        estimate = "rehearsed" if proposal == "fixed" else "rehearsed with one draw of its coins"
        tau = tokens / run.rounds
        mean = batch * tau * seconds / tokens
        rows.append(Forecast(plan, tau, estimate, mean, Throughput(tokens / seconds, speedup, None)))
    return rows


@dataclass(frozen=True, slots=True)
class Auto:
    """Candidate plans for `decode=auto`; plain decoding is always one of them.

    Args:
        plans: plans or keyword arguments of `Plan`. Plans that a drafter does not support are skipped.
        prompts: number of prompts decoded to time rounds; at least one batch is used.
        repeats: timed rounds per candidate.
        adapt: also consider chains with adaptive draft length.

    Raises:
        UserError: no candidates, or an invalid one.
    """

    plans: Sequence[Mapping[str, Any] | Plan]
    prompts: int = 4
    repeats: int = REPEATS
    adapt: bool = True

    def __post_init__(self) -> None:
        plans = tuple(p if isinstance(p, Plan) else plan_of(p) for p in self.plans)  # pyright: ignore[reportArgumentType]
        for name in ("prompts", "repeats"):
            whole_number(getattr(self, name), f"decode=auto: decode.{name}", least=1)
        if not plans:
            raise UserError("decode=auto: give decode.plans to choose from")
        if any(plan.lossy for plan in plans):
            raise UserError("decode=auto chooses among lossless plans; remove lossy ones from decode.plans")
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
        """Choose the fastest plan for one sampler and batch size.

        Args:
            target: the target model.
            drafter: the drafter.
            rollouts: answers of the target with this sampler.
            sampler: warpers of the decoder.
            batch_size: requests decoded together.
            options: max_new_tokens, stop and seed of `generate`.

        Returns:
            The plan, and the `Forecast` of every candidate as JSON, plain decoding first.
        """
        plans = supported_plans(drafter, self.plans[1:])  # pyright: ignore[reportArgumentType]
        found = acceptance(target, drafter, rollouts, plans, sampler, every_start=self.adapt, **options)
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
        return best_forecast(rows).plan, [row.report() for row in rows]


def best_forecast(rows: Sequence[Forecast]) -> Forecast:
    """The fastest plan; the first one if several are equal."""
    return rows[fastest([r.throughput.speed / (ADAPT_MARGIN if r.plan.adapt else 1.0) for r in rows])]


def plain_counts(rollouts: Sequence[Rollout]) -> Counts:
    """Counts of plain decoding: one round per token."""
    tokens = [len(r.answer) - 1 for r in rollouts]
    return Counts(tokens, [float(n) for n in tokens])
