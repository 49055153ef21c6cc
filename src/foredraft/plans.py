"""Plans by name, for the Python interface."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate

from decode.errors import UserError
from decode.plan import Plan
from distill.config.choices import options
from distill.config.compose import compose
from distill.config.validate import refused
from distill.utils.paths import CONF
from drafters.base import Drafter


def named_plan(decode: str = "dynamic") -> Plan:
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


def chosen_plan(plan: Plan | str | None, drafter: Drafter | None) -> Plan:
    """The plan that a caller gave, by name or not at all: a dynamic tree, or plain decoding.

    Raises:
        UserError: no plan, or one that the drafter does not support.
    """
    given: Any = plan
    if isinstance(given, str):
        given = named_plan(given)
    elif given is None:
        given = named_plan() if drafter else Plan()
    if not isinstance(given, Plan):
        raise UserError(f"plan: give a foredraft.Plan or a name, as in 'chain', not {type(given).__name__}")
    if drafter:
        drafter.check(given)
    return given
