"""foredraft compare --field: a page of all drafters of one target, an upper bound, and recommendations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from decode.errors import UserError
from decode.evaluation.estimates import central_interval, ratio, resampled_sums
from decode.evaluation.rows import Row
from distill.scoring.compare import (
    Choice,
    Scored,
    draft_ms,
    fastest,
    in_order,
    machines,
    minutes,
    target_labels,
)
from distill.scoring.paired import Estimate, speedup, speedup_text
from distill.scoring.tables import markdown, tau_cell
from distill.utils.redact import one_line
from drafters.registry import drafter_class, known_names

SLIGHT = 0.01  # largest share of changed tokens, or nats a token, of a recommended lossy row
HEAD = ["drafter", "decode", "tau", "speedup", "draft, ms", "trained", "parameters", "KV a token", "text"]


class Bound(NamedTuple):
    """Result of choosing the best drafter for each prompt in hindsight.

    Attributes:
        tau: tau with the fewest rounds for each prompt.
        speedup: speedup with the least time for each prompt; None if nothing was timed.
        single: the fastest single drafter on these prompts and its speedup, computed alike; None if untimed.
        shares: name of a drafter -> share of prompts on which it is the fastest.
        prompts: number of answers.
        drafters: number of drafters scored on the same answers.
    """

    tau: Estimate
    speedup: float | None
    single: tuple[str, float] | None
    shares: dict[str, float]
    prompts: int
    drafters: int


def field_page(scored: Sequence[Scored], choice: Choice) -> str:
    """Build the Markdown page.

    Raises:
        UserError: drafters of different targets, or a run that was not scored at this choice.
    """
    if targets := target_labels(scored):
        several = ", ".join(dict.fromkeys(targets.values()))
        raise UserError(f"--field needs runs of one target; these have several: {several}")
    choice = choice._replace(by="tau")
    ordered = in_order(scored, choice)
    first = ordered[0]
    parts = [
        f"# All drafters of {one_line(first.card.checkpoint.target) or 'one target'}",
        "tau: tokens a target pass, with its 95 % interval; replayed on stored answers, or counted by the "
        "decoder (~). Speedup over plain decoding of the same code, interleaved in one process. LOSSY rows "
        "change the text, as their columns show; they are no better drafters.",
    ]
    for temperature in choice.temperatures:
        at = choice._replace(temperatures=[temperature])
        parts += [f"## T={temperature:g}", *_section(in_order(scored, at), at)]
    return "\n\n".join([*parts, one_line("; ".join(machines([s.card for s in ordered])))]) + "\n"


def _section(ordered: Sequence[Scored], choice: Choice) -> list[str]:
    """Table, bound and advice at one temperature."""
    (temperature,) = choice.temperatures
    pairs = [(one, one.rows(choice)[0]) for one in ordered]
    lines = [_line(one, row) for one, row in pairs]
    for one in ordered:
        lines += [_line(one, row) for row in one.lossy(temperature, choice.batch)]
    found = bound(pairs)
    parts = [markdown([HEAD, *lines])]
    if found:
        parts.append(one_line(_about(found)))
    return [*parts, markdown([["when", "take", "because"], *advice(ordered, choice)])]


def _line(scored: Scored, row: Row) -> list[str]:
    checkpoint = scored.card.checkpoint
    text = f"lossless to the {checkpoint.lossless_to}"
    if drift := checkpoint.target_drift:
        text += f": KL {drift.kl:.2g}, likeliest token the same at {drift.top1_agreement:.1%}"
    if row.lossy:
        text = _changes(row)
    return [
        scored.name,
        row.decode,
        tau_cell(row),
        speedup_text(row),
        "-" if row.speedup is None else f"{draft_ms(row):.1f}",
        minutes(checkpoint.train_seconds if checkpoint.step else None),
        f"{checkpoint.parameters / 1e6:.2f} M" if checkpoint.parameters else "-",
        f"{checkpoint.drafter_kv_bytes_per_token} B",
        text,
    ]


def _changes(row: Row) -> str:
    """Describe how much a lossy row changes the text."""
    if (quality := row.quality) is None:
        return "LOSSY, change not measured"
    likelihood, kl, changed, judged = quality.cells()
    parts = [f"log p {likelihood}"]
    parts += [f"KL {kl}"] if quality.kl is not None else []
    parts += [f"{changed} of tokens changed"] if quality.changed is not None else []
    parts += [f"judge {judged}"] if quality.judge is not None else []
    return "LOSSY: " + ", ".join(parts)


# -- the bound -----------------------------------------------------------------------------------


def bound(pairs: Sequence[tuple[Scored, Row]]) -> Bound | None:
    """Choose the best drafter per prompt, among drafters that answered the same prompts with the same text.

    Excludes drafters that run the target itself. A round costs tau / speedup plain passes on average. None
    with fewer than two such drafters.
    """
    named = [
        (one.name, row)
        for one, row in pairs
        if row.counts.tokens and not one.card.checkpoint.target_drift and not _runs_target(one)
    ]
    answers = Counter(tuple(row.counts.tokens) for _, row in named).most_common(1)
    tokens = answers[0][0] if answers else ()  # the most common text: other machines round differently
    named = [(name, row) for name, row in named if tuple(row.counts.tokens) == tokens]
    if len(named) < 2:
        return None
    rounds = np.array([row.counts.rounds for _, row in named])  # (drafters, prompts)
    sums = resampled_sums([list(tokens), rounds.min(0).tolist()]).T
    tau = Estimate(sum(tokens) / float(rounds.min(0).sum()), central_interval(ratio(*sums)))
    timed = [i for i, (_, row) in enumerate(named) if row.speedup and row.tau > 0]
    if not timed:
        return Bound(tau, None, None, {}, len(tokens), len(named))
    price = np.array([named[i][1].tau / named[i][1].speed for i in timed])  # (timed,) plain passes
    passes = rounds[timed] * price[:, None]
    passes = np.concatenate([passes, np.array(tokens, float)[None]])  # plain decoding is a choice too
    names = [*(named[i][0] for i in timed), "plain decoding"]
    winner = np.bincount(passes.argmin(0), minlength=len(names)) / len(tokens)
    shares = {name: float(share) for name, share in zip(names, winner, strict=True) if share}
    totals = passes.sum(1)  # (timed + 1,)
    single = names[totals.argmin()], sum(tokens) / float(totals.min())
    return Bound(tau, sum(tokens) / float(passes.min(0).sum()), single, shares, len(tokens), len(named))


def _about(found: Bound) -> str:
    text = (
        f"**Bound.** Of the {found.drafters} drafters that were scored on the same answers and do not run "
        f"the target itself, choosing the best for each of the {found.prompts} prompts would reach tau "
        f"{found.tau.text('{:.2f}')}"
    )
    if found.speedup is None or found.single is None:
        return text + "."
    shares = sorted(found.shares.items(), key=lambda item: -item[1])
    by = ", ".join(f"{name} on {share:.0%}" for name, share in shares)
    name, speedup = found.single
    return (
        f"{text}, and with the fastest for each, by the average cost of its rounds, {found.speedup:.2f}x: "
        f"{by}. The fastest single drafter, by the same account, is {name} with {speedup:.2f}x. "
        "Choosing again in every round has a higher bound (`foredraft advise`)."
    )


# -- which one ------------------------------------------------------------------------------------


def advice(ordered: Sequence[Scored], choice: Choice) -> list[list[str]]:
    """Recommend drafters: lines of situation, drafter and the deciding numbers."""
    (temperature,) = choice.temperatures
    there = [one for one in ordered if not one.card.checkpoint.target_drift]
    # A target that drafts for itself also spends passes of the target, in proportion to its size.
    pairs = [(one, one.rows(choice)[0]) for one in there if not _runs_target(one)]
    quick = [(one, fastest(one.at(temperature, choice.batch, choice.decode))) for one in there]
    quick = [(one, row) for one, row in quick if row.speedup]
    untrained = [(one, row) for one, row in pairs if not one.card.checkpoint.parameters]
    stateless = [(one, row) for one, row in pairs if not one.card.checkpoint.drafter_kv_bytes_per_token]
    lines = _best("passes of the target count (a GPU, a large target)", pairs, _tau)
    if quick and max(row.speed for _, row in quick) <= 1:
        lines.append(["this machine, as it is", "plain decoding", "no draft was faster"])
    else:
        lines += _best("this machine, as it is", quick, _speed)
    lines += _best("nothing may be trained, and there is no other model", untrained, _tau)
    lines += _best("the drafter may keep no cache", stateless, _tau)
    times = sorted(one.card.checkpoint.train_seconds or 0.0 for one in there if one.card.checkpoint.step)
    if times:
        limit = times[(len(times) - 1) // 2]
        short = [(one, row) for one, row in pairs if (one.card.checkpoint.train_seconds or 0.0) <= limit]
        lines += _best(f"at most {limit / 60:.1f} minutes of training", short, _tau)
    lossy = [(one, row) for one in there for row in one.lossy(temperature, choice.batch)]
    what = f"a divergence of {SLIGHT:g} nats a token" if temperature else f"{SLIGHT:.0%} of the tokens"
    return lines + _best(
        f"{what} may change (LOSSY)", [pair for pair in lossy if _is_slight(pair[1])], _speed
    )


def _best(what: str, among: Sequence[tuple[Scored, Row]], by: Callable[[Row], float]) -> list[list[str]]:
    """The line of the best row; empty if there is none."""
    if not among:
        return []
    one, row = max(among, key=lambda pair: by(pair[1]))
    why = f"tau {tau_cell(row)}, {speedup_text(row)}"
    if by is _speed and (level := _not_slower(row, among)):
        why += f"; not told apart from {', '.join(level)}"
    return [[what, f"{one.name}, {row.decode}", why]]


def _not_slower(best: Row, among: Sequence[tuple[Scored, Row]]) -> list[str]:
    """Names of other rows whose speedup is not below the best one's, by their 95 % intervals.

    A row without an interval, of fewer than five batches, is not told apart from any.
    """
    floor = speedup(best).interval
    names = []
    for one, row in among:
        interval = speedup(row).interval
        if row is not best and (floor is None or interval is None or interval[1] >= floor[0]):
            names.append(one.name)
    return list(dict.fromkeys(names))


def _runs_target(one: Scored) -> bool:
    """Whether the drafter's passes are the target's own."""
    name = one.card.checkpoint.drafter
    return name in known_names() and drafter_class(name).traits.reads_cache


def _tau(row: Row) -> float:
    return row.acceptance.tau


def _speed(row: Row) -> float:
    return row.speed


def _is_slight(row: Row) -> bool:
    """Whether a lossy row changes very little."""
    if row.quality is None:
        return False
    change = row.quality.kl if row.temperature else row.quality.changed
    return change is not None and change <= SLIGHT
