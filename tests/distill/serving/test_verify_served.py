"""What a running engine counts, against the scorecard: agreement, every cause, and every way to be wrong."""

import json
import threading
import time
from pathlib import Path

import pytest
from fake_engine import PROMPTS, TOKENS, Engine, a_card, a_row
from fake_server import FakeServer
from metric_pages import VLLM
from omegaconf import OmegaConf
from workbench import CONF, foredraft, make_target, make_tokenizer, train, write_prompts

from decode.errors import UserError
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
from distill.serving.verify import verify
from drafters.checkpoint.io import load

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
