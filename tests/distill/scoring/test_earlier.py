"""Training of a checkpoint that is scored again."""

import json

import pytest

from decode.evaluation.scorecard import Training
from distill.scoring.compare import earlier


def test_step_and_training_time_are_known_from_folder_and_card(tmp_path):
    folder = tmp_path / "800"
    folder.mkdir()
    (tmp_path / "best").symlink_to("800")
    assert earlier(tmp_path / "best") == Training(800)
    known = {"train_seconds": 61.5, "train_cpu_seconds": 60.5, "train_precision": "32-true", "tau": 2.0}
    (folder / "score.json").write_text(json.dumps({"step": 800, **known}))
    assert earlier(tmp_path / "best") == Training(800, 61.5, 60.5, "32-true")
    (tmp_path / "scorecard.json").write_text(json.dumps({"step": 400, "train_seconds": 7.0}))  # exported
    assert earlier(tmp_path) == Training(400, 7.0)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "far", "train_seconds": null, "train_precision": 1}'])
def test_a_damaged_card_is_ignored(tmp_path, text):
    (tmp_path / "score.json").write_text(text)
    assert earlier(tmp_path) == Training()
