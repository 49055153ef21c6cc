"""scripts/lab/benchmark.py drafters: which runs are made, and what is kept."""

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

from benchmarks.drafter_table import arms, main
from decode.errors import UserError

PLAIN = {"steps": {0: 1}, "words": ["drafter=bigram"]}
TRAINED = {"steps": {4: 2, 8: 2}, "words": ["drafter=eagle"]}


@pytest.fixture(autouse=True)
def _configurations():
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield


def config(tmp_path: Path, given: dict, *overrides: str):
    places = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}"]
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
    given = {"words": ["drafter=eagle", "prompts.sources=[{${model}}]", "score.prompts=3"], "steps": {0: 1}}
    main.drafters(config(tmp_path, {"bigram": PLAIN, "eagle": given}, "device=gpu", "+model=a"), tmp_path)
    assert [w["score.prompts"] for w in runs] == ["12", "3"]
    assert [w["trainer"] for w in runs] == ["gpu", "gpu"]
    assert runs[1]["prompts.sources"] == "[{a}]"


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
        *(("blocks", [f"setting={setting}", "depth=7"]) for setting in ("pocket", "smollm2")),
        *(("blocks", [f"kind={kind}"]) for kind in ("dspark", "diffusion", "p_eagle")),
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
    places = [f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}", "steps=[2,4]"]
    cfg = compose("lab/sweep", overrides=[*places, "of=lm", "only=[drafter.layers]"])
    assert main.drafters(cfg, tmp_path) == 6
    assert [w.get("drafter.layers") for w in runs] == [None, None, "1", "1", "4", "4"]
    for key, value, said in (("only", ["layers"], "only: no option layers"), ("of", "bigram", "of=bigram")):
        cfg[key] = value
        with pytest.raises(UserError, match=said):
            main.drafters(cfg, tmp_path)


def test_results_of_uncommitted_changes_are_refused(tmp_path, runs):
    cfg = config(tmp_path, {"bigram": PLAIN})
    main.drafters(cfg, tmp_path)
    kept = tmp_path / "results" / "bigram-0-0.json"
    kept.write_text(kept.read_text().replace("a" * 12, "a" * 12 + "-dirty"))
    with pytest.raises(UserError, match=r"bigram-0-0\.json: made by uncommitted changes \(a+-dirty\)"):
        main.drafters(cfg, tmp_path)


def test_changes_are_seen_that_a_run_depends_on(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for name in ("src/a.py", "conf/config.yaml", "conf/lab/arms.yaml", "docs/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add files"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(arms, "ROOT", tmp_path)
    for name in ("docs/a.md", "conf/lab/arms.yaml"):
        (tmp_path / name).write_text("2")
    assert arms.uncommitted() == ""
    (tmp_path / "src" / "b.py").write_text("new")
    assert arms.uncommitted() == "src/b.py"
