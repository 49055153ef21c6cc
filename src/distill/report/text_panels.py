"""The panel of a report that shows texts, every token in the colour of where it came from."""

from __future__ import annotations

from collections import Counter
from typing import Any

from markupsafe import Markup

from distill.report import page

KINDS = {
    "accepted": "drafted, and kept by the target",
    "corrected": "the target's own, in place of what was drafted",
    "plain": "the target's own where nothing was drafted",
}


def samples(card: dict[str, Any]) -> Markup | None:
    """Texts of the scorecard, if it has any."""
    texts = card.get("samples")
    if not texts:
        return None
    legend = Markup("").join(
        Markup('<span class="key"><span class="tok {}">{}</span> {}</span>').format(kind, kind, what)
        for kind, what in KINDS.items()
    )
    says = (
        "Held-out prompts as the real decoder answers them. Point at a token, or tap it, for its "
        "probability and rank under the target (p) and the drafter (q), at the text's temperature, or at 1 "
        "where that is 0. Runs of blue are what drafting gains."
    )
    return page.section(
        "Texts",
        Markup('<p class="keys">{}</p>').format(legend),
        Markup('<div class="texts">{}</div>').format(Markup("\n").join(map(_text, texts))),
        says=says,
        wide=True,
    )


def _text(text: dict[str, Any]) -> Markup:
    kinds = Counter(token[1] for token in text["tokens"])
    share = kinds["accepted"] / max(sum(kinds.values()), 1)
    name = text["category"] or text["id"]
    return Markup(
        '<article class="text-of"><h3>{} <span class="plain">T={} · {} of {} tokens accepted '
        '({}&nbsp;%)</span></h3><div class="asked">{}</div><div class="written">{}</div></article>'
    ).format(
        name,
        f"{text['temperature']:g}",
        kinds["accepted"],
        sum(kinds.values()),
        f"{100 * share:.0f}",
        text["prompt"],
        Markup("").join(_token(*token) for token in text["tokens"]),
    )


def _token(text: str, kind: str, p: float, p_rank: int, q: float | None, q_rank: int | None) -> Markup:
    lines = [
        f"{text!r}: {KINDS[kind]}",
        f"target p {chance(p)}, rank {p_rank}",
        f"drafter q {chance(q)}{f', rank {q_rank}' if q_rank else ''}" if q is not None else "",
    ]
    tip = "\n".join(line for line in lines if line)
    return Markup('<span class="tok {}" data-tip="{}">{}</span>').format(kind, tip, text)


def chance(value: float) -> str:
    """A probability, in as many digits as tell it from 0."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value else "0"
