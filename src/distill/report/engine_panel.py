"""Panel of a report with what an engine measured."""

from __future__ import annotations

from markupsafe import Markup

from decode.evaluation.scorecard import Scorecard
from distill.report import page
from distill.scoring import served


def section(card: Scorecard) -> Markup | None:
    """Compare the engine's figures with the scorecard's; None if no engine was measured."""
    if not card.served:
        return None
    names = ["decode", "T", "batch", "tau here", "tau there", "accepted here", "accepted there", "noise"]
    names += ["tokens/s", "plain", "speedup", "greedy answers", "agrees"]
    lines = [
        [
            one.decode,
            f"{one.temperature:g}",
            str(one.batch_size),
            f"{one.scored_tau:.2f}",
            f"{one.tau:.2f}",
            served.figures(one.scored_survival),
            served.figures(one.survival),
            served.figures(one.noise),
            f"{one.tokens_per_second:.0f}",
            served.NONE if one.plain_tokens_per_second is None else f"{one.plain_tokens_per_second:.0f}",
            served.speed(one),
            served.texts(one),
            "yes" if one.agrees else "NO",
        ]
        for one in card.served
    ]
    caption = (
        f"The same checkpoint, exported and served by {card.served[0].engine}: acceptance by its own "
        "counters; tokens a second over HTTP, prefill included, with the drafter and, in another process, "
        f"without. Noise: the largest difference by chance. {' '.join(served.notes(card))}"
    )
    return page.section("In the engine", page.table(names, lines), caption=caption, wide=True)
