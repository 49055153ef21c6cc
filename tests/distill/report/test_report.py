"""A run's page says what its folder says, leaves out what it does not, and shows in a browser."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import cards
import pytest
import torch
from browser import browser
from cards import row_of
from exact import Grown
from faces import V
from omegaconf import OmegaConf
from workbench import foredraft

from decode.depth_policy import DepthPolicy
from decode.evaluation.replay import Counts
from decode.evaluation.scorecard import read_scorecard
from decode.evaluation.traces import ACCEPTED, CORRECTED, PLAIN, trace_tokens
from decode.generation.generate import generate
from decode.generation.types import Round
from decode.plan import Plan
from decode.sampling import Sampler
from distill.config.recorded import resolved
from distill.loggers import loggers as tracking
from distill.loggers.wandb_logger import Wandb
from distill.options import LoggerOptions
from distill.prompts.prompt import Prompt
from distill.report import html as html_report
from distill.report.history import History, read
from distill.report.panels import by_category, length_shares, round_times
from distill.report.terminal import places
from distill.report.text_panels import chance
from distill.report.training_panels import loss, smoothed
from distill.scoring.sample_texts import has_probs, varied
from distill.training import checkpointing as callbacks
from distill.utils.redact import HIDDEN
from drafters.checkpoint.pretrained import scorecard

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
MORE = ("samples", "categories", "versions")  # fields that older scorecards have not


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


def headings(text: str) -> list[str]:
    return re.findall(r"<section[^>]*><h2>([^<]*)</h2>", text)


def test_every_panel_is_there_and_nothing_that_others_wrote_is_a_part_of_the_page(run):
    text = (run / "report.html").read_text()
    assert headings(text) == [
        "Tau over training",
        "Loss over training",
        "Acceptance by position",
        "Accepted lengths",
        "Time of a round",
        "Speedup by batch size",
        "Acceptance by category",
        "All settings",
        "Texts",
        "Acceptance by depth in training",
        "Gradient norm",
        "Training speed",
        "What was measured",
        "Where it was measured",
        "Configuration",
    ]
    assert "<script>document" not in text
    assert "<img" not in text.partition("<body>")[2].partition("<script>")[0]


@pytest.mark.docs
def test_it_shows_in_a_browser_wide_and_narrow_light_and_dark_without_a_network(run):
    with browser() as window:
        window.open(run / "report.html", 1280)
        marks = window.marks()
        assert len(marks) == 10
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


def test_an_old_scorecard_gives_a_page_without_the_panels_it_knows_nothing_of(run, tmp_path):
    folder = tmp_path / "old"
    score = folder / "checkpoints" / "3" / "score.json"
    score.parent.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    card = {k: v for k, v in card_of(run).items() if k not in MORE}
    score.write_text(
        json.dumps(card | {"replay": None, "rows": [r | {"replay": None} for r in card["rows"]]})
    )
    text = html_report.write(folder).read_text()
    assert headings(text) == [
        "Acceptance by position",
        "Accepted lengths",
        "Time of a round",
        "Speedup by batch size",
        "All settings",
        "What was measured",
        "Where it was measured",
    ]
    assert "counted by the decoder" in text


def test_a_run_without_scores_has_its_curves(bench, tmp_path):
    bench.run(tmp_path / "bare", score__enabled=False)
    text = (tmp_path / "bare" / "report.html").read_text()
    assert headings(text) == [
        "Loss over training",
        "Acceptance by depth in training",
        "Gradient norm",
        "Training speed",
        "Where it was measured",
    ]
    assert "Tau over training" not in text


@pytest.mark.parametrize(
    ("steps", "style"), [(8, ("lines+markers", "var(--blue)")), (64, ("lines", "var(--grey)"))]
)
def test_a_short_runs_curve_is_a_line_with_a_legend(steps, style):
    panel = str(loss(History(Path(), curves={"loss": ([float(i) for i in range(steps)], [1.0] * steps)})))
    figure = json.loads(re.search(r"<script[^>]*>(.*?)</script>", panel)[1])
    first = figure["data"][0]
    assert (first["mode"], first["line"]["color"]) == style
    assert figure["layout"]["showlegend"]


def test_a_title_has_no_folders_of_this_machine(run, bench):
    target = card_of(run)["target"]
    assert Path(target).is_absolute()
    title = re.search("<title>(.*?)</title>", (run / "report.html").read_text())[1]
    assert title == f"eagle on {Path(target).name}"


def test_the_command_to_try_suits_the_target(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder, symlinks=True)
    config = folder / ".hydra" / "config.yaml"
    for template, prompt in (("chat", "How do I use grep?"), ("none", "Once upon a time")):
        config.write_text(re.sub("template: (chat|none)", f"template: {template}", config.read_text()))
        places(folder)
        assert f"'prompt={prompt}'" in capsys.readouterr().out


def test_a_long_run_has_a_page_before_it_ends(bench, tmp_path, monkeypatch):
    seen = []

    def attempt(folder: Path) -> None:
        found = read(folder)
        seen.append((sorted(found.cards), len(found.curves["loss"][0])))

    monkeypatch.setattr(callbacks, "REPORT_EVERY", -1.0)
    monkeypatch.setattr(html_report, "attempt", attempt)
    bench.run(tmp_path / "long")
    # At both save points, with what was logged before them, and at the end.
    assert seen[0] == ([3], 2)
    assert [cards for cards, _ in seen] == [[3], [3, 6], [3, 6]]
    assert seen[-1][1] == 6


def test_the_script_makes_it_anew(run, tmp_path):
    """Called here: an interpreter would cost seconds."""
    out = tmp_path / "page.html"
    done = foredraft("report", str(run), "--out", str(out))
    assert (done.code, done.out.strip()) == (0, str(out)), done.err
    assert headings(out.read_text()) == headings((run / "report.html").read_text())
    done = foredraft("report", str(run), "--out", str(tmp_path / "no" / "page.html"))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "make its folder" in done.err
    done = foredraft("report", str(tmp_path))
    assert done.code == 2
    assert done.err == f"error: {tmp_path}: no run there; give the folder that train.py printed\n"


def test_texts_stay_with_the_run(run):
    """Held-out prompts may be anybody's; what is exported, and maybe uploaded, has none of them."""
    assert len(card_of(run)["samples"]) == 4  # two prompts at two temperatures
    whole = read_scorecard(run / "checkpoints" / "best" / "score.json")
    assert scorecard(run / "checkpoints" / "best") == replace(whole, samples=[])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 2}'])
def test_a_scorecard_that_cannot_be_read_is_named_and_left_out(tmp_path, text, capsys):
    (tmp_path / "run.json").write_text("{}")
    for step, card in (("1", text), ("2", json.dumps(cards.scorecard()))):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "score.json").write_text(card)
    assert html_report.write(tmp_path).read_text().count("Abacus 9000")
    (line,) = capsys.readouterr().err.splitlines()
    file = tmp_path / "checkpoints" / "1" / "score.json"
    assert line.startswith(f"left out: {file}: a scorecard of version ")
    assert list(read(tmp_path).cards) == [2]


def test_a_report_that_cannot_be_written_does_not_spoil_a_run(tmp_path, caplog):
    assert html_report.attempt(tmp_path / "nowhere") is None  # a run that is over stays over
    (line,) = caplog.records
    assert line.exc_info is None, "a traceback"
    assert "tries again" in line.getMessage()


def test_files_that_a_crash_cut_off_are_read_as_far_as_they_go(tmp_path):
    (tmp_path / "run.json").write_text('{"star')
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: {b: ")
    (tmp_path / ".hydra" / "overrides.yaml").write_text("")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "metrics.csv").write_bytes(b"step,train/loss\n0,1.5\n1,2.5\n\0\0\0\xff")
    run = read(tmp_path)
    assert (run.started, run.config, run.curves) == (None, "", {"loss": ([1, 2], [1.5, 2.5])})


def test_half_a_character_is_no_reason_to_have_no_page(run, tmp_path):
    card = card_of(run)
    card["samples"][0]["category"] = "\ud800"
    score = tmp_path / "checkpoints" / "3" / "score.json"
    score.parent.mkdir(parents=True)
    score.write_text(json.dumps(card))
    assert "<h3>?" in html_report.write(tmp_path).read_text()


def test_curves_go_on_where_a_resumed_run_does(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    for part, first in (("csv", 0), ("csv/from-20", 20)):
        place = tmp_path / part
        place.mkdir()
        rows = [f"{step},{first + 1}.5,," for step in range(first + 9, first + 30, 10)]
        (place / "metrics.csv").write_text(
            "\n".join(["step,train/loss,score/tau,train/x", *rows, "39,nan,,"])
        )
    assert read(tmp_path).curves == {"loss": ([10, 20, 30, 40, 50], [1.5, 1.5, 21.5, 21.5, 21.5])}


def test_secrets_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".hydra").mkdir()
    lines = [
        "max_tokens: 512",
        "a: {api_key: hunter2, hf_token: hunter2, b: '${oc.env:MY_SECRET}', c: '${a.b}'}",
        "spaced: '${ oc.env:MY_SECRET}'",
        "headers: {Authorization: Bearer hunter2, apiKey: hunter2}",
        "url: 'https://me:hunter2@host/v1?api_key=hunter2&x=1'",
        "api_key_env: NAME",
        "pwd: hunter2",
        "list: {api_keys: [hunter2], bearer: hunter2, secrets: {a: hunter2}}",
        "value: [hf_hunter2hunter2, 'Bearer hunter2', sk-hunter2hunter2]",
        "store: s3://KEY:a/hunter2@bucket/x",
        "twice: '${max_tokens}'",
    ]
    (tmp_path / ".hydra" / "config.yaml").write_text("\n".join(lines))
    given = ["a.api_key=hunter2", "max_tokens=512", "+headers={Authorization: Bearer hunter2}"]
    given += ["+api_keys=[hunter2]", "+bearer=hunter2", "+pwd=hunter2", "target=hf_hunter2hunter2"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(given))
    run = read(tmp_path)
    assert "hunter2" not in run.config + str(run.overrides)
    assert "twice: 512" in run.config
    assert "api_key_env: NAME" in run.config
    assert "x=1" in run.config
    shown = [f"{name}={HIDDEN}" for name in ("+api_keys", "+bearer", "+pwd", "target")]
    assert run.overrides == [f"a.api_key={HIDDEN}", "max_tokens=512", f"+headers={HIDDEN}", *shown]


def test_trackers_get_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    options = {"wandb": True, "tensorboard": False, "project": "p", "weights": "never"}
    url = "https://me:hunter2@host/v1?api_key=hunter2&x=1"
    config = {"logger": options, "url": url, "a": "${oc.env:MY_SECRET}", "b": "${url}", "n": 1, "m": "${n}"}
    _, made = tracking.loggers(LoggerOptions(**options), resolved(OmegaConf.create(config)), tmp_path, 0)
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
    assert "hunter2" not in str(seen)
    assert sys.argv[1] == f"rollout.url={url}"


def test_what_is_derived_is_what_was_measured(run):
    assert length_shares([0.75, 0.5]) == [0.25, 0.25, 0.5]
    values = {"tpot": 0.01, "tau": 3.0, "batch_size": 2, "plain_tokens_per_second": 100.0}
    values |= {"draft_share": 0.25, "verify_share": 0.5, "other_share": 0.25}
    assert round_times(row_of(cards.row() | values)) == {
        "draft": 7.5,
        "verify": 15.0,
        "other": 7.5,
        "plain": 60.0,
    }
    for row in scorecard(run / "checkpoints" / "best").rows:
        times = round_times(row)
        plain = times.pop("plain")
        assert plain / sum(times.values()) == pytest.approx(row.speedup)
    assert smoothed(([1, 2], [1.0, 3.0]))[1:] == ([1.0, 3.0], 1)
    _, values, window = smoothed((list(range(32)), [0.0] * 16 + [1.0] * 16))
    assert window == 2
    assert values[15:18] == [0.0, 0.5, 1.0]
    assert [chance(x) for x in (0.5, 0.0001, 0.0)] == ["0.500", "1.0e-04", "0"]


def test_categories_are_those_of_the_replayed_prompts():
    names = ["a", "b", "a", "a", "a", "b", "a"]
    row = cards.row(replay=cards.replay(2.0, Counts([6, 2, 6, 6, 6, 4, 6], [3, 2, 3, 3, 3, 1, 3])))
    card = cards.card_of([row], categories=names)
    assert by_category(card, card.headline) == [("a", 5, 30, 2.0, (2.0, 2.0)), ("b", 2, 6, 2.0, None)]
    assert by_category(replace(card, categories=names[1:]), card.headline) == []
    assert by_category(replace(card, categories=["a"] * 7), card.headline) == []


def test_texts_are_of_several_categories():
    prompts = [
        Prompt.of(str(i), ({"role": "user", "content": "x"},), category=c) for i, c in enumerate("aaabb")
    ]
    assert [p.id for p in varied(prompts, 4)] == ["0", "3", "1", "4"]


BRANCHES = ((0,), (1,), (0, 0), (0, 1))


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
def test_a_texts_tokens_are_the_decoders_and_p_is_the_targets(tiny_target, make_drafter, temperature, plan):
    """Against a plain pass over the whole text."""
    target = tiny_target(vocab=V, hidden=16)
    drafter = make_drafter("eagle", target)
    target.tap(drafter.taps)
    sampler = Sampler(temperature)
    prompts = [[1, 2, 0], [2, 1]]
    options = {"plan": plan, "sampler": sampler, "max_new_tokens": 24, "seed": 3}
    found = trace_tokens(target, drafter, prompts, has_probs=True, **options)
    done = generate(target, drafter, prompts, **options)
    assert any(w.source == ACCEPTED for text in found for w in text)
    for prompt, text, output in zip(prompts, found, done.outputs, strict=True):
        assert [w.token for w in text] == output.tokens
        kept = [min(a, e) for a, e in zip(output.accepted, output.emitted, strict=True)]
        assert sum(w.source == ACCEPTED for w in text) == sum(kept)
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
    """Rows leave while others pause; what was asked before then is of another batch."""
    target, drafter, sampler = tiny_target(), Grown(3), Sampler(0.8)
    pace = DepthPolicy(0.45, ((1, (1.0, 1.42, 1.64)),))
    prompts = [[i % 3, i // 3] for i in range(9)]
    options = {"plan": Plan(2, proposal="sampled", adapt=pace), "sampler": sampler, "stop": [0]}
    options |= {"max_new_tokens": 24, "seed": 3}
    found = trace_tokens(target, drafter, prompts, has_probs=True, **options)
    done = generate(target, drafter, prompts, **options)
    assert [[w.token for w in text] for text in found] == [o.tokens for o in done.outputs]
    assert len({len(text) for text in found}) > 1
    paused = 0
    for text, output in zip(found, done.outputs, strict=True):
        rest = iter(text[1:])
        for emitted, offered in zip(output.emitted, output.draft_lengths, strict=True):
            part = [next(rest) for _ in range(emitted)]
            paused += not offered
            assert offered or {w.source for w in part} == {PLAIN}
    assert paused


def test_q_is_what_the_drafter_drew_from(tiny_target, make_drafter):
    """Against the laws of the drafts themselves, which are chains drawn at the text's temperature."""
    target = tiny_target(vocab=V, hidden=16)
    drafter = make_drafter("eagle", target)
    target.tap(drafter.taps)
    plan, prompts = Plan(3, proposal="sampled"), [[1, 2, 0], [2, 1]]
    options = {"plan": plan, "sampler": Sampler(0.7), "max_new_tokens": 24, "seed": 3}
    drawn: list[list[tuple[float, int] | None]] = [[], []]

    def note(done: Round) -> None:
        for row, request in enumerate(done.requests):
            for i, token in enumerate(done.emitted[row]):
                law = None if done.draft.q is None or i >= plan.depth else done.draft.q[row, i]
                entry = law is not None and (float(law[token]), 1 + int((law > law[token]).sum()))
                drawn[request].append(entry or None)

    generate(target, drafter, prompts, on_round=note, **options)
    found = trace_tokens(target, drafter, prompts, has_probs=True, **options)
    for text, wanted in zip(found, drawn, strict=True):
        assert sum(one is not None for one in wanted) > 8
        for one, law in zip(text, wanted, strict=True):
            q, rank = law or (None, None)
            assert (one.q, one.q_rank) == (pytest.approx(q, abs=1e-5), rank)


def test_drafts_that_are_shallower_than_the_plan_are_traced(tiny_target, make_drafter):
    """A union's nodes need not be as deep as the plan, whose depth the first drafter's laws have."""
    target = tiny_target(vocab=V, hidden=16)
    drafter = make_drafter("union", target)
    target.tap(drafter.taps)
    options = {"plan": Plan(4, width=4, nodes=4), "sampler": Sampler(0.0), "max_new_tokens": 24, "seed": 3}
    found = trace_tokens(target, drafter, [[1, 2, 0], [2, 1]], has_probs=True, **options)
    done = generate(target, drafter, [[1, 2, 0], [2, 1]], **options)
    assert [[w.token for w in text] for text in found] == [o.tokens for o in done.outputs]
    assert any(w.q is not None for w in found[0])


def test_every_drafter_shows_its_texts(tiny_target, make_drafter, drafter_name):
    target = tiny_target(vocab=V, hidden=16)
    drafter = make_drafter(drafter_name, target)
    target = drafter.verifier(target)
    target.tap(drafter.taps)
    plan = Plan(2)
    options = {"plan": plan, "sampler": Sampler(1.0), "max_new_tokens": 8, "seed": 3}
    laws = has_probs(drafter, plan)
    found = trace_tokens(target, drafter, [[1, 2, 0, 1, 2]], has_probs=laws, **options)
    done = generate(target, drafter, [[1, 2, 0, 1, 2]], **options)
    # Asking for laws changes nothing about the text, nor about what is accepted.
    assert [w.token for w in found[0]] == done.outputs[0].tokens
    kept = sum(min(a, e) for a, e in zip(done.outputs[0].accepted, done.outputs[0].emitted, strict=True))
    assert sum(w.source == ACCEPTED for w in found[0]) == kept
    assert any(w.q is not None for w in found[0]) == laws
