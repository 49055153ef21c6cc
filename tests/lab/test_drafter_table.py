"""scripts/lab/benchmark.py drafters: which runs are made, what is kept, and which rows are comparable."""

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
from benchmarks.drafter_table.page import budgets, differences, other_plans, page
from benchmarks.drafter_table.plot import plot
from benchmarks.drafter_table.table import Result, grouped, table
from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard

PLAIN = {"steps": {0: 1}, "words": ["drafter=bigram"]}
TRAINED = {"steps": {4: 2, 8: 2}, "words": ["drafter=eagle"]}


@pytest.fixture(autouse=True)
def _configurations():
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield


def config(tmp_path: Path, given: dict, *overrides: str):
    places = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}", f"table={tmp_path / 'page.md'}"]
    cfg = compose("lab/drafters", overrides=[*places, *overrides])
    cfg.arms = OmegaConf.create(given)
    return cfg


def scored(name: str, tau: float = 2.0, commit: str = "a" * 12, **more) -> dict:
    rows = [row(temperature, tau=tau - temperature / 2, replay=None) for temperature in (0.0, 1.0)]
    trained = {"train_cpu_seconds": 90.0, "train_precision": "bf16"} | more
    return scorecard(rows, drafter=name, commit=commit, **trained)


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
    assert [f"{w['drafter']}-{w.get('trainer.max_steps', 0)}-{w['seed']}" for w in runs] == names
    assert {w["rollout.seed"] for w in runs} == {"0"}  # of all seeds
    kept = json.loads((tmp_path / "results" / "eagle-4-0.json").read_text())
    assert kept["samples"] == []
    assert "| eagle | 8 | 2 | 2.00 (2.00..2.00) |" in capsys.readouterr().out
    assert "# Every drafter, measured" in (tmp_path / "page.md").read_text()
    main.drafters(cfg, tmp_path)
    assert len(runs) == 5  # nothing is made again


def test_no_run_begins_when_the_time_is_over_and_a_failed_one_is_reported_last(tmp_path, runs, capsys):
    assert main.drafters(config(tmp_path, {"eagle": TRAINED}, "hours=0"), tmp_path) == 0
    assert not runs
    assert "4 runs are left" in capsys.readouterr().out
    cfg = config(tmp_path, {"fails": {"words": ["drafter=fails"], "steps": {2: 1}}, "bigram": PLAIN})
    with pytest.raises(UserError, match=r"1 runs have failed: fails-2-0"):
        main.drafters(cfg, tmp_path)
    assert (tmp_path / "results" / "bigram-0-0.json").exists()


def test_what_another_run_reads_is_made_first(tmp_path, runs):
    reads = {"words": ["drafter=union", "drafter.first={runs}/eagle-4-1/checkpoints/best"], "steps": {0: 1}}
    cfg = config(tmp_path, {"union": {**reads, "after": "eagle-4-1"}, "eagle": TRAINED})
    main.drafters(cfg, tmp_path)
    assert [w["drafter"] for w in runs][:2] == ["eagle", "union"]
    assert runs[1]["drafter.first"] == str(tmp_path / "runs" / "eagle-4-1" / "checkpoints" / "best")


def test_arm_overrides_common_options_and_the_device(tmp_path, runs):
    given = {"words": ["drafter=eagle", "prompts.sources=[{${title}}]", "score.prompts=3"], "steps": {0: 1}}
    main.drafters(config(tmp_path, {"bigram": PLAIN, "eagle": given}, "device=gpu", "title=a"), tmp_path)
    assert [w["score.prompts"] for w in runs] == ["12", "3"]
    assert [w["trainer"] for w in runs] == ["gpu", "gpu"]
    assert runs[1]["prompts.sources"] == "[{a}]"


def test_rows_of_incompatible_commits_are_left_out(tmp_path, runs, capsys):
    main.drafters(config(tmp_path, {"bigram": PLAIN, "ngram": PLAIN}), tmp_path)
    other = tmp_path / "results" / "ngram-0-0.json"
    other.write_text(json.dumps(scored("ngram", commit="b" * 12)))
    assert main.drafters(config(tmp_path, {"bigram": PLAIN, "ngram": PLAIN}), tmp_path) == 1
    line = "ngram-0-0 is left out: commit bbbbbbbbbbbb"
    assert line in capsys.readouterr().out
    assert line in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize(
    ("arm", "only", "changed", "message"),
    [
        (PLAIN, "only=[eagel]", "", "only: no arm eagel; there are bigram"),
        (PLAIN | {"step": [1]}, "only=[]", "", r"arms\.bigram\.step: no such key"),
        (PLAIN, "only=[]", "src/decode/plan.py", r"src/decode/plan\.py: commit it first"),
    ],
)
def test_wrong_arms_and_changed_source_are_refused(tmp_path, runs, monkeypatch, arm, only, changed, message):
    monkeypatch.setattr(main, "uncommitted", lambda: changed)
    with pytest.raises(UserError, match=message):
        main.drafters(config(tmp_path, {"bigram": arm}, only), tmp_path)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, []) for name in ("distillspec", "drafters", "smollm2")),
        *(("objectives", [f"setting={setting}"]) for setting in ("pocket", "hf_dllm", "smollm2")),
    ],
)
def test_all_arms_of_the_configuration_compose(name, overrides):
    cfg = compose(f"lab/{name}", overrides=overrides)
    runs = arms.planned(cfg)
    assert {run.after for run in runs} <= {run.name for run in runs} | {""}
    for run in runs:
        shared = map(str, [*cfg.also, *cfg.common])
        compose("config", overrides=[*shared, *run.words_in(Path("runs"))])


def test_all_options_of_a_sweep_compose():
    for drafter in compose("lab/sweep").options:
        cfg = compose("lab/sweep", overrides=[f"of={drafter}"])
        runs = arms.planned(cfg)
        assert runs[0].words == (f"drafter={drafter}",)
        for words in {run.words for run in runs}:
            compose("config", overrides=[*words, *map(str, cfg.common)])


def test_a_sweep_changes_one_option_at_a_time(tmp_path, runs):
    places = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}", "table=''", "steps=[2,4]"]
    cfg = compose("lab/sweep", overrides=[*places, "of=lm", "only=[drafter.layers]"])
    assert main.drafters(cfg, tmp_path) == 6
    assert [w.get("drafter.layers") for w in runs] == [None, None, "1", "1", "4", "4"]
    for key, value, said in (("only", ["layers"], "only: no option layers"), ("of", "bigram", "of=bigram")):
        cfg[key] = value
        with pytest.raises(UserError, match=said):
            main.drafters(cfg, tmp_path)


def result(arm: str, steps: int, seed: int, tau: float, **more) -> Result:
    return Result(arms.Run(arm, steps, seed, ()), Scorecard.from_json(scored(arm, tau, **more), "here"))


def test_seeds_are_averaged_with_an_interval():
    results = [result("eagle", 8, seed, tau) for seed, tau in enumerate((2.0, 2.1, 2.3))]
    (line,) = table(grouped(results)).splitlines()[2:]
    assert line.startswith("| eagle | 8 | 3 | 2.13 (1.75..2.51) | 1.63 (1.25..2.01) |")
    assert "| 1.5 |" in line  # CPU minutes


def test_arms_are_compared_seed_by_seed():
    base = [result("nll", 8, seed, tau) for seed, tau in enumerate((2.0, 2.2))]
    # The third has no partner.
    mine = [result("streak", 8, seed, tau) for seed, tau in enumerate((2.1, 2.3, 9.0))]
    unpaired = [result("decay", 8, 0, 2.5), result("start", 16, 0, 2.0)]
    lines = differences(grouped([*base, *mine, *unpaired]), "nll").splitlines()
    assert lines[2:] == [lines[2]]
    assert lines[2].startswith("| streak | 8 | +0.100 (+0.100..+0.100) | +0.100 (+0.100..+0.100)")
    assert differences(grouped(unpaired), "nll") == ""


def test_plan_without_a_score_is_a_dash():
    def line(arm: str, *plans: str) -> Result:
        rows = [row(t, tau=2 - t / 2, replay=None, decode=plan) for plan in plans for t in (0.0, 1.0)]
        return Result(arms.Run(arm, 8, 0, ()), Scorecard.from_json(scorecard(rows, drafter=arm), "here"))

    found = other_plans(grouped([line("eagle", "tree-16", "chain-3"), line("prompt", "chain-2")]))
    rows = [row.strip("| ").split(" | ") for row in found.splitlines()]
    plans = ("tree-16", "chain-3", "chain-2")
    assert rows[0] == ["drafter", "steps", *(f"{plan}, T={t}" for plan in plans for t in (0, 1))]
    values = {name: [cell[:4] for cell in cells] for name, _, *cells in rows[2:]}
    assert values["eagle"] == ["2.00", "1.50", "2.00", "1.50", "-", "-"]
    assert values["prompt"] == ["-", "-", "-", "-", "2.00", "1.50"]
    assert other_plans(grouped([line("eagle", "tree-16"), line("prompt", "chain-2")])) == ""


def test_a_budget_names_the_best_that_it_pays_for():
    free = result("bigram", 0, 0, 1.5, train_cpu_seconds=None)
    short = [result("eagle", 8, 0, 2.0), result("mlp", 8, 0, 1.8), result("eagle", 4, 0, 1.9)]  # 1.5 minutes
    rows = budgets(grouped([*short, free])).splitlines()[2:]
    assert rows == [
        "| none | bigram 1.50 | bigram 1.00 |",
        "| 2 | eagle 2.00 (8 steps), mlp 1.80 (8 steps), bigram 1.50 | "
        "eagle 1.50 (8 steps), mlp 1.30 (8 steps), bigram 1.00 |",
    ]


def test_page_shows_a_reproducible_plot(tmp_path):
    lines = grouped([result("eagle", 8, 0, 2.0), result("eagle", 4, 0, 1.8), result("bigram", 0, 0, 1.5)])
    for name in ("a.svg", "b.svg"):
        plot(lines, (0.0, 1.0), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "bigram" in text == (tmp_path / "b.svg").read_text()
    assert "(a.svg)" in page("Title", lines, [], "a.svg")


def test_commits_of_other_source_are_compared_by_a_short_run(tmp_path, monkeypatch):
    run, ran = arms.Run("bigram", 0, 0, ("drafter=bigram",)), []
    given = {"x0": {"src/a": "1"}, "x1": {"src/a": "2"}, "y0": {"src/a": "3"}, "docs": {"src/a": "2"}}
    given["data"] = {"src/a": "2", identical.ANSWERS[0]: "4"}
    monkeypatch.setattr(identical, "_source", given.__getitem__)

    def commits() -> identical.Commits:
        made = identical.Commits(tmp_path, tmp_path, [])
        monkeypatch.setattr(made, "_run_commit", lambda run, commit: ran.append(commit) or commit[:1])
        return made

    first = commits()
    assert first.alike(run, "HEAD", "HEAD")
    assert first.alike(run, "docs", "x1")
    assert not first.alike(run, "data", "x1")  # other answers, which a short run would not see
    assert not ran
    assert first.alike(run, "x0", "x1")
    assert not first.alike(run, "y0", "x1")
    assert ran == ["x0", "x1", "y0"], "each source once"
    again = commits()  # what was found is kept
    assert (again.alike(run, "x0", "docs"), again.alike(run, "y0", "x1")) == (True, False)
    assert len(ran) == 3
    elsewhere = commits()  # other kernels round otherwise
    elsewhere.machine = "another"
    assert elsewhere.alike(run, "x0", "x1")
    assert len(ran) == 5


def test_commit_that_cannot_run_an_arm_differs(tmp_path, monkeypatch, capsys):
    sources = {"old": {"src/a": "1"}, "older": {"src/a": "2"}, "new": {"src/a": "3"}}
    monkeypatch.setattr(identical, "_source", sources.__getitem__)
    monkeypatch.setattr(identical, "_git", lambda *words: "")
    failed = subprocess.CompletedProcess([], 2, "", "error: drafter=lookahead: unknown")
    monkeypatch.setattr(identical.subprocess, "run", lambda *words, **options: failed)
    commits = identical.Commits(tmp_path, tmp_path, [])
    run = arms.Run("lookahead", 0, 0, ("drafter=lookahead",))
    assert not commits.alike(run, "old", "new")
    assert not commits.alike(run, "old", "older")
    assert "lookahead-0-0: its short run has failed at old" in "".join(capsys.readouterr())
    assert not commits.file.exists()


def test_the_source_of_a_commit_is_what_runs_depend_on():
    files = identical._source("HEAD")
    assert {"src/distill/train.py", "conf/config.yaml", "data/pocket/model.safetensors"} <= files.keys()
    assert not any(path.startswith(("conf/lab/", "docs/", "tests/")) for path in files)


@pytest.mark.proof
def test_a_commit_is_like_itself(tmp_path):
    """Twice the same short run, in checkouts of their own; another seed gives other weights."""
    commits = identical.Commits(tmp_path, tmp_path, ["decode=chain", "decode.depth=2"])
    run = arms.Run("eagle", 3, 0, ("drafter=eagle",))
    first = commits._run_commit(run, "HEAD")
    assert commits._run_commit(run, "HEAD") == first
    assert commits._digest(run._replace(words=("drafter=eagle", "drafter.depth=1")), "HEAD") != first
