"""Panel of a report with sample texts, coloured by drafted and other tokens."""

from __future__ import annotations

from collections import Counter

from markupsafe import Markup

from decode.evaluation.scorecard import SampleText, SampleToken, Scorecard
from distill.report import page

KINDS = {
    "accepted": "drafted, and kept by the target",
    "corrected": "the target's own, instead of a rejected draft token",
    "plain": "the target's own, where nothing was drafted",
}


def samples(card: Scorecard) -> Markup | None:
    """Sample texts of the scorecard, if any."""
    if not card.samples:
        return None
    legend = Markup("").join(
        Markup('<span class="key"><span class="tok {}">{}</span> {}</span>').format(kind, kind, what)
        for kind, what in KINDS.items()
    )
    caption = (
        "Held-out prompts as the real decoder answers them. Point at a token, or tap it, for its "
        "probability and rank under the target (p) and the drafter (q), at the text's temperature, or at 1 "
        "where that is 0. Blue runs are the gain of drafting."
    )
    return page.section(
        "Texts",
        Markup('<p class="keys">{}</p>').format(legend),
        Markup('<div class="texts">{}</div>').format(Markup("\n").join(map(_text, card.samples))),
        caption=caption,
        wide=True,
    )


def _text(text: SampleText) -> Markup:
    kinds = Counter(token.source for token in text.tokens)
    share = kinds["accepted"] / max(sum(kinds.values()), 1)
    name = text.category or text.id
    return Markup(
        '<article class="text-of"><h3>{} <span class="plain">T={} · {} of {} tokens accepted '
        '({}&nbsp;%)</span></h3><div class="asked">{}</div><div class="written">{}</div></article>'
    ).format(
        name,
        f"{text.temperature:g}",
        kinds["accepted"],
        sum(kinds.values()),
        f"{100 * share:.0f}",
        text.prompt,
        Markup("").join(map(_token, text.tokens)),
    )


def _token(token: SampleToken) -> Markup:
    text, kind, p, p_rank, q, q_rank = token
    lines = [
        f"{text!r}: {KINDS[kind]}",
        f"target p {chance(p)}, rank {p_rank}",
        f"drafter q {chance(q)}{f', rank {q_rank}' if q_rank else ''}" if q is not None else "",
    ]
    tip = "\n".join(line for line in lines if line)
    return Markup('<span class="tok {}" data-tip="{}">{}</span>').format(kind, tip, text)


def chance(value: float) -> str:
    """Format a probability with three decimals, or as a power of ten below 0.001."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}" if value else "0"
