"""The page of results: their table, differences to one arm, other plans, and what each budget buys."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.drafter_table.table import TEMPERATURES, Line, markdown, table

BUDGETS = (0, 1, 2, 4, 8, 16, 32)  # CPU minutes
NAMED = 3  # drafters that are named for a budget


def page(title: str, lines: Sequence[Line], left_out: Sequence[str], picture: str, against: str = "") -> str:
    """The page as Markdown.

    Args:
        title: its first line.
        lines: of the table, in order.
        left_out: a line on each result that is not in the table.
        picture: name of the plot next to the page.
        against: the arm that the others are compared with, seed by seed; "": none.
    """
    results = [result for line in lines for result in line.results]
    headlines = [result.row(TEMPERATURES[0]) for result in results]
    plans = dict.fromkeys(row.decode for row in headlines)
    replayed = dict.fromkeys(str(len(row.counts.tokens)) for row in headlines)
    machines = dict.fromkeys(result.card.conditions.hardware for result in results)
    dtypes = dict.fromkeys(result.card.conditions.dtype for result in results)
    parts = [
        f"# {title}",
        table(lines),
        f"{', '.join(plans)}, match rule, {', '.join(dtypes)}. tau and s_j (T=0): replayed on the target's "
        f"answers to {', '.join(replayed)} held-out prompts; the interval is 95 %, of one seed over prompts, "
        "of several that of their mean (Student's t). Speedup over plain decoding, T=0, batch 1, on a "
        "machine that may have been busy. CPU minutes: of the training steps; on a GPU, of its host.",
        f"Machines: {'; '.join(machines)}.",
        *left_out,
    ]
    if against and (compared := differences(lines, against)):
        parts += [f"## Over {against}, paired by seed", compared]
    if others := other_plans(lines):
        parts += ["## Other drafts of the same checkpoints", others]
    parts += ["## What CPU minutes buy", budgets(lines), f"![tau over CPU minutes]({picture})"]
    return "\n\n".join(parts) + "\n"


def differences(lines: Sequence[Line], against: str) -> str:
    """A table of tau over that of an arm with the same number of steps; empty where seeds do not meet."""
    base = {line.steps: line for line in lines if line.arm == against}
    settings = _settings(lines)
    rows = []
    for line in lines:
        if line.arm != against and line.steps in base:
            found = [line.over(base[line.steps], temperature, plan) for plan, temperature in settings]
            if any(found):
                rows.append([line.arm, str(line.steps), *(f"{one:+.3f}" if one else "-" for one in found)])
    return markdown([["drafter", "steps", *_named(settings)], *rows]) if rows else ""


def other_plans(lines: Sequence[Line]) -> str:
    """A table of tau by plan; empty where each was scored with one."""
    if max(len(line.plans) for line in lines) == 1:
        return ""
    plans = dict.fromkeys(plan for line in lines for plan in line.plans)
    settings = [(plan, temperature) for plan in plans for temperature in TEMPERATURES]
    rows = [
        [
            line.arm,
            str(line.steps or ""),
            *(
                f"{line.tau(temperature, plan):.2f}" if plan in line.plans else "-"
                for plan, temperature in settings
            ),
        ]
        for line in lines
    ]
    return markdown([["drafter", "steps", *_named(settings)], *rows])


def _settings(lines: Sequence[Line]) -> list[tuple[str, float]]:
    """Plans that all lines were scored with, at each temperature."""
    shared = [plan for plan in lines[0].plans if all(plan in line.plans for line in lines)]
    return [(plan, temperature) for plan in shared for temperature in TEMPERATURES]


def _named(settings: Sequence[tuple[str, float]]) -> list[str]:
    return [f"{plan}, T={temperature:g}" for plan, temperature in settings]


def budgets(lines: Sequence[Line]) -> str:
    """A table of the longest acceptance that each number of CPU minutes buys."""
    rows = [["CPU minutes", *(f"longest acceptance, T={t:g}" for t in TEMPERATURES)]]
    seen = 0
    for budget in BUDGETS:
        within = [line for line in lines if line.minutes <= budget]
        if len(within) > seen:  # a larger budget that buys nothing else has no row
            rows.append([str(budget) if budget else "none", *(_best(within, t) for t in TEMPERATURES)])
        seen = len(within)
    return markdown(rows)


def _best(lines: Sequence[Line], temperature: float) -> str:
    """The drafters with the longest acceptance, each with the number of steps that serves it best."""
    best = {line.arm: line for line in sorted(lines, key=lambda line: line.tau(temperature).value)}
    order = sorted(best.values(), key=lambda line: -line.tau(temperature).value)
    return ", ".join(
        f"{line.arm} {line.tau(temperature).value:.2f}" + (f" ({line.steps} steps)" if line.steps else "")
        for line in order[:NAMED]
    )
