"""scripts/benchmark.py drafters: which runs are made, what is kept, and which rows may stand together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cards import row, scorecard
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from workbench import CONF

from benchmarks.drafter_table import arms, identical, main
from benchmarks.drafter_table.table import Result, table
from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard

PLAIN = {"steps": [0], "words": ["drafter=bigram"]}
TRAINED = {"steps": [4, 8], "words": ["drafter=eagle"], "seeds": [0, 1]}


def config(tmp_path: Path, given: dict, *overrides: str):
    places = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}", f"table={tmp_path / 'page.md'}"]
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        cfg = compose("benchmark_drafters", overrides=[*places, *overrides])
    cfg.arms = OmegaConf.create(given)
    return cfg


def scored(name: str, tau: float = 2.0, commit: str = "a" * 12, **more) -> dict:
    rows = [row(temperature, tau=tau - temperature / 2, replay=None) for temperature in (0.0, 1.0)]
    trained = {"train_cpu_seconds": 90.0, "train_precision": "bf16"}
    return scorecard(rows, drafter=name, commit=commit, **trained, **more)


@pytest.fixture
def runs(monkeypatch):
    """What train.py was told, which leaves a scorecard at once, or fails."""
    started, real = [], subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:
            return real(command, **options)
        words = dict(word.split("=", 1) for word in command[2:])
        started.append(words)
        if words["drafter"] == "fails":
            return subprocess.CompletedProcess(command, 2)
        best = Path(words["hydra.run.dir"]) / "checkpoints" / "best"
        best.mkdir(parents=True)
        (best / "score.json").write_text(json.dumps(scored(words["drafter"])))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(arms.subprocess, "run", run)
    monkeypatch.setattr(main, "uncommitted", str)
    monkeypatch.setattr(main.Commits, "alike", lambda self, run, commit, other: commit == "a" * 12)
    return started


def test_every_run_is_made_once_and_its_scorecard_kept(tmp_path, runs, capsys):
    cfg = config(tmp_path, {"bigram": PLAIN, "eagle": TRAINED})
    assert main.drafters(cfg, tmp_path) == 5
    names = ["bigram-0-0", "eagle-4-0", "eagle-4-1", "eagle-8-0", "eagle-8-1"]
    assert sorted(path.stem for path in (tmp_path / "results").glob("*-*.json")) == names
    assert [(w.get("trainer.max_steps"), w["seed"]) for w in runs] == [
        (None, "0"),
        *(("4", "0"), ("4", "1"), ("8", "0"), ("8", "1")),
    ]
    assert {w["rollout.seed"] for w in runs} == {"0"}  # of all seeds
    kept = json.loads((tmp_path / "results" / "eagle-4-0.json").read_text())
    assert kept["samples"] == []
    assert "| eagle | 8 | 2 | 2.00 (2.00..2.00) |" in capsys.readouterr().out
    assert "# Every drafter, measured" in (tmp_path / "page.md").read_text()
    main.drafters(cfg, tmp_path)
    assert len(runs) == 5  # nothing is made again


def test_a_run_that_fails_is_told_when_the_others_are_done(tmp_path, runs):
    cfg = config(tmp_path, {"fails": {"words": ["drafter=fails"], "steps": [2]}, "bigram": PLAIN})
    with pytest.raises(UserError, match=r"1 runs have failed: fails-2-0"):
        main.drafters(cfg, tmp_path)
    assert (tmp_path / "results" / "bigram-0-0.json").exists()


def test_no_run_begins_when_the_time_is_over(tmp_path, runs, capsys):
    assert main.drafters(config(tmp_path, {"eagle": TRAINED}, "hours=0"), tmp_path) == 0
    assert not runs
    assert "4 runs are left" in capsys.readouterr().out


def test_what_another_run_reads_is_made_first(tmp_path, runs):
    reads = {"words": ["drafter=union", "drafter.first={runs}/eagle-4-1/checkpoints/best"], "steps": [0]}
    cfg = config(tmp_path, {"union": {**reads, "after": "eagle-4-1"}, "eagle": TRAINED})
    main.drafters(cfg, tmp_path)
    assert [w["drafter"] for w in runs][:2] == ["eagle", "union"]
    assert runs[1]["drafter.first"] == str(tmp_path / "runs" / "eagle-4-1" / "checkpoints" / "best")


def test_rows_of_commits_that_train_otherwise_are_left_out(tmp_path, runs, capsys):
    main.drafters(config(tmp_path, {"bigram": PLAIN, "ngram": PLAIN}), tmp_path)
    other = tmp_path / "results" / "ngram-0-0.json"
    other.write_text(json.dumps(scored("ngram", commit="b" * 12)))
    assert main.drafters(config(tmp_path, {"bigram": PLAIN, "ngram": PLAIN}), tmp_path) == 1
    line = "ngram-0-0 is left out: commit bbbbbbbbbbbb trains or decodes otherwise; run it again."
    assert line in capsys.readouterr().out
    assert line in (tmp_path / "page.md").read_text()


def test_uncommitted_source_is_refused(tmp_path, runs, monkeypatch):
    monkeypatch.setattr(main, "uncommitted", lambda: "src/decode/plan.py")
    with pytest.raises(UserError, match=r"src/decode/plan\.py: commit it first"):
        main.drafters(config(tmp_path, {"bigram": PLAIN}), tmp_path)


@pytest.mark.parametrize(
    ("given", "only", "said"),
    [
        ({"bigram": PLAIN}, "only=[eagel]", "only: no arm eagel; there are bigram"),
        ({"bigram": {**PLAIN, "step": [1]}}, "only=[]", r"arms\.bigram\.step: no such key"),
    ],
)
def test_wrong_arms_are_refused(tmp_path, given, only, said):
    with pytest.raises(UserError, match=said):
        main.drafters(config(tmp_path, given, only), tmp_path)


def test_all_arms_of_the_configuration_compose():
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        cfg = compose("benchmark_drafters")
        for run in arms.planned(cfg):
            compose("config", overrides=[*run.words_in(Path("runs")), *map(str, cfg.common)])


def test_seeds_make_one_row_with_the_interval_of_their_mean():
    cards = [Scorecard.from_json(scored("eagle", tau), "here") for tau in (2.0, 2.1, 2.3)]
    results = [Result(arms.Run("eagle", 8, seed, ()), one) for seed, one in enumerate(cards)]
    (line,) = table(results).splitlines()[2:]
    assert line.startswith("| eagle | 8 | 3 | 2.13 (1.75..2.51) | 1.63 (1.25..2.01) |")
    assert "| 1.5 |" in line  # CPU minutes


def test_commits_with_the_same_source_are_alike_and_others_are_run(tmp_path, monkeypatch):
    run, ran = arms.Run("bigram", 0, 0, ("drafter=bigram",)), []
    commits = identical.Commits(tmp_path, tmp_path, [])
    monkeypatch.setattr(commits, "_digest", lambda run, commit: ran.append(commit) or commit[:1])
    assert commits.alike(run, "HEAD", "HEAD")
    monkeypatch.setattr(identical, "_git", lambda *words: "" if words[2] == "docs" else "src/a.py\n")
    assert commits.alike(run, "docs", "x1")
    assert not ran
    assert commits.alike(run, "x0", "x1")
    assert not commits.alike(run, "y0", "x1")
    assert ran == ["x0", "x1", "y0", "x1"]
    again = identical.Commits(tmp_path, tmp_path, [])  # what was found is kept
    monkeypatch.setattr(again, "_digest", None)
    assert (again.alike(run, "x0", "x1"), again.alike(run, "y0", "x1")) == (True, False)


@pytest.mark.proof
def test_a_commit_is_like_itself(tmp_path):
    """Twice the same short run, in checkouts of their own; another seed gives other weights."""
    commits = identical.Commits(tmp_path, tmp_path, ["decode=chain", "decode.depth=2"])
    run = arms.Run("eagle", 3, 0, ("drafter=eagle",))
    first = commits._digest(run, "HEAD")
    assert commits._digest(run, "HEAD") == first
    assert commits._digest(run._replace(words=("drafter=eagle", "drafter.depth=1")), "HEAD") != first
