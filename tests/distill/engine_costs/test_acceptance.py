"""Acceptance as stated, and as a scorecard has it."""

import json

import pytest
from fake_engine import a_card, a_row

from decode.errors import UserError
from distill.engine_costs.acceptance import known_acceptance


def test_a_rate_and_shares():
    assert known_acceptance(0.5, None, 0.0, 3).survival == (0.5, 0.25, 0.125)
    assert known_acceptance([0.7, 0.5], None, 0.0, 8).survival == (0.7, 0.5)
    assert known_acceptance(1, None, 0.0, 2).survival == (1.0, 1.0)
    assert known_acceptance(None, None, 0.0, 3) is None


@pytest.mark.parametrize("wrong", [1.2, -0.1, float("nan"), [], [0.5, 0.7], [0.9, 1.1], [[0.5]], ["a"], True])
def test_what_is_no_probability_is_refused(wrong):
    with pytest.raises(UserError, match="acceptance="):
        known_acceptance(wrong, None, 0.0, 3)


@pytest.mark.parametrize("stated", [False, True])
def test_a_scorecards_longest_chain(tmp_path, stated):
    row = a_row()
    path = tmp_path / "score.json"
    path.write_text(json.dumps(a_card(tmp_path, [row])))
    found = known_acceptance(str(path) if stated else None, None if stated else str(path), 0.0, 8)
    assert list(found.survival) == (row["replay"] or row)["survival"]
    assert str(path) in found.source


def test_another_temperature_is_refused(tmp_path):
    path = tmp_path / "score.json"
    path.write_text(json.dumps(a_card(tmp_path, [a_row()])))
    with pytest.raises(UserError, match=r"no chain at T=0.7; score one: foredraft score"):
        known_acceptance(str(path), None, 0.7, 8)
    with pytest.raises(UserError, match=r"no score.json there"):
        known_acceptance(str(tmp_path / "none"), None, 0.0, 8)
