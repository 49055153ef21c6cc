"""A served drafter is watched: windows of other traffic against the scorecard, by kinds of prompts."""

import json
from pathlib import Path

import pytest
from fake_engine import ALPHA, PROMPTS, TOKENS, Engine, a_card, a_row
from workbench import CONF, changed, make_tokenizer

from decode.errors import UserError
from decode.evaluation.scorecard import Scorecard
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.options.commands import WatchOptions
from distill.prompts.chat_template import Chat
from distill.serving import watch as module
from distill.serving.watch import expected_of, watch

WORSE = [0.6, 0.5, 0.5]
KINDS = ["chat"] * (PROMPTS // 2) + ["code"] * (PROMPTS // 2)


@pytest.fixture
def card(tmp_path) -> Path:
    path = tmp_path / "score.json"
    path.write_text(json.dumps(a_card(tmp_path / "m", [a_row()], categories=KINDS)))
    return path


@pytest.fixture
def server(monkeypatch):
    """An engine that answers twenty requests between two readings."""
    engine = Engine(Chat(make_tokenizer()))

    def traffic(seconds):
        assert seconds == 3.0
        for _ in range(20):
            engine._draft({"max_tokens": TOKENS})

    monkeypatch.setattr(module.time, "sleep", traffic)
    yield engine
    engine.kill()


@pytest.fixture
def look(card, server, capsys):
    """Runs the command for a few windows: whether all was as scored, and what it printed."""
    argv = [f"checkpoint={card}", f"url={server.url}", "interval=3.0", "windows=4"]
    base = compose(rewrite(argv, CONF), CONF, "watch")

    def run(**changes):
        return watch(changed(base, WatchOptions, **changes)), capsys.readouterr().out

    return run


def test_scored_drafter_stays_as_scored(look, server):
    fine, said = look(windows=20)
    assert fine, said
    assert said.count("80 requests, ") == 20
    assert "LOWER" not in said
    assert not server.asked, "nothing is sent"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_worse_drafter_is_said_within_two_hundred_requests(look, server, kind):
    server.kind, server.alpha = kind, WORSE
    fine, said = look()
    assert not fine
    assert server.answers == 160
    assert said.count("lower") == 2
    assert "LOWER than scored in 2 windows in a row: tau 2.0" in said
    assert "foredraft follow '<folders of the new target>' drafter.init_from=" in said


def test_drafter_that_gets_worse_later_is_said(look, server, monkeypatch):
    traffic = module.time.sleep

    def worse_after_a_while(seconds):
        server.alpha = WORSE if server.answers >= 320 else ALPHA
        traffic(seconds)

    monkeypatch.setattr(module.time, "sleep", worse_after_a_while)
    fine, said = look(windows=None)
    assert not fine
    assert server.answers == 480, said


def test_one_low_window_is_no_alarm(look, server, monkeypatch):
    traffic = module.time.sleep

    def worse_for_a_while(seconds):
        server.alpha = WORSE if 80 <= server.answers < 160 else ALPHA
        traffic(seconds)

    monkeypatch.setattr(module.time, "sleep", worse_for_a_while)
    fine, said = look()
    assert fine
    assert said.count("lower") == 1


def test_restarted_server_begins_a_new_window(look, server, monkeypatch):
    traffic, restarts = module.time.sleep, [60]

    def restarted(seconds):
        if restarts and server.answers >= restarts[0]:
            restarts.pop()
            server.born += 10
            server.reset()
        traffic(seconds)

    monkeypatch.setattr(module.time, "sleep", restarted)
    fine, said = look(windows=1)
    assert fine
    assert "restarted; the window begins again" in said


def test_server_that_is_away_is_waited_for(look, server, monkeypatch):
    traffic, pages = module.time.sleep, server.pages

    def away(seconds):
        server.pages = {"/metrics": lambda: (503, "")} if 40 <= server.answers < 80 else pages
        traffic(seconds)

    monkeypatch.setattr(module.time, "sleep", away)
    assert look(windows=1)[0]
    server.reset()
    with pytest.raises(UserError):
        look(windows=1, patience=2.0)


def test_kinds_of_requests_change_what_is_expected(card):
    scored = Scorecard.from_json(json.loads(card.read_text()), "card")
    row = scored.rows[0]
    whole, chat, code = (expected_of(scored, row, mix) for mix in (None, {"chat": 1}, {"code": 0.5}))
    assert whole.tau == pytest.approx(row.counts.tau)
    assert (whole.prompts, chat.prompts, code.prompts) == (PROMPTS, PROMPTS // 2, PROMPTS // 2)
    assert chat.tau == pytest.approx(row.counts.part(0, PROMPTS // 2).tau)
    assert code.tau == pytest.approx(row.counts.part(PROMPTS // 2).tau)
    assert expected_of(scored, row, {"chat": 1, "code": 1}).tau == pytest.approx(whole.tau)
    assert (
        min(chat.tau, code.tau)
        < expected_of(scored, row, {"chat": 3, "code": 1}).tau
        < max(chat.tau, code.tau)
    )
    assert whole.least(1e9) < whole.tau
    assert whole.least(10) < whole.least(1000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mix": {"maths": 1.0}}, "mix.maths: the scorecard has chat, code"),
        ({"mix": {"chat": 0.0}}, "shares of 0 or more"),
        ({"mix": {"chat": -1.0, "code": 2.0}}, "shares of 0 or more"),
        ({"temperature": 0.7}, r"no row chain-3 there .*; score one: foredraft score"),
    ],
)
def test_what_cannot_be_compared_is_refused(look, changes, said):
    with pytest.raises(UserError, match=said):
        look(**changes)


def test_server_without_speculation_is_refused(look, server):
    server.kind = "sglang"
    server.alpha = []
    server.pages = {"/metrics": lambda: (200, "sglang:spec_num_steps 0\nsglang:num_requests_total 3\n")}
    with pytest.raises(UserError, match="speculative decoding is off"):
        look()
