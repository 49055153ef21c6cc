"""What is said of the fastest draft: its speedup and what limits it, or that plain decoding is faster."""

from __future__ import annotations

import cards
import pytest

from distill.report import panels, tables
from distill.report.bottleneck import bottleneck
from distill.training.checkpointing import _rank, _summary
from distill.utils.atomic_files import write_json


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


# -- plain decoding is the fastest ---------------------------------------------------------------

TIMING = {"seconds": [2.5] * 6, "tokens": [100] * 6, "plain_seconds": [2.0] * 6, "plain_tokens": [100] * 6}
SLOW = cards.row(
    0.0, decode="chain-3", tau=2.5, speedup=0.8, draft_share=0.4, verify_share=0.55, timing=TIMING
)
SLOWER = cards.row(0.0, decode="tree-8", tau=2.9, speedup=0.7, draft_share=0.4, verify_share=0.55)
PLAIN = cards.row(
    0.0, decode="plain", nodes=0, tau=1.0, speedup=1.02, survival=[], alpha=[], offered=[], draft_share=0.0
)


@pytest.mark.parametrize("rows", [[SLOWER, SLOW], [PLAIN, SLOWER, SLOW]], ids=["draft", "decode=auto"])
def test_where_plain_decoding_is_the_fastest_the_user_reads_not_to_draft(rows, tmp_path):
    one = cards.card_of(rows)
    assert not one.pays
    assert bottleneck(one).startswith(
        "do not draft: none is faster than plain decoding on this machine; the fastest, chain-3, is 0.80x "
        "(0.80..0.80): a round writes 2.50 tokens for the time of 3.12 plain ones (verifying 1.72, drafting "
        "1.25, the rest 0.16); its limit is drafting"
    )
    page = str(panels.headline(one))
    assert ">none<" in page
    assert "do not draft here; the fastest is 0.80×" in page
    assert "1.02" not in page
    write_json(tmp_path / "score.json", one.to_json())
    line = _summary(4, 8, 1.0, tmp_path)
    assert "tau 2.90  no draft faster than plain (chain-3 0.80x)  audit pass" in line


def test_a_draft_that_pays_is_named_beside_plain_decoding():
    one = cards.card_of([PLAIN, cards.row(0.0, decode="chain-1", speedup=1.1)])
    assert one.pays
    assert bottleneck(one).startswith("1.10x by chain-1: ")
    assert ">1.10×<" in str(panels.headline(one))
    alone = cards.card_of([PLAIN])
    assert not alone.pays
    assert bottleneck(alone) == ""


def test_checkpoints_are_compared_by_a_draft_where_plain_decoding_was_chosen(tmp_path):
    """And one at which a draft won comes before all at which none did."""
    taus = {"a": [PLAIN, SLOW], "b": [PLAIN, SLOWER], "c": [cards.row(0.0, decode="chain-1", tau=1.6)]}
    for name, rows in taus.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "score.json", cards.scorecard(rows))
    (tmp_path / "unscored").mkdir()
    paths = [tmp_path / name for name in ("unscored", "a", "c", "b")]
    assert [path.name for path in sorted(paths, key=_rank)] == ["unscored", "a", "b", "c"]
    chosen = cards.card_of(taus["a"])
    assert tables.headline(chosen).startswith("chain-3 (plain was chosen), T=0, batch 1")
    assert [line[-2:] for line in tables.by_step([chosen])[1]] == [["5%", "pass"]]
