"""Claims of papers and what the scorecards say of them; read from claims.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import yaml

from claims.cards import TEMPERATURES, Line, common_seeds, line_of
from claims.estimates import Estimate, SeedNoise, difference, tau
from decode.errors import UserError

LONGER, SHORTER = "longer", "shorter"  # what a paper expects of the first arm's tau
SAME, OPPOSITE, OPEN, OTHER = "same", "opposite", "not distinguished", "not in the regime"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two lines of a folder.

    Attributes:
        folder: of results.
        arm, over: names of lines, such as eagle3-800; tau of the first minus that of the second.
        plan: of both; "": their first.
        temperatures: of the sampler.
    """

    folder: str
    arm: str
    over: str
    plan: str = ""
    temperatures: Sequence[float] = TEMPERATURES


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's claim that one drafter or setting accepts more than another.

    Attributes:
        says: the claim, with the paper's own numbers.
        expects: LONGER or SHORTER, of the first arm of each comparison.
        tests: the comparisons.
        regime: why these runs are not in the claim's regime; "": they are.
    """

    says: str
    tests: Sequence[Comparison]
    expects: str = LONGER
    regime: str = ""

    def __post_init__(self) -> None:
        if self.expects not in (LONGER, SHORTER) or not self.tests:
            raise UserError(f"claims.yaml: {self.says}: needs tests, and expects: {LONGER} or {SHORTER}")


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A claim that no scorecard here judges.

    Attributes:
        says: the claim.
        state: what there is: a test, a page, or why it was not tried.
    """

    says: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's claims.

    Attributes:
        name: of the method.
        arxiv: its number.
        claims: judged by scorecards.
        elsewhere: the others.
    """

    name: str
    arxiv: str
    claims: Sequence[Claim] = ()
    elsewhere: Sequence[Elsewhere] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment that would settle claims.

    Attributes:
        what: arms and sizes.
        needs: machine and time.
        state: `run`, `not run`, or what part of it was run.
    """

    what: str
    needs: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of results.

    Attributes:
        title: of its page.
        target: the model that drafts are for.
        against: the arm that the others are compared with on its page; "": none.
        budgets: CPU minutes of training, for each of which its page names the best arm.
        noise_without: patterns of lines that do not count for the noise of seeds: they have another line's
            weights, or hardly accept anything, so that their tau cannot vary.
    """

    title: str
    target: str
    against: str = ""
    budgets: Sequence[float] = ()
    noise_without: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What claims.yaml says.

    Attributes:
        folders: of results, by name.
        papers: in order.
        experiments: in order.
    """

    folders: Mapping[str, Folder]
    papers: Sequence[Paper]
    experiments: Sequence[Experiment]


def read_claims(file: Path) -> Claims:
    """Read claims.yaml.

    Raises:
        UserError: an unknown or missing key.
    """
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    folders = {name: _made(Folder, folder, name) for name, folder in values["folders"].items()}
    experiments = [_made(Experiment, one, "experiments") for one in values.get("experiments", [])]
    papers = []
    for paper in values["papers"]:
        where = str(paper.get("name"))
        claims = [
            _made(Claim, {**claim, "tests": [_made(Comparison, t, where) for t in claim["tests"]]}, where)
            for claim in paper.pop("claims", [])
        ]
        others = [_made(Elsewhere, claim, where) for claim in paper.pop("elsewhere", [])]
        papers.append(_made(Paper, {**paper, "claims": claims, "elsewhere": others}, where))
    return Claims(folders=folders, papers=papers, experiments=experiments)


def _made(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    known = set(signature(kind).parameters)
    if unknown := set(values) - known:
        raise UserError(f"claims.yaml: {where}: no key {min(unknown)}; there are {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"claims.yaml: {where}: {error}") from None


def verdict(claim: Claim, found: Estimate) -> str:
    """SAME, OPPOSITE, OPEN where the interval contains zero, or OTHER outside the claim's regime."""
    if claim.regime:
        return OTHER
    if found.low <= 0 <= found.high:
        return OPEN
    return SAME if (found.value > 0) == (claim.expects == LONGER) else OPPOSITE


def rows_of(
    claim: Claim,
    lines: Mapping[str, Sequence[Line]],
    folders: Mapping[str, Folder],
    noise: Mapping[float, SeedNoise | None],
) -> list[list[str]]:
    """Cells for each comparison and temperature: setting, both taus, difference, unit, verdict.

    Raises:
        UserError: a line that is not there, or two that cannot be paired.
    """
    rows = []
    for test in claim.tests:
        if test.folder not in lines:
            raise UserError(f"claims.yaml: {test.folder}: no such folder of results")
        found = common_seeds(
            *(line_of(lines[test.folder], name, test.folder) for name in (test.arm, test.over))
        )
        for temperature in test.temperatures:
            taus = [tau(line, temperature, test.plan) for line in found]
            change = difference(found[0], found[1], temperature, noise[temperature], test.plan)
            if change is None or taus[0] is None or taus[1] is None:
                raise UserError(
                    f"claims.yaml: {test.folder}: {test.arm} and {test.over} cannot be paired at "
                    f"T={temperature:g}{test.plan and f' with {test.plan}'}"
                )
            rows.append(
                [
                    f"{folders[test.folder].target}, {_plan(found[0], test.plan)}, T={temperature:g}",
                    f"[{test.arm}]({_file(test, found[0])}) {taus[0].value:.2f}",
                    f"[{test.over}]({_file(test, found[1])}) {taus[1].value:.2f}",
                    format(change, "+.2f"),
                    change.unit,
                    verdict(claim, change),
                ]
            )
    return rows


def _plan(line: Line, plan: str) -> str:
    return plan or line.plans[0].partition(" (")[0]


def _file(test: Comparison, line: Line) -> str:
    """The first seed's scorecard; other seeds lie next to it."""
    return f"../scripts/lab/results/{test.folder}/{line.name}-{line.results[0].seed}.json"
