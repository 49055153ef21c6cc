"""Targets that only an engine can decode: trained, replayed, exported; refused where drafts are verified."""

import json

import pytest
from elsewhere import REASONS, TARGETS
from workbench import Outcome, foredraft, train

from decode.evaluation.scorecard import read_scorecard
from distill.loggers.base import COLUMNS, rows, scalars

IN_CI = ("hybrid", "fp8")


@pytest.fixture(
    scope="module", params=[pytest.param(k, marks=() if k in IN_CI else pytest.mark.proof) for k in TARGETS]
)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(bench, kind):
    return TARGETS[kind](bench.root / kind)


@pytest.fixture(scope="module")
def done(bench, target) -> Outcome:
    return bench.train(f"target={target}", "export.to=vllm").succeeded()


def test_it_is_trained_scored_by_replay_and_exported(done, kind):
    assert done.out.count("only an engine can verify drafts") == 1
    assert REASONS[kind] in done.out
    assert "decoded by an engine  chain-3, T=0, batch 1  audit not run\n" in done.out
    for step in (3, 6):
        card = read_scorecard(done.folder / "checkpoints" / str(step) / "score.json")
        assert card.rows[0].exact
        assert (card.headline.speedup, card.audit, card.samples) == (None, None, [])
        assert card.rows[0].replay.prompts == 4
    assert (done.folder / "checkpoints" / "best").exists()
    (exported,) = (done.folder / "export").iterdir()
    assert json.loads((exported / "config.json").read_text())["architectures"]
    assert "foredraft generate" not in done.out  # which verifies drafts


def test_reports_say_that_an_engine_decodes(done, kind, capsys):
    best = done.folder / "checkpoints" / "best"
    report = (done.folder / "report.html").read_text()
    assert "decoded by an engine" in report
    page = done.folder / "compare.html"
    table = foredraft("compare", str(done.folder), "--html", str(page)).succeeded().out
    assert "decoded by an engine" in table
    assert "not run" in table
    assert "What drafting costs" not in page.read_text()
    card = read_scorecard(best / "score.json")
    line, chain = rows(card)  # of the plan, and of what the export is served with
    assert chain[1 + COLUMNS.index("decode")] == "chain-3"
    logged = dict(zip(["step", *COLUMNS], line, strict=True))
    assert (logged["audit"], logged["speedup"]) == ("not run", None)
    assert REASONS[kind] in logged["elsewhere"]
    assert "score/tau" in scalars(card)
    assert "score/speedup" not in scalars(card)


def test_rescoring_gives_the_same_replay(done, tmp_path):
    best, out = done.folder / "checkpoints" / "best", tmp_path / "card.json"
    plan = ["decode=chain", "decode.depth=2", "score.max_new_tokens=6", "score.prompts=2"]
    shown = foredraft("score", f"checkpoint={best}", *plan, f"out={out}").succeeded().out
    assert "audit not run, decoded by an engine" in shown
    assert read_scorecard(out).rows[0].replay == read_scorecard(best / "score.json").rows[0].replay


@pytest.mark.parametrize("command", ["generate", "advise", "limit"])
def test_what_verifies_drafts_refuses_it(command, done, kind):
    more = ["prompt=hi"] if command == "generate" else []
    best = done.folder / "checkpoints" / "best"
    foredraft(command, f"checkpoint={best}", *more).refused(REASONS[kind], "an engine decodes it")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("decode=dynamic", "use decode=chain"),
        ("decode=auto", "use decode=chain"),
        ("score.plans=[{depth: 2, width: 2, nodes: 4}]", "chains in score.plans"),
        ("score.replay_prompts=0", "score.replay_prompts"),
        ("drafter=medusa2", "the target (this one reads copies of it) cannot be decoded"),
        ("rollout.refresh_every=2", "rollout.refresh_every: the target cannot be decoded"),
    ],
)
def test_options_that_need_decoding_are_refused(option, reason, bench):
    folder = bench.root / "refused"
    target = folder if folder.exists() else TARGETS["mla"](folder)
    kept = [word for word in bench.command if not (option == "decode=auto" and word.startswith("decode"))]
    train([*kept, f"target={target}", option]).refused(reason)
