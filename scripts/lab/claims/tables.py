"""Tables of a folder of results: tau of every line, and differences to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from claims.cards import TEMPERATURES, Line
from claims.estimates import Estimate, difference, seed_noise, tau
from decode.evaluation.scorecard import Scorecard
from distill.scoring.tables import markdown

TIMED = 24, 3  # prompts and repeats from which a speedup is shown
HEAD = ("drafter", "steps", "seeds", *(f"tau, T={t:g}" for t in TEMPERATURES))
GPU = "NVIDIA"  # in the name of the hardware


def table(lines: Sequence[Line]) -> str:
    """Tau, training and commit of every line, the longest acceptance at T=0 first."""
    speeds = all(timed_alone(one.card) for line in lines for one in line.results)
    minutes = shows_minutes(lines)
    head = [*HEAD, *["speedup"] * speeds, *["CPU minutes"] * minutes, "parameters", "commit"]
    return markdown([head, *(_cells(line, speeds, minutes) for line in sorted(lines, key=_order))])


def shows_minutes(lines: Sequence[Line]) -> bool:
    """Whether the table has CPU minutes: on a GPU they are not what training took."""
    return not any(GPU in one.card.conditions.hardware for line in lines for one in line.results)


def by_target(lines: Mapping[str, Sequence[Line]]) -> str:
    """The same with a column for the target, of lines by target; tau and parameters only."""
    rows = [
        [target, line.arm, str(line.steps or ""), str(len(line.results)), *_taus(line), _size(line)]
        for target, chosen in lines.items()
        for line in sorted(chosen, key=_order)
    ]
    return markdown([["target", *HEAD, "parameters"], *rows])


def timed_alone(card: Scorecard) -> bool:
    """Whether a scorecard's speedup can be compared with others': enough texts, on a machine of its own."""
    conditions = card.conditions
    enough = conditions.prompts >= TIMED[0] and conditions.repeats >= TIMED[1]
    return enough and conditions.load_average <= conditions.threads + 0.5


def _cells(line: Line, speeds: bool, minutes: bool) -> list[str]:
    rows = [row for result in line.results if (row := result.row(TEMPERATURES[0]))]
    return [
        line.arm,
        str(line.steps or ""),
        str(len(line.results)),
        *_taus(line),
        *([f"{sum(row.speed for row in rows) / len(rows):.2f}x"] if speeds else []),
        *([f"{line.minutes:.1f}" if line.steps else ""] if minutes else []),
        _size(line),
        ", ".join(dict.fromkeys(one.card.checkpoint.commit[:8] for one in line.results)),
    ]


def differences(lines: Sequence[Line], against: str) -> str:
    """Tau over that of an arm with the same number of steps, for each plan that all lines have.

    Empty where no line can be paired.
    """
    base = {line.steps: line for line in lines if line.arm == against}
    settings = [(plan, t) for plan in lines[0].plans for t in TEMPERATURES]
    settings = [(plan, t) for plan, t in settings if all(plan in line.plans for line in lines)]
    noise = {t: seed_noise(lines, t) for t in TEMPERATURES}
    rows = []
    for line in lines:
        if line.arm != against and line.steps in base:
            found = [difference(line, base[line.steps], t, noise[t], plan) for plan, t in settings]
            if any(found):
                units = ", ".join(dict.fromkeys(one.unit for one in found if one))
                rows.append([line.arm, str(line.steps), *(_text(one, "+.3f") for one in found), units])
    named = [f"{plan}, T={t:g}" for plan, t in settings]
    return markdown([["drafter", "steps", *named, "interval over"], *rows]) if rows else ""


def other_plans(lines: Sequence[Line]) -> str:
    """Tau of every line by plan; empty where each was scored with one."""
    if max(len(line.plans) for line in lines) == 1:
        return ""
    plans = dict.fromkeys(plan for line in lines for plan in line.plans)
    settings = [(plan, temperature) for plan in plans for temperature in TEMPERATURES]
    rows = [
        [line.arm, str(line.steps or ""), *(_value_text(tau(line, t, plan)) for plan, t in settings)]
        for line in lines
    ]
    return markdown([["drafter", "steps", *(f"{plan}, T={t:g}" for plan, t in settings)], *rows])


def _order(line: Line) -> float:
    found = tau(line, TEMPERATURES[0])
    return -found.value if found else 0.0


def _taus(line: Line) -> list[str]:
    return [_text(tau(line, temperature), ".2f") for temperature in TEMPERATURES]


def _size(line: Line) -> str:
    parameters = line.results[0].card.checkpoint.parameters
    return f"{parameters / 1e6:.2f} M" if parameters else ""


def _value_text(estimate: Estimate | None) -> str:
    return f"{estimate.value:.2f}" if estimate else "-"


def _text(estimate: Estimate | None, form: str) -> str:
    return format(estimate, form) if estimate else "-"
