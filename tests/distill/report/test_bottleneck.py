"""The line that says what limits the speedup, and the row that it is about."""

from __future__ import annotations

import cards
import pytest

from distill.report.bottleneck import bottleneck


def card(tau, speedup, draft, verify, **more):
    return cards.card_of(
        [cards.row(0.0, tau=tau, speedup=speedup, draft_share=draft, verify_share=verify, **more)]
    )


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (
            # a round of 2 plain passes: 1.2 verify, 0.6 draft, 0.2 the rest
            card(3.0, 1.5, 0.3, 0.6),
            "time of 2.00 plain ones (verifying 1.20, drafting 0.60, the rest 0.20); its limit is drafting; "
            "if drafting cost nothing: 2.14x; try a shorter draft",
        ),
        (
            card(3.0, 1.5, 0.05, 0.9),
            "(verifying 1.80, drafting 0.10, the rest 0.10); its limit is verifying; if verifying cost one "
            "pass: 2.50x; try fewer nodes",
        ),
        (card(1.5, 1.1, 0.3, 0.6), "its limit is acceptance; try train longer"),
    ],
)
def test_the_largest_cost_or_low_acceptance_is_named(one, says):
    assert says in bottleneck(one)


def test_nothing_is_said_of_a_run_that_decoded_nothing():
    assert bottleneck(card(0.0, 0.0, 0.0, 0.0)) == ""


def test_it_is_about_the_fastest_lossless_row_at_the_headlines_temperature_and_batch():
    rows = [
        cards.row(0.0, decode="tree-16", speedup=1.2),
        cards.row(0.0, decode="tree-8", speedup=1.5),
        cards.row(0.0, decode="typical", speedup=1.9, lossy=True),
        cards.row(1.0, decode="hybrid", speedup=1.8),
        cards.row(0.0, decode="wide", speedup=1.7, batch_size=8),
    ]
    assert cards.card_of(rows).fastest.decode == "tree-8"
    assert cards.card_of(rows[:1]).fastest.decode == "tree-16"
    assert bottleneck(cards.card_of(rows)).startswith("1.50x by tree-8: ")
