"""What a report reads of a run's folder, which somebody else may have written."""

import json
import os

import pytest

from decode.errors import UserError
from decode.evaluation.scorecard import read_scorecard
from distill.config.recorded import read_config
from distill.report.history import read
from distill.utils.atomic_files import read_json
from drafters.hub.untrusted_files import check_file


@pytest.mark.parametrize("started", ["1e400", "1e17", "-1e18", "NaN", "0"])
def test_a_date_that_is_none_is_left_out(started, tmp_path):
    (tmp_path / "run.json").write_text(f'{{"started": {started}}}')
    assert read(tmp_path).started is None
    (tmp_path / "run.json").write_text('{"started": 1795843720.5}')
    assert read(tmp_path).started == 1795843720.5


def test_names_and_links_that_are_no_steps_are_passed_over(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"started": 1.0}))
    (tmp_path / "checkpoints" / "\u00b2").mkdir(parents=True)
    (tmp_path / "csv" / "from-\u00b2").mkdir(parents=True)
    (tmp_path / "csv" / "from-\u00b2" / "metrics.csv").write_text("step\n1\n")
    best = tmp_path / "checkpoints" / "best"
    for place in ("\u00b2", "best"):
        best.symlink_to(place)
        assert (read(tmp_path).best, read(tmp_path).curves) == (None, {})
        best.unlink()


def test_a_field_without_an_end_keeps_what_stands_before_it(tmp_path):
    (tmp_path / "csv").mkdir()
    text = 'step,train/loss\n0,2.5\n1,"' + "x" * 200_000
    (tmp_path / "csv" / "metrics.csv").write_text(text)
    assert read(tmp_path).curves == {"loss": ([1], [2.5])}


def test_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / ".hydra").mkdir()
    pipe = tmp_path / ".hydra" / "config.yaml"
    os.mkfifo(pipe)
    for reader in (read_scorecard, lambda path: read_json(path, "remove it"), check_file):
        with pytest.raises(UserError, match=r"config\.yaml: "):
            reader(pipe)
    assert read_config(tmp_path) is None
