"""Plans by name, for the Python interface."""

from __future__ import annotations

from functools import cache
from typing import Any
from warnings import warn

from hydra.utils import instantiate

from decode.errors import UserError
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.choices import options
from distill.config.compose import compose
from distill.config.validate import refused
from distill.utils.paths import CONF
from drafters.base import Drafter
from drafters.checkpoint.fastest_plan import Fastest


def named_plan(decode: str) -> Plan:
    """The plan that a name of conf/decode stands for: dynamic (a tree), chain, static, drafts.

    Raises:
        UserError: no such name, or one that only a command measures (auto, calibrated).
    """
    plan = _built(decode) if decode in options(CONF, "decode") else None
    if not isinstance(plan, Plan):
        names = ", ".join(name for name in options(CONF, "decode") if isinstance(_built(name), Plan))
        why = "is chosen by measurement, which foredraft score and advise do" if plan else "is no plan"
        raise UserError(f"plan: {decode!r} {why}; give a foredraft.Plan, or one of {names}")
    return plan


def _built(decode: str) -> Any:
    with refused():
        return instantiate(compose(["prompt=-", f"decode={decode}"], CONF, "generate").decode)


def given_plan(plan: Plan | str, drafter: Drafter | None) -> Plan:
    """The plan that a caller gave, by name or as it is.

    Raises:
        UserError: no plan, or one that the drafter does not support.
    """
    given: Any = named_plan(plan) if isinstance(plan, str) else plan
    if not isinstance(given, Plan):
        raise UserError(f"plan: give a foredraft.Plan or a name, as in 'chain', not {type(given).__name__}")
    if drafter:
        drafter.check(given)
    return given


def fastest_plan(drafter: Drafter | None, target: Target, sampler: Sampler, batch: int) -> Plan:
    """The plan where none was given: the fastest of the drafter's score, plain without a drafter.

    Args:
        drafter: may have a scorecard next to its files.
        target: that verifies.
        sampler: of the texts.
        batch: number of texts.

    Warns:
        UserWarning: tokens are drawn, and no score says whether the plan is faster than plain decoding.
    """
    if drafter is None:
        return Plan()
    plan, reason = _fastest().choose(drafter, target, sampler, batch)
    if reason and sampler.temperature:
        name = plan.resolved(sampler.temperature, drafter.traits.proposals).name
        warn(
            f"plan {name} may be slower than plain decoding: {reason}; measure it by foredraft score "
            f"checkpoint=<folder> score.temperatures=[0,{sampler.temperature:g}] "
            f"score.batch_sizes=[{batch}] out=<folder>/score.json",
            stacklevel=4,
        )
    return plan


@cache
def _fastest() -> Fastest:
    return _built("fastest")
