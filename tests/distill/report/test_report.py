"""The page of a run: its panels, without secrets, in a browser; damaged files; texts with probabilities."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import cards
import pytest
import torch
from browser import browser
from drafter_checks import V
from exact import Grown
from omegaconf import OmegaConf
from workbench import foredraft

from decode.depth_policy import DepthPolicy
from decode.errors import UserError
from decode.evaluation.replay import Counts
from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.traces import ACCEPTED, CORRECTED, PLAIN, trace_tokens
from decode.generation.generate import generate
from decode.generation.types import Round
from decode.plan import Plan
from decode.sampling import Sampler
from distill import main as run_module
from distill.config.recorded import readable_overrides, resolved
from distill.loggers import loggers as tracking
from distill.loggers.wandb_logger import Wandb
from distill.options.run import LoggerOptions
from distill.prompts.prompt import Prompt
from distill.report import html as html_report
from distill.report.history import read
from distill.report.panels import round_times
from distill.report.training_panels import smoothed
from distill.scoring.sample_texts import has_probs, varied
from distill.training import checkpointing as callbacks
from distill.utils.atomic_files import read_json
from distill.utils.redact import HIDDEN
from distill.utils.reports import Reports
from distill.utils.run_record import ResolvedOptions, RunRecord
from drafters.checkpoint.pretrained import scorecard
from drafters.hub.untrusted_files import check_file

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
MORE = ("samples", "categories", "versions")  # fields that older scorecards have not
# Headings of panels.
CURVES = {"Loss over training", "Acceptance by depth in training", "Gradient norm", "Learning rate"}
CURVES |= {"Training speed"}
SCORES = {"Acceptance by position", "Accepted lengths", "Time of a round", "Speedup by batch size"}
SCORES |= {"All settings", "What was measured"}
NEWER = {"Tau over training", "Acceptance by category", "Texts", "Configuration"}
WHERE = {"Where it was measured"}


@pytest.fixture(scope="module")
def run(bench) -> Path:
    """A run at two temperatures and batch sizes, with a prompt that would do harm."""
    records = [json.loads(line) for line in bench.heldout.read_text().splitlines()]
    for i, record in enumerate(records):
        record["category"] = f"kind {i % 2} {EVIL if i % 2 else ''}"
    records[0]["messages"][0]["content"] = EVIL
    bench.heldout.write_text("".join(json.dumps(r) + "\n" for r in records))
    more = ("score.temperatures=[0.0,1.0]", "score.batch_sizes=[1,2]", "score.replay_prompts=4")
    done = bench.train("drafter=eagle", *more).succeeded()
    assert f"report: {done.folder / 'report.html'}" in done.out
    return done.folder


def card_of(folder: Path) -> dict:
    return json.loads((folder / "checkpoints" / "best" / "score.json").read_text())


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """A run's folder with these files."""
    for name, text in {"run.json": "{}", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def headings(text: str) -> set[str]:
    found = re.findall(r"<section[^>]*><h2>([^<]*)</h2>", text)
    assert len(found) == len(set(found))
    return set(found)


def test_every_panel_is_there_and_text_of_others_is_escaped(run, bench, tmp_path):
    text = (run / "report.html").read_text()
    assert headings(text) == CURVES | SCORES | NEWER | WHERE
    assert f"<title>eagle on {bench.target.name}</title>" in text
    assert "<script>document" not in text
    assert "<img" not in text.partition("<body>")[2].partition("<script>")[0]
    bench.run(tmp_path, score__enabled=False)
    assert headings((tmp_path / "report.html").read_text()) == CURVES | WHERE | {"Configuration"}


def test_panels_draw_the_scorecards_numbers(run):
    """A new panel with a plot needs its numbers here."""
    history = read(run)
    card, text = history.card, (run / "report.html").read_text()
    row = card.compared
    plots = {
        heading: [(one.get("x"), one.get("y")) for one in json.loads(figure)["data"]]
        for part in text.split("<section")[1:]
        for heading in re.findall("<h2>([^<]*)</h2>", part)[:1]
        for figure in re.findall(r'<script type="application/json">(.*?)</script>', part)[:1]
    }
    steps = [3, 6]
    scored = [history.cards[step].compared for step in steps]
    places = list(range(1, len(row.replay.survival) + 1))

    def lengths(survival):
        reached = [1.0, *survival, 0.0]
        shares = [100 * (a - b) for a, b in pairwise(reached)]
        return list(range(len(shares))), pytest.approx(shares)

    want = {
        "Tau over training": [(steps, [r.replay.tau for r in scored]), (steps, [r.tau for r in scored])],
        "Acceptance by position": [
            (places, list(row.replay.survival)),
            (places, [b / a if a else None for a, b in pairwise([1.0, *row.replay.survival])]),
            (places, row.survival),
        ],
        "Accepted lengths": [lengths(row.replay.survival), lengths(row.survival)],
        "Acceptance by category": [([pytest.approx(kind.tau) for kind in card.by_category(row)], None)],
    }
    for heading, curves in want.items():
        drawn = plots.pop(heading)[: len(curves)]
        assert [x for x, _ in drawn] == [x for x, _ in curves], heading
        assert [y for (_, y), (_, given) in zip(drawn, curves, strict=True) if given is not None] == [
            given for _, given in curves if given is not None
        ], heading
    speeds = {tuple(y) for _, y in plots.pop("Speedup by batch size")}
    rows = sorted(card.rows, key=lambda r: r.batch_size)
    names = {(r.decode, r.temperature) for r in rows}
    assert speeds == {tuple(r.speedup for r in rows if (r.decode, r.temperature) == name) for name in names}
    draft, verify, other, plain = (x for x, _ in plots.pop("Time of a round"))
    timed = [r for r in card.rows if r.plain_tokens_per_second and r.tpot][: len(draft)]
    for i, r in enumerate(timed):
        whole = draft[i] + verify[i] + other[i]
        assert draft[i] / whole == pytest.approx(
            r.draft_share / (r.draft_share + r.verify_share + r.other_share)
        )
        assert plain[i] / whole == pytest.approx(r.speedup, rel=0.01)
    assert set(plots) <= CURVES, "drawn, and compared with nothing"


@pytest.mark.docs
def test_browser_shows_it_without_a_network(run):
    with browser() as window:
        window.open(run / "report.html", 1280)
        marks = window.marks()
        assert len(marks) == 11
        assert all(marks), marks
        assert window.run("return document.title") != "owned"
        light = window.colour("body"), window.colour(".plot .xtick text", "fill")
        window.driver.find_element("id", "theme").click()
        dark = window.colour("body"), window.colour(".plot .xtick text", "fill")
        assert all(a != b for a, b in zip(light, dark, strict=True))
        # A token says where it came from.
        window.run(
            "document.querySelector('.written .tok').dispatchEvent("
            "new PointerEvent('pointerover', {bubbles: true, clientX: 90, clientY: 90}))"
        )
        assert "target p" in window.run("return document.getElementById('tip').textContent")
        assert not window.overflow()
        window.open(run / "report.html", 390, "dark")
        assert (window.colour("body"), window.colour(".plot .xtick text", "fill")) == dark
        assert all(window.marks())
        assert not window.overflow()
        assert window.complaints() == []
        assert set(window.requests()) == {(run / "report.html").as_uri()}
        # What got in all the same could neither run nor call home.
        blocked = window.driver.execute_async_script(
            """const [done] = arguments, seen = new Set();
            document.addEventListener('securitypolicyviolation', (event) => {
                seen.add(event.effectiveDirective);
                if (seen.size === 3) done([...seen].sort());
            });
            document.body.insertAdjacentHTML('beforeend',
                '<img src="http://127.0.0.1:9/x"><b onclick="document.title = 1">x</b>');
            fetch('http://127.0.0.1:9/y').catch(() => {});"""
        )
        assert blocked == ["connect-src", "img-src", "script-src-attr"]


def test_old_scorecard_gives_a_page_with_fewer_panels(run, tmp_path):
    card = {k: v for k, v in card_of(run).items() if k not in MORE}
    rows = [row | {"replay": None} for row in card["rows"]]
    score = json.dumps(card | {"replay": None, "rows": rows})
    text = html_report.write(write(tmp_path, {"checkpoints/3/score.json": score})).read_text()
    assert headings(text) == SCORES | WHERE
    assert "counted by the decoder" in text


def test_long_run_has_a_page_before_it_ends(bench, tmp_path, monkeypatch):
    seen = []

    def attempt(folder: Path) -> None:
        found = read(folder)
        seen.append((sorted(found.cards), len(found.curves["loss"][0])))

    monkeypatch.setattr(callbacks, "REPORT_EVERY", -1.0)
    monkeypatch.setattr(run_module, "REPORTS", Reports(page=attempt))
    bench.run(tmp_path / "long")
    # At both save points, with what was logged before them, and at the end.
    assert [cards for cards, _ in seen] == [[3], [3, 6], [3, 6]]
    assert (seen[0][1], seen[-1][1]) == (2, 6)


def test_command_writes_the_page_again(run, tmp_path):
    out = tmp_path / "page.html"
    done = foredraft("report", str(run), "--out", str(out)).succeeded()
    assert done.out.strip() == str(out)
    assert headings(out.read_text()) == headings((run / "report.html").read_text())
    foredraft("report", str(run), "--out", str(tmp_path / "no" / "page.html")).refused("create its folder")
    foredraft("report", str(tmp_path)).refused(f"{tmp_path}: no run there")


def test_exported_scorecard_has_no_texts(run):
    """Held-out prompts may be private, and an export may be uploaded."""
    assert len(card_of(run)["samples"]) == 4  # two prompts at two temperatures
    whole = read_scorecard(run / "checkpoints" / "best" / "score.json")
    assert scorecard(run / "checkpoints" / "best") == replace(whole, samples=[])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 2}'])
def test_scorecard_that_cannot_be_read_is_named_and_left_out(tmp_path, text, capsys):
    scores = {"checkpoints/1/score.json": text, "checkpoints/2/score.json": json.dumps(cards.scorecard())}
    assert "Abacus 9000" in html_report.write(write(tmp_path, scores)).read_text()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"left out: {tmp_path / 'checkpoints/1/score.json'}: a scorecard of version ")
    assert list(read(tmp_path).cards) == [2]


def test_report_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    assert html_report.attempt(tmp_path / "nowhere") is None
    (line,) = caplog.records
    assert line.exc_info is None, "a traceback"
    assert "tries again" in line.getMessage()


def test_truncated_files_are_read_as_far_as_they_go(tmp_path):
    files = {"run.json": '{"star', ".hydra/overrides.yaml": ""}
    run = read(write(tmp_path, {**files, "csv/metrics.csv": b"step,train/loss\n0,1.5\n1,2.5\n\0\0\0\xff"}))
    assert (run.started, run.config, run.curves) == (None, "", {"loss": ([1, 2], [1.5, 2.5])})
    write(tmp_path, {"csv/metrics.csv": 'step,train/loss\n0,2.5\n1,"' + "x" * 200_000})
    assert read(tmp_path).curves == {"loss": ([1], [2.5])}, "a field without an end"


def test_half_a_character_is_no_reason_to_have_no_page(run, tmp_path):
    card = card_of(run)
    card["samples"][0]["category"] = "\ud800"
    folder = write(tmp_path, {"checkpoints/3/score.json": json.dumps(card)})
    assert "<h3>?" in html_report.write(folder).read_text()


def test_curves_of_a_resumed_run_are_joined(tmp_path):
    for part, first in (("csv", 0), ("csv/from-20", 20)):
        rows = [f"{step},{first + 1}.5,," for step in range(first + 9, first + 30, 10)]
        lines = ["step,train/loss,score/tau,train/x", *rows, "39,nan,,"]
        write(tmp_path, {f"{part}/metrics.csv": "\n".join(lines)})
    assert read(tmp_path).curves == {"loss": ([10, 20, 30, 40, 50], [1.5, 1.5, 21.5, 21.5, 21.5])}


# Every form of a secret is in tests/distill/utils/test_redact.py.
SECRETS = {
    "a": {"api_key": "hunter2", "b": "${oc.env:MY_SECRET}", "c": "${a.b}"},
    "spaced": "${ oc.env:MY_SECRET}",
    "url": "https://me:hunter2@host/v1?api_key=hunter2&x=1",
    "value": ["hf_hunter2hunter2", "Bearer hunter2"],
    "api_key_env": "NAME",
    "max_tokens": 512,
}


def test_secrets_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    given = ["a.api_key=hunter2", "max_tokens=512", "+headers={Authorization: Bearer hunter2}"]
    chosen = {"max_tokens": "the target"}
    record = {
        "run.json": json.dumps({"options": SECRETS, "chosen": chosen}),
        ".hydra/overrides.yaml": json.dumps(given),
    }
    run = read(write(tmp_path, record))
    assert "hunter2" not in run.config + str(run.overrides)
    assert all(
        text in run.config for text in ("max_tokens: 512  # chosen by the target", "api_key_env: NAME", "x=1")
    )
    assert run.overrides == [f"a.api_key={HIDDEN}", "max_tokens=512", f"+headers={HIDDEN}"]


def test_trackers_get_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    options = {"wandb": True, "tensorboard": False, "project": "p", "weights": "never"}
    url = "https://me:hunter2@host/v1?api_key=hunter2&x=1"
    config = {"logger": options, "url": url, "a": "${oc.env:MY_SECRET}", "b": "${url}", "n": 1, "m": "${n}"}
    config |= {
        "drafter": {"_target_": "x.Mine"},
        "objective": {"_target_": "x.own"},
        "target": {"path": "o/t"},
    }
    record = RunRecord(tmp_path, ResolvedOptions.of(resolved(OmegaConf.create(config)), {}))
    _, made = tracking.loggers(LoggerOptions(**options), record, 0)
    assert isinstance(made, Wandb)
    assert "hunter2" not in str(made.config)
    assert (made.config["m"], made.config["logger"]["project"]) == (1, "p")
    seen = []

    def init(**given):
        seen.append([list(sys.argv), given])
        raise OSError("no disk")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr(sys, "argv", ["train.py", f"rollout.url={url}", "seed=1"])
    made.begin()
    assert [words[0][2] for words in seen] == ["seed=1"]
    assert seen[0][1]["name"] == "mine o/t own"
    assert seen[0][1]["tags"] == ["mine", "o/t", "own"]
    assert "hunter2" not in str(seen)
    assert sys.argv[1] == f"rollout.url={url}"


def test_times_of_a_round_give_the_measured_speedup(run):
    for row in scorecard(run / "checkpoints" / "best").rows:
        times = round_times(row)
        plain = times.pop("plain")
        assert plain / sum(times.values()) == pytest.approx(row.speedup)


def test_curves_are_smoothed_over_a_centered_window():
    assert smoothed(([1, 2], [1.0, 3.0]))[1:] == ([1.0, 3.0], 1)
    _, values, window = smoothed((list(range(32)), [0.0] * 16 + [1.0] * 16))
    assert window == 2
    assert values[15:18] == [0.0, 0.5, 1.0]


def test_acceptance_by_category_is_of_the_replayed_prompts():
    names = ["a", "b", "a", "a", "a", "b", "a"]
    row = cards.row(replay=cards.replay(2.0, Counts([6, 2, 6, 6, 6, 4, 6], [3, 2, 3, 3, 3, 1, 3])))
    card = cards.card_of([row], categories=names)
    assert card.by_category(card.rows[0]) == [("a", 5, 30, 2.0, (2.0, 2.0)), ("b", 2, 6, 2.0, None)]
    assert replace(card, categories=names[1:]).by_category(card.rows[0]) == []
    assert replace(card, categories=["a"] * 7).by_category(card.rows[0]) == []


def test_texts_are_of_several_categories():
    asked = ({"role": "user", "content": "x"},)
    prompts = [Prompt.of(str(i), asked, category=c) for i, c in enumerate("aaabb")]
    assert [p.id for p in varied(prompts, 4)] == ["0", "3", "1", "4"]


BRANCHES = ((0,), (1,), (0, 0), (0, 1))
PROMPTS = [[1, 2, 0], [2, 1]]


def traced(target, drafter, prompts=PROMPTS, has_probs=True, **options):
    """Traces of the texts and what the decoder wrote, which are the same tokens."""
    options = {"max_new_tokens": 24, "seed": 3} | options
    found = trace_tokens(target, drafter, prompts, has_probs=has_probs, **options)
    outputs = generate(target, drafter, prompts, **options).outputs
    assert [[w.token for w in text] for text in found] == [output.tokens for output in outputs]
    for text, output in zip(found, outputs, strict=True):
        accepted = sum(map(min, output.accepted, output.emitted))
        assert sum(w.source == ACCEPTED for w in text) == accepted
    return found, outputs


@pytest.fixture
def small(tiny_target, make_drafter):
    """A target, and a drafter of this name for it."""

    def make(name):
        target = tiny_target(vocab=V, hidden=16)
        drafter = make_drafter(name, target)
        target = drafter.verifier(target)
        target.tap(drafter.taps)
        return target, drafter

    return make


@pytest.mark.parametrize(
    ("temperature", "plan"),
    [
        (0.0, Plan(2, width=2, nodes=4)),
        (1.0, Plan(2, width=2, nodes=4)),
        (0.8, Plan(proposal="sampled", tree=BRANCHES)),
        (1.0, Plan(2, width=2, nodes=4, proposal="hybrid")),
        (1.0, Plan(2, proposal="sampled", drafts=2)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_p_of_a_text_is_the_targets(small, temperature, plan):
    """Against a plain pass over the whole text."""
    target, drafter = small("eagle")
    found, outputs = traced(target, drafter, plan=plan, sampler=Sampler(temperature))
    assert any(w.source == ACCEPTED for text in found for w in text)
    for prompt, text, output in zip(PROMPTS, found, outputs, strict=True):
        rows = target.head(target.read(torch.tensor([prompt + output.tokens])).last)[0, len(prompt) - 1 :]
        for row, one in zip(rows / (temperature or 1.0), text, strict=False):
            assert one.p == pytest.approx(float(row.softmax(-1)[one.token]), abs=1e-5)
            assert one.p_rank == 1 + int((row > row[one.token]).sum())
        assert text[0].source == PLAIN
        assert text[0].q is None
        assert all(0 < w.q <= 1 and w.q_rank for w in text if w.source == CORRECTED and w.q is not None)
        kept = [w for w in text if w.source == ACCEPTED]
        assert all(w.q for w in kept)
        if plan.proposal == "fixed":  # it is among its node's likeliest two for the drafter
            assert all(w.q_rank <= 2 for w in kept)


def test_rounds_that_draft_nothing_have_no_q_and_change_nothing(tiny_target):
    """Some rows end while others pause, so the batch changes."""
    pace = DepthPolicy(0.45, ((1, (1.0, 1.42, 1.64)),))
    options = {"plan": Plan(2, proposal="sampled", adapt=pace), "sampler": Sampler(0.8), "stop": [0]}
    found, outputs = traced(tiny_target(), Grown(3), [[i % 3, i // 3] for i in range(9)], **options)
    assert len({len(text) for text in found}) > 1
    paused = 0
    for text, output in zip(found, outputs, strict=True):
        rest = iter(text[1:])
        for emitted, offered in zip(output.emitted, output.draft_lengths, strict=True):
            part = [next(rest) for _ in range(emitted)]
            paused += not offered
            assert offered or {w.source for w in part} == {PLAIN}
    assert paused


def test_q_is_what_the_drafter_drew_from(small):
    """Against the distributions of the drafts, which are chains drawn at the text's temperature."""
    target, drafter = small("eagle")
    plan = Plan(3, proposal="sampled")
    options = {"plan": plan, "sampler": Sampler(0.7), "max_new_tokens": 24, "seed": 3}
    drawn: list[list[tuple[float, int] | None]] = [[], []]

    def note(done: Round) -> None:
        for row, request in enumerate(done.requests):
            for i, token in enumerate(done.emitted[row]):
                q = None if done.draft.q is None or i >= plan.depth else done.draft.q[row, i]
                entry = q is not None and (float(q[token]), 1 + int((q > q[token]).sum()))
                drawn[request].append(entry or None)

    generate(target, drafter, PROMPTS, on_round=note, **options)
    found = trace_tokens(target, drafter, PROMPTS, has_probs=True, **options)
    for text, expected in zip(found, drawn, strict=True):
        assert sum(one is not None for one in expected) > 8
        for one, entry in zip(text, expected, strict=True):
            q, rank = entry or (None, None)
            assert (one.q, one.q_rank) == (pytest.approx(q, abs=1e-5), rank)


def test_drafts_that_are_shallower_than_the_plan_are_traced(small):
    """The nodes of a union need not be as deep as the plan."""
    found, _ = traced(*small("union"), plan=Plan(4, width=4, nodes=4), sampler=Sampler(0.0))
    assert any(w.q is not None for w in found[0])


def test_every_drafter_shows_its_texts(small, drafter_name):
    """Asking for probabilities changes neither the text nor what is accepted."""
    target, drafter = small(drafter_name)
    probs = has_probs(drafter, Plan(2))
    options = {"plan": Plan(2), "sampler": Sampler(1.0), "max_new_tokens": 8}
    found, _ = traced(target, drafter, [[1, 2, 0, 1, 2]], has_probs=probs, **options)
    assert any(w.q is not None for w in found[0]) == probs


@pytest.mark.parametrize("started", ["1e400", "1e17", "-1e18", "NaN", "0"])
def test_date_that_is_none_is_left_out(started, tmp_path):
    assert read(write(tmp_path, {"run.json": f'{{"started": {started}}}'})).started is None
    assert read(write(tmp_path, {"run.json": '{"started": 1795843720.5}'})).started == 1795843720.5


def test_names_and_links_that_are_no_steps_are_left_out(tmp_path):
    write(tmp_path, {"checkpoints/\u00b2/config.json": "", "csv/from-\u00b2/metrics.csv": "step\n1\n"})
    best = tmp_path / "checkpoints" / "best"
    for place in ("\u00b2", "best"):
        best.symlink_to(place)
        assert (read(tmp_path).best, read(tmp_path).curves) == (None, {})
        best.unlink()


def test_pipe_is_not_waited_for(tmp_path):
    pipe = tmp_path / ".hydra" / "config.yaml"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    for reader in (read_scorecard, lambda path: read_json(path, "remove it"), check_file):
        with pytest.raises(UserError, match=r"config\.yaml: "):
            reader(pipe)
    pipe.rename(pipe.with_name("overrides.yaml"))
    assert readable_overrides(tmp_path) == []
