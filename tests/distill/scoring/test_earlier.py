"""What a checkpoint that is scored again knew."""

import json

import pytest

from decode.evaluation.scorecard import Training
from distill.report.compare import earlier


def test_the_step_is_the_folders_name_and_the_time_the_cards(tmp_path):
    folder = tmp_path / "800"
    folder.mkdir()
    (tmp_path / "best").symlink_to("800")
    assert earlier(tmp_path / "best") == Training(800)
    known = {"train_seconds": 61.5, "train_cpu_seconds": 60.5, "train_precision": "32-true", "tau": 2.0}
    (folder / "score.json").write_text(json.dumps({"step": 800, **known}))
    assert earlier(tmp_path / "best") == Training(800, 61.5, 60.5, "32-true")


def test_what_was_given_away_has_lost_its_folders_name(tmp_path):
    (tmp_path / "scorecard.json").write_text(json.dumps({"step": 400, "train_seconds": 7.0}))
    assert earlier(tmp_path) == Training(400, 7.0)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "far", "train_seconds": null, "train_precision": 1}'])
def test_a_card_that_is_none_says_nothing(tmp_path, text):
    (tmp_path / "score.json").write_text(text)
    assert earlier(tmp_path) == Training()
