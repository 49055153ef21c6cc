"""drafter=auto: several families, a budget of seconds, one winner; killed on the way."""

from __future__ import annotations

import html
import json
import os
import time
from itertools import count
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig
from workbench import CONF, Bench, Outcome, changed, fork, leftovers, train

from decode.errors import RemoteError, UserError
from distill.config.compose import compose
from distill.options.run import SearchOptions
from distill.report import history
from distill.scoring.compare import scorecard
from distill.search import search as auto
from distill.search import trials
from distill.search import validate as auto_checks
from distill.search.time_budget import Budget
from distill.utils.run_folder import checkpoints

NAMES = ("eagle", "medusa", "bigram", "lm")
SMALL = (
    "drafter=auto",
    f"drafter.families=[{','.join(NAMES)}]",
    "drafter.options={eagle: {depth: 1}, lm: {path: /nowhere}}",
    "drafter.minutes=0.15",
    "drafter.plans=[{depth: 2}]",
    "drafter.answers=2",
    "drafter.tokens=4",
    "score.replay_prompts=4",
    "score.batch_sizes=[2]",
)
SECONDS, TICK = 9.0, 0.08


def timed(patch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a tick whenever it is read: how busy the machine is decides nothing."""
    ticks = count()

    def clock() -> float:
        return TICK * next(ticks)

    patch.setattr(auto.Search.__init__, "__defaults__", (clock,))
    patch.setattr(Budget.__init__, "__defaults__", (0, 0.3, clock))
    patch.setattr(auto, "process_age", time.monotonic)  # the budget begins at 0


def search(bench: Bench, *more: str) -> Outcome:
    keys = {o.partition("=")[0] for o in more}
    own = [o for o in [*bench.command, *SMALL] if o.partition("=")[0] not in {"drafter.depth", *keys}]
    return train([*own, *more])


def record_of(folder: Path) -> dict:
    return json.loads((folder / "auto.json").read_text())


@pytest.fixture(scope="module")
def killed(bench) -> Path:
    """The run's folder, left by a kill in the second family's first rung."""

    def body() -> int:
        timed(pytest.MonkeyPatch())
        job = trials.train

        def train_or_die(cfg, folder, *rest):
            if folder.name == "medusa":
                os.kill(os.getpid(), 9)
            return job(cfg, folder, *rest)

        trials.train = train_or_die
        return search(bench).code

    assert fork(body) == 9
    (folder,) = bench.runs()
    return folder


@pytest.fixture(scope="module")
def done(bench, killed) -> Outcome:
    """The same command again."""
    note = killed / trials.FOLDER / "eagle" / "rung-1.json"
    begun = note.stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        timed(patch)
        outcome = search(bench).succeeded()
    assert note.stat().st_mtime_ns == begun, "trained again"
    return outcome


@pytest.mark.proof
def test_killed_search_is_resumed_in_its_folder_and_keeps_its_budget(killed, done):
    assert done.folder == killed
    assert f"resuming: {killed}" in done.out
    assert 0.6 * SECONDS < record_of(killed)["spent"] < SECONDS + 20 * TICK, "about all of it, and no more"
    assert not leftovers(killed)


@pytest.mark.proof
def test_winner_is_the_runs_checkpoint_with_its_scorecard_and_report(done):
    record, card, run = record_of(done.folder), scorecard(done.folder), history.read(done.folder)
    winner = record["result"]["winner"]
    assert card.checkpoint.drafter == run.card.checkpoint.drafter == winner
    # decode was given, so nothing else is tried
    assert (card.headline.batch_size, card.headline.decode, record["result"]["plan"]) == (2, *["chain-2"] * 2)
    steps = [r["steps"] for r in record["rows"] if r["family"] == winner]
    best = done.folder / "checkpoints" / "best"
    assert best.resolve().parts[-3::2] == (winner, str(steps[-1]))
    assert bool(run.curves) == (run.card.checkpoint.step > 0), "the winner's, if it has been trained"
    text = html.unescape((done.folder / "report.html").read_text())
    assert record["result"]["why"] in text
    assert "Families compared" in text
    assert f"report: {done.folder / 'report.html'}" in done.out
    assert f"checkpoint={best}" in done.out


@pytest.mark.proof
def test_families_share_rollouts_and_time_but_for_one_that_cannot_be_built(bench, done):
    assert len(list((bench.root / "outputs" / "rollouts").iterdir())) == 1
    record = record_of(done.folder)
    assert record["given"]["1/eagle"] == record["given"]["1/medusa"]
    for name in ("eagle", "medusa"):
        note = json.loads((done.folder / trials.FOLDER / name / "rung-1.json").read_text())
        assert note["seconds"] == pytest.approx(record["given"]["1/eagle"], abs=20 * TICK)
        assert note["steps"] > 2
        assert len(checkpoints(done.folder / trials.FOLDER / name)) == 1
    (fate,) = (row["fate"] for row in record["rows"] if row["family"] == "lm")
    assert fate.startswith("failed: ")
    for said in (fate, (done.folder / "auto.md").read_text()):
        assert "/nowhere" in said
    assert record["result"]["why"] in done.out


BAD = {
    "drafter.families=[eagle,medussa]": "no such family; choose from bigram",
    "drafter.families=[]": "name at least one family",
    "drafter.options={mlp: {depth: 2}}": "mlp: not among drafter.families",
    "drafter.options=3": "write it as",
    "drafter.plans=[]": "give at least one",
    "drafter.search=1.0": "drafter.search=1.0: must be between 0 and 1",
    "drafter.init_from=somewhere": "set init_from and confidence for a family",
    "score.enabled=false": "needs scores",
    "trainer.devices=2": "set trainer.devices=1",
    "rollout.refresh_every=5": "set rollout.refresh_every=0",
}


@pytest.fixture(scope="module")
def cfg(bench) -> DictConfig:
    return compose(["drafter=auto", "drafter.families=[eagle,ngram]"], CONF)


@pytest.mark.parametrize("wrong", BAD)
def test_impossible_options_are_refused(wrong, cfg, tmp_path):
    key, _, value = wrong.partition("=")
    place = trials.JobContext(CONF, "config", [], [], tmp_path)
    with pytest.raises(UserError) as refused:
        auto_checks.family_names(changed(cfg, SearchOptions, **{key: yaml.safe_load(value)}), place)
    assert BAD[wrong] in str(refused.value)


def test_bad_input_is_one_line_before_any_work(bench, monkeypatch):
    before = bench.runs()
    export = "drafter.families=[bigram,medusa]", "drafter.options={medusa: {token_info: vanilla}}"
    done = search(bench, *export, "export.to=vllm")
    done.refused("no family is left", "no format for drafter 'bigram'", "drafter.token_info=none")
    monkeypatch.setattr(auto.TargetSource, "load", lambda *_, **__: pytest.fail("work has begun"))
    search(bench, "drafter.families=[medusa2]", "drafter.options=null").refused("medusa2 tunes the target")
    for export, said in {
        "export.to=vllm": (
            "no family is left",
            "no format for drafter 'bigram'",
            "no format for drafter 'lstm'",
        ),
        "export.to=nonsense": ("to=nonsense: choose native, vllm",),
        "export.push_to=bad": ("push_to=bad: give owner/name",),
        "export.outtype=q2_k": ("outtype=q2_k: choose f32, f16, bf16, q8_0 or q4_0",),
    }.items():
        search(bench, "drafter.families=[bigram,lstm]", "drafter.options=null", export).refused(*said)
    misspelt = "drafter.families=[eagle]", "drafter.options={eagle: {dpth: 2}}"
    search(bench, *misspelt).refused("did you mean depth?")
    assert bench.runs() == before


def test_launcher_of_other_machines_is_refused_and_joblib_taken(tmp_path):
    place = trials.JobContext(CONF, "config", [], [], tmp_path)
    assert trials.Jobs(place, None).parallel == 1
    two = place._replace(launcher=["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
    assert trials.Jobs(two, None).parallel == 2
    with pytest.raises(UserError, match="leave hydra/launcher"):
        trials.Jobs(place._replace(launcher=["hydra/launcher=submitit_local"]), None)
    GlobalHydra.instance().clear()


def test_values_are_written_as_hydra_reads_them():
    for value in (3, 0.5, True, None, "a,b: it's", [0, 1], [[0], [0, 1]], {"r": 4, "targets": ["a"]}):
        (parsed,) = OverridesParser.create().parse_overrides([f"key={trials.override_value(value)}"])
        assert parsed.value() == value or str(parsed.value()) == value


def test_export_that_fails_after_a_search_leaves_the_search_whole(bench, monkeypatch):
    def cut(*args):
        raise RemoteError("cut off")

    monkeypatch.setattr("distill.export.write", cut)
    timed(monkeypatch)
    done = search(bench, "drafter.families=[bigram]", "drafter.options={}", "export.to=native", "seed=42")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "export: cut off; the run itself is whole" in done.err
    folder = bench.runs()[-1]
    assert record_of(folder)["result"]["winner"] == "bigram"
    assert (folder / "report.html").exists()


def test_family_has_the_depth_that_is_best_by_the_clock_unless_given(tmp_path):
    context = trials.JobContext(CONF, "config", ["drafter=auto"], [], tmp_path)
    for options, depth in ("{}", 1), ("{eagle: {window: 8}}", 1), ("{eagle: {depth: 3}}", 3):
        more = ["drafter=auto", "drafter.families=[mlp,eagle]", f"drafter.options={options}"]
        _, runs = auto_checks.family_jobs(changed(compose(more, CONF), SearchOptions), context)
        assert (runs["eagle"].drafter.depth, list(runs)) == (depth, ["mlp", "eagle"])
