"""What a running engine counts, against the scorecard: agreement, every cause, and every way to be wrong."""

import json
import random
import threading
import time
from pathlib import Path

import pytest
from cards import row_of
from fake_engine import ALPHA, PROMPTS, TOKENS, Engine, a_card, a_row, draw
from fake_server import FakeServer
from omegaconf import OmegaConf
from workbench import CONF, foredraft, make_target, make_tokenizer, train, write_prompts

from decode.errors import UserError
from decode.evaluation.replay import Counts
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.config.read import checked_options
from distill.engines.http import check_redirect
from distill.options import VerifyOptions
from distill.prompts.chat_template import Chat
from distill.serving import endpoint, traffic
from distill.serving import metrics as counters
from distill.serving.agreement import compare
from distill.serving.diagnosis import ServerFacts, causes
from distill.serving.endpoint import Model
from distill.serving.metrics import ServedAcceptance
from distill.serving.verify import verify
from drafters.checkpoint.io import load

VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9210.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79534369213e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 300.0
vllm:generation_tokens_total{engine="1",model_name="m"} 100.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 50.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7953436e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 150.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 60.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 0.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.7953436e+09
"""
RANK = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank='
SGLANG = f"""\
# HELP sglang:spec_accept_length Mean acceptance length (accepted drafts + bonus token per forward).
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{{RANK}"0"}} 2.9
sglang:spec_accept_length{{{RANK}"1"}} 2.9
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{{{RANK}"0"}} 0.63
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{{{RANK}"0"}} 3.0
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens{{{RANK}"0"}} 4.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{is_streaming="false",model_name="m"}} 6.0
sglang:num_requests_total{{is_streaming="true",model_name="m"}} 4.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} 410.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{is_streaming="false",model_name="m"}} 200.0
"""


# -- the stand-in, and a scorecard ---------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, its held-out prompts and a scored checkpoint."""
    root = tmp_path_factory.mktemp("served")
    make_target(root / "m")
    write_prompts(root / "train.jsonl", 2)
    write_prompts(root / "heldout.jsonl", PROMPTS, first=100)
    (root / "7").mkdir()
    (root / "7" / "score.json").write_text(json.dumps(a_card(root / "m", [a_row()])))
    (root / "7" / "config.json").write_text(json.dumps({"settings": {"depth": 3}}))
    return root


@pytest.fixture(scope="module")
def base(place):
    argv = [f"checkpoint={place / '7'}", "url=http://127.0.0.1:1", f"prompts={place / 'train.jsonl'}"]
    argv += [f"prompts.heldout={place / 'heldout.jsonl'}", "timeout=20.0", "patience=0.0"]
    return compose(rewrite(argv, CONF), CONF, "verify_served")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(traffic, "READ_INTERVAL", 0.01)


@pytest.fixture(scope="module")
def chat():
    return Chat(make_tokenizer())


@pytest.fixture
def start(chat):
    started = []

    def make(*args, **options) -> Engine:
        started.append(Engine(chat, *args, **options))
        return started[-1]

    yield make
    for server in started:
        server.kill()


@pytest.fixture
def ask(base, capsys):
    """Runs the command on a server: whether it agrees, and what it said."""

    def run(server, card=None, **changes):
        cfg = base.copy()
        cfg.url = server.url if isinstance(server, FakeServer) else server
        for key, value in changes.items():
            OmegaConf.update(cfg, key.replace("__", "."), value)
        if card is not None:
            cfg.checkpoint = str(card)
        agrees = verify(checked_options(VerifyOptions, cfg))
        return agrees, capsys.readouterr().out

    return run


def written(tmp_path, card) -> Path:
    (tmp_path / "score.json").write_text(json.dumps(card))
    return tmp_path / "score.json"


# -- reading the pages ---------------------------------------------------------------------------


def test_vllm_counts_are_summed_over_its_engines():
    reading = counters.read(VLLM, "there")
    assert (reading.engine, reading.model, reading.speculates, reading.depth) == ("vllm", "m", True, 3)
    assert (reading.requests, reading.tokens, reading.started) == (10, 400, 1.79534369213e9)
    found = counters.served_acceptance(reading)
    assert (found.rounds, found.drafted, found.tau) == (150, 450, 1 + 210 / 150)
    assert found.survival == (120 / 150, 70 / 150, 20 / 150)


def test_counters_without_total_are_the_same_ones():
    older = VLLM.replace("_total{", "{").replace("_total ", " ")
    assert counters.read(older, "there") == counters.read(VLLM, "there")


def test_sglang_counts_rounds_and_no_positions():
    reading = counters.read(SGLANG, "there")
    assert (reading.engine, reading.depth, reading.nodes, reading.requests) == ("sglang", 3, 3, 10)
    found = counters.served_acceptance(reading)
    # 410 tokens, 10 of them the prefills', 200 the target's own.
    assert (found.rounds, found.tau, found.survival) == (200, 2.0, ())


def test_an_older_sglang_has_a_gauge_alone():
    text = "\n".join(line for line in SGLANG.splitlines() if "verify_calls" not in line)
    found = counters.served_acceptance(counters.read(text, "there"))
    assert (found.rounds, found.tau) == (counters.WINDOW, pytest.approx(2.9))
    assert "gauge" in found.source


def test_two_steps_and_two_draft_tokens_are_drafts_of_one():
    text = SGLANG.replace('"0"} 4.0', '"0"} 2.0').replace('"0"} 3.0', '"0"} 2.0')
    assert counters.read(text, "there").depth == 1


def test_histograms_of_answers_are_added_up():
    found = counters.served_acceptance(counters.read(SGLANG, "there"), [[2, 1], [1, 0, 0, 4]])
    assert (found.rounds, found.survival) == (8, (5 / 8, 4 / 8, 4 / 8))
    assert found.tau == 1 + 13 / 8


def test_an_engine_that_counts_no_rounds():
    with pytest.raises(UserError, match="V0 engine counts no rounds"):
        counters.read('vllm:spec_decode_num_draft_tokens_total{model_name="m"} 5\n', "there")


def test_several_models_have_to_be_told_apart():
    two = VLLM + VLLM.replace('model_name="m"', 'model_name="n"').replace(" 100.0", " 40.0")
    with pytest.raises(UserError, match="counts m, n; choose one with model="):
        counters.read(two, "there")
    assert counters.read(two, "there", "n").rounds == 90
    with pytest.raises(UserError, match="model=o: there counts m, n"):
        counters.read(two, "there", "o")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html><body>Welcome</body></html>", "metrics of neither vLLM nor SGLang"),
        ("", "metrics of neither"),
        ("process_start_time_seconds 1.0\nhttp_requests_total 3\n", "metrics of neither"),
        (VLLM + SGLANG, "metrics of both"),
        ('vllm:spec_decode_num_drafts_total{engine="0" 100.0\n', "invalid metrics"),
        ("vllm:spec_decode_num_drafts_total many\n", "invalid metrics"),
        ("vllm:spec_decode_num_drafts_total NaN\n", "not finite"),
    ],
)
def test_what_is_no_page_of_an_engine(text, said):
    with pytest.raises(UserError, match=said):
        counters.read(text, "there")


# -- the whole way -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_drafter_that_was_scored_agrees(ask, start, kind):
    server = start(kind)
    server.alpha[:], before = [0.1] * 3, server.alpha[:]
    server._draft({"max_tokens": TOKENS})  # traffic of before, which must not count
    server.alpha[:] = before
    agrees, said = ask(server)
    assert agrees, said
    assert "agrees with the scorecard" in said
    assert f"{PROMPTS} held-out prompts, {PROMPTS * TOKENS} tokens answered" in said
    assert len(server.asked) == PROMPTS
    assert all((b["temperature"], b["max_tokens"]) == (0.0, TOKENS) for b in server.asked)
    assert "s_3" in said  # SGLang's from its answers
    assert "- " not in said.split("agrees")[1]


def test_an_sglang_without_histograms_is_judged_by_tau(ask, start):
    server = start("sglang")
    server.histograms = False
    agrees, said = ask(server)
    assert agrees
    assert "s_1" not in said
    server.alpha = [0.4, 0.4, 0.4]
    agrees, said = ask(server)
    assert not agrees
    assert "does not count positions" in said
    server.alpha = [0.01] * 3
    assert "almost nothing is accepted" in ask(server)[1]


@pytest.mark.parametrize(
    ("alpha", "cause"),
    [
        ([0.02, 0.1, 0.1], "position 1 is almost never accepted"),
        ([0.4, 0.6, 0.5], "position 1 is accepted far less"),
        ([0.8, 0.2, 0.3], "position 2 collapses"),
        ([0.8, 0.7, 0.1], "position 3 collapses"),
        ([0.68, 0.6, 0.5], "all positions are somewhat lower"),
        ([0.95, 0.9, 0.9], "acceptance is lossy"),
    ],
)
def test_each_cause_has_its_pattern(ask, start, alpha, cause):
    server = start(alpha=alpha)
    for _ in range(PROMPTS):
        server._draft({"max_tokens": TOKENS})
    agrees, said = ask(server, send=False, since_start=True)
    assert not agrees
    assert "DIFFERS" in said
    assert cause in said.split("likely causes:")[1].splitlines()[1]


def test_without_a_drafter_there_are_no_counters(ask, start):
    server = start()
    server.pages["/metrics"] = lambda: (200, 'vllm:generation_tokens_total{model_name="m"} 5\n')
    agrees, said = ask(server)
    assert not agrees
    assert "speculative decoding is off" in said
    assert "--speculative-config" in said
    server = start("sglang")
    server.pages["/metrics"] = lambda: (
        200,
        f'sglang:generation_tokens_total{{model_name="m"}} {server.tokens}\n',
    )
    agrees, said = ask(server, depth=3)
    assert not agrees
    assert "--speculative-algorithm" in said


def test_a_drafter_that_is_not_used(ask, start):
    server = start()
    server.drafting = False
    agrees, said = ask(server)
    assert not agrees
    assert "nothing was drafted: the engine does not use its drafter" in said


def test_watched_traffic_and_all_since_the_start(ask, start):
    server = start()
    for _ in range(PROMPTS):
        server._draft({"max_tokens": TOKENS})
    agrees, said = ask(server, send=False, since_start=True)
    assert agrees
    assert "all that was served since the start" in said
    assert not server.asked
    with pytest.raises(UserError, match="nothing was drafted in what was watched"):
        ask(server, send=False, seconds=0.01)
    with pytest.raises(UserError, match="seconds=<how long"):
        ask(server, send=False)
    first = server.page()
    for _ in range(PROMPTS):
        server.alpha = [0.95] * 3
        server._draft({"max_tokens": TOKENS})
    pages = iter([first, server.page()])
    server.pages["/metrics"] = lambda: (200, next(pages))
    agrees, said = ask(server, send=False, seconds=0.01)
    assert not agrees
    assert "its prompts are easier" in said


def test_too_little_to_tell(ask, start):
    with pytest.raises(UserError, match="too few to tell"):
        ask(start(), count=1)


def test_a_server_that_was_started_anew_in_between(ask, start):
    server = start()
    server._draft({"max_tokens": TOKENS})
    pages = [server.page(), server.page()]
    server.reset()
    server.pages["/metrics"] = lambda: (200, pages.pop(0) if pages else server.page())
    with pytest.raises(UserError, match="restarted between the two readings"):
        ask(server, count=1)
    server = start()
    server.pages["/metrics"] = lambda: (200, (setattr(server, "born", server.born + 1), server.page())[1])
    with pytest.raises(UserError, match="restarted between"):
        ask(server)


def test_metrics_of_another_replica(ask, start):
    server = start()
    page = server.page()
    server.pages["/metrics"] = lambda: (200, page)
    with pytest.raises(UserError, match="not of the engine that answers"):
        ask(server)


def test_others_use_the_server(ask, start):
    server = start()
    server.extra = TOKENS
    agrees, said = ask(server)
    assert agrees
    assert "others use it" in said
    server.detailed = True  # --per-request-spec-decode-metrics: then nobody else's rounds are counted
    agrees, said = ask(server)
    assert agrees
    assert "from the answers' own histograms" in said
    assert "others use it" not in said


def test_like_is_held_against_like(ask, start, place, tmp_path):
    tree = a_row() | {"decode": "tree-16 (depth 3, width 4)"}
    drawn = a_row([0.5, 0.5, 0.5]) | {"decode": "chain-3-sampled"}
    deeper, warm = a_row([0.5] * 4), a_row([0.5] * 3, temperature=1.0)
    card = written(tmp_path, a_card(place / "m", [tree, deeper, warm, drawn, a_row()]))
    server = start()
    assert ask(server, card)[0]
    assert not ask(server, card, decode="chain-3-sampled")[0]
    assert not ask(server, card, temperature=1.0)[0]
    assert server.asked[-1]["temperature"] == 1.0
    card = written(tmp_path, a_card(place / "m", [tree, deeper]))
    sent = len(server.asked)
    with pytest.raises(UserError, match=r"no row chain-3 there .*decode=chain decode\.depth=3"):
        ask(server, card)
    assert len(server.asked) == sent  # nothing is sent for nothing
    with pytest.raises(UserError, match="depth=2, but the engine counts drafts of 3"):
        ask(server, card, depth=2)


def test_trees_are_not_held_against_chains(ask, start):
    server = start("sglang")
    page = server.page
    server.page = lambda: page().replace(
        'spec_num_draft_tokens{model_name="m"} 4', 'spec_num_draft_tokens{model_name="m"} 16'
    )
    with pytest.raises(UserError, match="--speculative-eagle-topk 1"):
        ask(server)
    assert not server.asked


def test_a_first_row_without_replay_tells_how_many_prompts(ask, start, place, tmp_path):
    row = a_row()
    counted = {"tau": row["replay"]["tau"], "tau_interval": row["replay"]["tau_interval"], "rounds": 800}
    row |= counted | {"survival": row["replay"]["survival"], "replay": None}
    agrees, said = ask(start(), written(tmp_path, a_card(place / "m", [row])))
    assert agrees
    assert "16 held-out prompts" in said
    assert "counted by the decoder" in said


# -- what is said beside the figures -------------------------------------------------------------


def told(alpha=(0.8, 0.56, 0.336), rounds=4000.0, drafted=12000.0, row=None, **known):
    row = row or a_row()
    found = compare(
        ServedAcceptance("vllm", rounds, drafted, 100.0, 1 + sum(alpha), tuple(alpha), "counters"),
        row_of(row),
        0.02,
    )
    facts = {"target": "org/m", "models": [], "model": "m", "trained": 3, "written": 100, "sampled": False}
    return causes(found, ServerFacts(**{**facts, **known}))


def test_another_model_is_named():
    assert not told(models=[Model("m", "")])
    assert not told(models=[Model("alias", "/models/M/")], model="alias")
    (said,) = told(models=[Model("other", "org/other")], model="other")
    assert "the server has other (org/other); the scorecard is of org/m" in said


def test_depths_that_do_not_fit():
    (said,) = told(drafted=6000.0)
    assert "drafts have 1.50 tokens where 3 were asked for" in said
    (said,) = told(trained=5)
    assert "3 tokens are drafted, and the drafter was trained for 5" in said
    said = told((0.8, 0.1, 0.05), trained=1)
    assert "trained for 1 tokens, and position 2 is past them" in said[1]


def test_what_is_asked_depends_on_whose_traffic_it_is():
    lower = (0.68, 0.4, 0.2)
    assert "send the held-out prompts" in told(lower, written=None)[1]
    assert "draw its drafts" in told(lower, sampled=True)[1]
    assert len(told(lower)) == 1
    assert "does not answer at the temperature" in told((0.95, 0.9, 0.8))[1]
    assert "a lower temperature, or greedily" in told((0.95, 0.9, 0.8), written=None, sampled=True)[1]


# -- noise ---------------------------------------------------------------------------------------


def test_noise_is_what_chance_does():
    """Of many servers of the very drafter, a hundredth at most may be said to differ."""
    row, dice, wrong = a_row(), random.Random(3), 0
    for _ in range(200):
        histograms = [draw(dice, ALPHA, TOKENS)[0] for _ in range(PROMPTS)]
        found = counters.served_acceptance(counters.read(SGLANG, "there"), histograms)
        wrong += not compare(found, row_of(row), 0.0).agrees
    assert wrong <= 8  # the scorecard's own luck is the same in all of them


def test_prompts_that_differ_widen_it():
    """A drafter that some prompts suit, and some do not: rounds of one answer are alike."""
    dice = random.Random(4)

    def answers():
        return [draw(dice, [dice.choice([0.2, 0.95])] * 3, TOKENS) for _ in range(PROMPTS)]

    wrong = naive = 0
    for _ in range(50):
        row, there = a_row(), answers()
        mine = answers()
        counts = Counts([TOKENS - 1] * PROMPTS, [float(n) for _, n in mine])
        survival = [sum(sum(h[j:]) for h, _ in mine) / sum(counts.rounds) for j in (1, 2, 3)]
        row["replay"] |= {"tau": counts.tau, "survival": survival, "counts": counts._asdict()}
        found = counters.served_acceptance(counters.read(SGLANG, "there"), [h for h, _ in there])
        for interval, known in ((counts.interval(), True), ([counts.tau, counts.tau], False)):
            row["replay"]["tau_interval"] = interval
            differs = not compare(found, row_of(row), 0.0).agrees
            wrong, naive = wrong + (differs and known), naive + (differs and not known)
    assert wrong <= 3
    assert naive > 10


def test_the_same_prompts_need_less():
    """What makes a prompt easy makes it easy for both, at temperature 0."""
    dice, wrong, noise = random.Random(5), 0, []
    for _ in range(100):
        alphas = [[dice.choice([0.2, 0.95])] * 3 for _ in range(PROMPTS)]
        mine, theirs = ([draw(dice, alpha, TOKENS) for alpha in alphas] for _ in range(2))
        row, rounds = a_row(), [float(n) for _, n in mine]
        survival = [sum(sum(h[j:]) for h, _ in mine) / sum(rounds) for j in (1, 2, 3)]
        row["replay"] |= {"survival": survival, "counts": {"tokens": [20] * len(rounds), "rounds": rounds}}
        row["replay"]["tau_interval"] = [2.0, 4.0]
        found = counters.served_acceptance(counters.read(SGLANG, "there"), [h for h, _ in theirs])
        wrong += not compare(found, row_of(row), 0.0, same=True).agrees
        noise.append([compare(found, row_of(row), 0.0, same=same).tau.noise for same in (True, False)])
        row["temperature"] = 1.0
        assert compare(found, row_of(row), 0.0, same=True).tau.noise == noise[-1][1]
    assert wrong <= 5
    assert all(mine < other / 3 for mine, other in noise)


@pytest.mark.proof
def test_rounds_that_an_end_cuts_may_put_an_engine_above_and_never_below():
    row = a_row()
    sure = [row["replay"]["tau"]] * 2
    row["replay"] |= {"tau_interval": sure, "counts": {"tokens": [20] * 10**6, "rounds": [20.0] * 10**6}}
    expected = row["replay"]["survival"]
    for sign, agrees in ((1, True), (-1, False), (1.2, False)):
        off = tuple(s + sign * (1 - s) / 20 for s in expected)
        found = ServedAcceptance("vllm", 2e7, 6e7, 1.0, 1 + sum(off), off, "counters")
        assert compare(found, row_of(row), 0.0005).agrees is agrees


def test_small_differences_do_not_matter_however_sure():
    row = a_row()
    off = tuple(s - 0.015 for s in row["replay"]["survival"])
    found = ServedAcceptance("vllm", 1e9, 3e9, 1.0, 1 + sum(off), off, "counters")
    sure = {"tau_interval": [row["replay"]["tau"]] * 2, "counts": {"tokens": [1], "rounds": [1e9]}}
    row["replay"] |= sure
    assert not compare(found, row_of(row), 0.001).agrees
    assert compare(found, row_of(row), 0.02).agrees


# -- the command ---------------------------------------------------------------------------------


def run(place, url, *more):
    argv = [f"url={url}", f"checkpoint={place / '7'}", f"prompts={place / 'train.jsonl'}"]
    argv += [f"prompts.heldout={place / 'heldout.jsonl'}", "patience=0.2", "retries=0", *more]
    return foredraft("verify-served", *argv)


def test_exit_codes(place, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = run(place, start().url.removesuffix("/v1"))
    assert (good.code, good.err) == (0, "")
    assert run(place, start(alpha=[0.1] * 3).url).code == 1
    bad = run(place, "http://127.0.0.1:9")
    assert (bad.code, bad.out) == (2, "")
    assert bad.err.count("\n") == 1
    assert "http://127.0.0.1:9/metrics: no server answers" in bad.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "localhost:8000"}, "url: not an address; write http://host:port$"),
        ({"url": "http://me:secret@host"}, "^url: has a secret in it"),
        ({"api_key_env": "sk-123"}, "^api_key_env: is the name of"),
        ({"checkpoint": "nowhere"}, "no score.json there"),
        ({"timeout": 0.0}, "timeout=0.0: must be at least"),
        ({"tolerance": -1.0}, "tolerance=-1.0: must be at least 0"),
        ({"count": 0}, "count=0: must be at least 1"),
    ],
)
def test_what_is_wrong_before_anything_is_asked(base, changes, said):
    cfg = base.copy()
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    with pytest.raises(UserError, match=said):
        verify(checked_options(VerifyOptions, cfg))


def test_pages_that_never_come_or_never_end(ask, start, monkeypatch):
    server = start()
    server.pages["/metrics"] = lambda: (404, "no such page")
    with pytest.raises(UserError, match=r"answers with 404; SGLang has this page only with --enable-metrics"):
        ask(server)
    server.pages["/metrics"] = lambda: (200, "<!doctype html><title>Login</title>")
    with pytest.raises(UserError, match="neither vLLM nor SGLang"):
        ask(server)
    monkeypatch.setattr(endpoint, "MAX_BYTES", 1 << 20)
    server.pages["/metrics"] = lambda: (200, "vllm:x 1\n" * (1 << 18))
    with pytest.raises(UserError, match="more than 1 MB"):
        ask(server)
    server.pages["/metrics"] = lambda: (time.sleep(0.5), (200, VLLM))[1]
    with pytest.raises(UserError, match=r"no answer within timeout=0\.1 s"):
        ask(server, timeout=0.1)


def test_a_key_is_asked_for_and_never_shown(ask, start, monkeypatch):
    server = start(key="sk-secret")
    with pytest.raises(UserError, match=r"rejects the key in api_key_env=OPENAI_API_KEY \(401\)"):
        ask(server)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    agrees, said = ask(server)
    assert agrees
    assert "sk-secret" not in said


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_key_does_not_follow_a_redirect_to_another_origin(ask, start, monkeypatch, scheme):
    server, other = start(), start()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    there = server.moved = f"{scheme}://127.0.0.1:{other.port}"
    with pytest.raises(UserError, match=f"sends on to {there}, another origin.*give url={there}"):
        ask(server)
    assert set(server.keys) == {"sk-secret"}
    assert not other.keys


@pytest.mark.parametrize("location", ["http://H:80/x", "//h/x", "/x", "http://u:pw@h/x"])
def test_the_same_server_by_another_name_is_no_other_origin(location):
    check_redirect("http://h/metrics", location, "url")


def test_a_password_is_not_shown_where_a_redirect_is_refused():
    with pytest.raises(UserError, match=r"^http://h: sends on to https://h, .* give url=https://h/v1$"):
        check_redirect("http://me:secret@h/v1/models", "https://me:secret@h/v1/models", "url", "/v1")


def test_a_redirect_to_another_path_of_the_server_is_followed(start):
    server = start()
    del server.pages["/metrics"]
    server.pages["/x/metrics"] = lambda: (200, VLLM)
    server.moved = f"http://127.0.0.1:{server.port}/x"
    assert endpoint.Endpoint(server.url, 5.0, "NO_KEY").reading().rounds == 150


def test_errors_of_requests_name_this_commands_options(ask, start):
    server = start()
    server.fault(999, 500, "broken")
    with pytest.raises(
        UserError, match=r"^url=http://127.*given up after .* attempts \((retries|patience)=[\d.]+\)$"
    ):
        ask(server, retries=0)


# -- the real thing ------------------------------------------------------------------------------


class Decoder(Engine):
    """Our own decoder behind the page of vLLM."""

    def __init__(self, chat, target, drafter, depth):
        super().__init__(chat, alpha=[0.0] * depth, models=("pocket",))
        self.target, self.drafter, self.alone = target, drafter, threading.Lock()

    def _draft(self, body):
        if body["max_tokens"] == 1:
            return {"tokens": [4]}
        with self.alone:
            out = generate(
                self.target,
                self.drafter,
                [self.chat.encode(body["messages"])],
                plan=Plan(depth=len(self.kept)),
                sampler=Sampler(body["temperature"]),
                max_new_tokens=body["max_tokens"],
                seed=body["seed"],
                stop=stop_tokens(self.target),
            ).outputs[0]
        self.answers, self.tokens = self.answers + 1, self.tokens + len(out.tokens)
        self.rounds += len(out.accepted)
        self.kept = [k + sum(a >= j for a in out.accepted) for j, k in enumerate(self.kept, 1)]
        return {"tokens": out.tokens, "finish_reason": "stop" if out.stopped else "length"}


@pytest.mark.proof
def test_a_real_decoder_counts_what_its_scorecard_says(tmp_path, ask):
    """The pocket's draft model, scored; then served by our own decoder, whole and damaged."""
    drafter = ["drafter=lm_given", "decode=chain", "decode.depth=3", "logger=csv"]
    outcome = train([*drafter, "score.temperatures=[0.0,1.0]", f"output_dir={tmp_path}"]).succeeded()
    checkpoint = outcome.folder / "checkpoints" / "0"
    target = load_target("data/pocket", "bfloat16")
    whole = load(checkpoint, target)
    target.tap(whole.taps)
    chat = Chat(load_tokenizer("data/pocket"))
    bundled = {"prompts__path": "data/prompts/train.jsonl", "prompts__heldout": "data/prompts/heldout.jsonl"}
    bundled |= {"concurrency": 1, "timeout": 100.0}
    for temperature in (0.0, 1.0):
        server = Decoder(chat, target, whole, 3)
        agrees, said = ask(server, checkpoint, temperature=temperature, **bundled)
        server.kill()
        print(said)
        assert agrees, said
    for weight in whole.parameters():
        weight.data.normal_(0, 0.02)
    server = Decoder(chat, target, whole, 3)
    agrees, said = ask(server, checkpoint, **bundled)
    server.kill()
    print(said)
    assert not agrees
    assert "position 1 is almost never accepted" in said
