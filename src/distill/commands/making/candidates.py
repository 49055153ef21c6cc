"""Choose the drafter: by what the formats can hold, and by what a round costs in each engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode.errors import UserError
from decode.model.target import Target
from distill.commands.making.engines import Timing
from distill.commands.making.options import training_options
from distill.config.build import build_drafter
from distill.config.validate import refused
from distill.engine_costs.costs import PAYS, EngineCosts, constant
from distill.options.run import TrainOptions
from distill.search.trials import override_key, override_value
from distill.utils.progress import say
from drafters.export import formats
from drafters.export.formats import NATIVE
from drafters.registry import short_name

TIMING_SHARE = 0.15  # of the budget: with more for timing candidates, the others are not timed
LONGEST = 64  # tokens: longer than any draft
# Share of tokens that is assumed to be accepted until a drafter is trained: only the choice depends on it.
# With few prompts EAGLE-3 is not ahead of EAGLE (docs/drafters.md).
FEW = 1000  # prompts
ASSUMED, OTHERS = {"eagle3": 0.6, "eagle": 0.55}, 0.5
ASSUMED_OF_FEW = {"eagle": 0.55, "eagle3": 0.54}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A drafter that every shipped format can hold.

    Attributes:
        name: kind of drafter.
        words: overrides that choose it.
        changes: options that a format needs, which are among the overrides.
        rate: share of tokens that is assumed to be accepted.
        options: of a training run with it.
        needs_answers: whether it is trained on answers, or counts in them.
    """

    name: str
    words: list[str]
    changes: Mapping[str, formats.Change]
    rate: float
    options: TrainOptions
    needs_answers: bool


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A candidate's forecasts.

    Attributes:
        candidate: the drafter.
        costs: by format.
        seconds: that timing took, by format.
    """

    candidate: Candidate
    costs: Mapping[str, EngineCosts]
    seconds: Mapping[str, float]

    def paying(self) -> list[str]:
        """Formats in whose engine a draft can pay."""
        return [to for to, costs in self.costs.items() if costs.ceiling()[1] >= PAYS]

    def plain_seconds(self) -> dict[str, float]:
        """Seconds of a plain round, by format."""
        return {to: costs.plain for to, costs in self.costs.items()}

    def forecast(self) -> float:
        """Mean predicted speedup over the engines, with the assumed acceptance."""
        speeds = [costs.best(constant(self.candidate.rate, LONGEST))[1] for costs in self.costs.values()]
        return sum(speeds) / len(speeds)


def possible(
    base: Sequence[str],
    given: Sequence[str],
    kinds: Sequence[str],
    target: Target,
    ship: Sequence[str],
    prompts: int,
) -> tuple[list[Candidate], dict[str, str]]:
    """Drafters that can be built for the target and written in every format.

    Args:
        base: overrides of the command, without a drafter's.
        given: the drafter's. If they name one, it is the only candidate. Options that they name are never
            changed; others are, where a format needs it.
        kinds: of drafters to choose from.
        target: the target.
        ship: formats.
        prompts: number of prompts to train on.

    Returns:
        The candidates, those first that are assumed to have more accepted; and why each other kind is none.

    Raises:
        UserError: there is no candidate.
    """
    found, refusals = [], {}
    named = _name_of(given)
    for kind in [named] if named else kinds:
        words = with_kind(given, kind)
        try:
            rate = (ASSUMED_OF_FEW if prompts < FEW else ASSUMED).get(kind, OTHERS)
            found.append(_candidate(kind, rate, base, words, target, ship))
        except UserError as error:
            refusals[kind] = str(error)
    if not found:
        raise UserError("; ".join(f"drafter={kind}: {why}" for kind, why in refusals.items()))
    return sorted(found, key=lambda one: -one.rate), refusals


def _candidate(
    kind: str, rate: float, base: Sequence[str], words: list[str], target: Target, ship: Sequence[str]
) -> Candidate:
    options = training_options([*base, *words])
    with refused():
        drafter = build_drafter(options.drafter, target)
    programs = [to for to in ship if to != NATIVE]
    for to in programs:
        formats.check_format(short_name(drafter), to)
    changes = formats.other_options(short_name(drafter), drafter.settings, target, programs)
    named = {override_key(word) for word in words}
    if changes is None or named & changes.keys():
        for to in programs:
            formats.check(short_name(drafter), drafter.settings, target, to)
    changes = changes or {}
    if changes:
        words = [*words, *(f"{name}={override_value(one.value)}" for name, one in changes.items())]
        options = training_options([*base, *words])
    needs = drafter.trains or drafter.needs_fit
    return Candidate(name=kind, words=words, changes=changes, rate=rate, options=options, needs_answers=needs)


def with_kind(given: Sequence[str], kind: str) -> list[str]:
    """The drafter's overrides of the user, with a kind if they name none."""
    return list(given) if _name_of(given) else [f"drafter={kind}", *given]


def _name_of(words: Sequence[str]) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith("drafter=")), "")


def time_candidates(
    candidates: Sequence[Candidate], timing: Timing, budget: float, clock: Callable[[], float]
) -> tuple[list[Timed], list[str]]:
    """Time the candidates in every engine that is here.

    Args:
        candidates: drafters, the first is timed in any case.
        timing: how.
        budget: seconds of the whole command.
        clock: seconds.

    Returns:
        What was timed, and the names that the budget leaves no time for.

    Raises:
        UserError: an engine does not start, or fails.
    """
    begun, done, left_out = clock(), [], []
    for number, candidate in enumerate(candidates):
        spent = clock() - begun
        if number and spent * (number + 1) / number > TIMING_SHARE * budget:
            left_out.append(candidate.name)
            continue
        costs, seconds = {}, {}
        for to in timing.engines():
            before = clock()
            say(f"\n{candidate.name}, to={to}:")
            costs[to] = timing.candidate(candidate.name, candidate.options, to)
            seconds[to] = clock() - before
        done.append(Timed(candidate=candidate, costs=costs, seconds=seconds))
    return done, left_out


def best(timed: Sequence[Timed]) -> Timed:
    """The candidate with the largest forecast; the first of equal ones."""
    return max(timed, key=lambda one: one.forecast())
