"""The fastest draft of a scorecard, and what limits its speedup."""

from __future__ import annotations

import re

import cards
import pytest

from distill.report import panels
from distill.report.bottleneck import bottleneck
from distill.scoring import tables
from distill.training.checkpointing import _rank, _summary
from distill.utils.atomic_files import write_json


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        # A round of 2 plain passes: 1.2 verify, 0.6 draft, 0.2 the rest.
        ((3.0, 1.5, 0.3, 0.6), r"2\.00 .* 1\.20, .* 0\.60, .* 0\.20.* limit is drafting; .* 2\.14x"),
        ((3.0, 1.5, 0.05, 0.9), r"1\.80, .* 0\.10, .* 0\.10.* limit is verifying; .* 2\.50x"),
        ((1.5, 1.1, 0.3, 0.6), "limit is acceptance"),
        ((0.0, 0.0, 0.0, 0.0), "^$"),
    ],
)
def test_the_largest_cost_or_low_acceptance_is_named(shares, said):
    one = dict(zip(("tau", "speedup", "draft_share", "verify_share"), shares, strict=True))
    assert re.search(said, bottleneck(cards.card_of([cards.row(0.0, **one)])))


def test_the_fastest_draft_is_lossless_and_of_the_first_setting():
    rows = [
        cards.row(0.0, decode="tree-16", speedup=1.2),
        cards.row(0.0, decode="tree-8", speedup=1.5),
        cards.row(0.0, decode="typical", speedup=1.9, lossy=True),
        cards.row(1.0, decode="hybrid", speedup=1.8),
        cards.row(0.0, decode="wide", speedup=1.7, batch_size=8),
    ]
    assert cards.card_of(rows).fastest.decode == "tree-8"
    assert bottleneck(cards.card_of(rows)).startswith("1.50x by tree-8: ")


TIMING = {"seconds": [2.5] * 6, "tokens": [100] * 6, "plain_seconds": [2.0] * 6, "plain_tokens": [100] * 6}
SHARES = {"draft_share": 0.4, "verify_share": 0.55}
SLOW = cards.row(0.0, decode="chain-3", tau=2.5, speedup=0.8, timing=TIMING, **SHARES)
SLOWER = cards.row(0.0, decode="tree-8", tau=2.9, speedup=0.7, **SHARES)
NOTHING = {"nodes": 0, "survival": [], "alpha": [], "offered": [], "draft_share": 0.0}
PLAIN = cards.row(0.0, decode="plain", tau=1.0, speedup=1.02, **NOTHING)


@pytest.mark.parametrize("rows", [[SLOWER, SLOW], [PLAIN, SLOWER, SLOW]], ids=["draft", "decode=auto"])
def test_no_draft_is_advised_where_plain_is_fastest(rows, tmp_path):
    one = cards.card_of(rows)
    assert not one.pays
    said = bottleneck(one)
    assert said.startswith("do not draft: ")
    assert "chain-3, is 0.80x (0.80..0.80): a round writes 2.50 tokens in the time of 3.12 plain" in said
    page = str(panels.headline(one))
    assert ">none<" in page
    assert "0.80×" in page
    assert "1.02" not in page
    write_json(tmp_path / "score.json", one.to_json())
    line = _summary(4, 8, 1.0, tmp_path)
    assert "tau 2.90  no draft faster than plain (chain-3 0.80x)  audit pass" in line


def test_a_draft_that_pays_is_named_next_to_plain_decoding():
    one = cards.card_of([PLAIN, cards.row(0.0, decode="chain-1", speedup=1.1)])
    assert one.pays
    assert bottleneck(one).startswith("1.10x by chain-1: ")
    assert ">1.10×<" in str(panels.headline(one))
    plain = cards.card_of([PLAIN])
    assert not plain.pays
    assert bottleneck(plain) == ""


def test_a_checkpoint_whose_draft_pays_is_better_than_all_others(tmp_path):
    """The others are ranked by the draft, even where plain decoding was chosen."""
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
