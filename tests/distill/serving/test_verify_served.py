"""Counters of a running engine against the scorecard: agreement, causes, and refusals."""

import json
import threading
import time
from pathlib import Path

import pytest
from fake_engine import PROMPTS, TOKENS, Engine, a_card, a_row
from metric_pages import VLLM
from omegaconf import OmegaConf
from workbench import CONF, changed, foredraft, make_target, make_tokenizer, train, write_prompts

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.load import load_target, load_tokenizer, stop_tokens
from decode.plan import Plan
from decode.sampling import Sampler
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.engines.http import check_redirect
from distill.options.commands import VerifyOptions
from distill.prompts.chat_template import Chat
from distill.serving import endpoint, traffic
from distill.serving.verify import verify
from drafters.checkpoint.io import load


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
    """Runs the command on a server: whether it agrees, and what it printed."""

    def run(server, **changes):
        agrees = verify(changed(base, VerifyOptions, **{"url": server.url} | changes))
        return agrees, capsys.readouterr().out

    return run


def serve(server, answers=PROMPTS):
    """Traffic of somebody else."""
    for _ in range(answers):
        server._draft({"max_tokens": TOKENS})


def written(tmp_path, card) -> str:
    (tmp_path / "score.json").write_text(json.dumps(card))
    return str(tmp_path / "score.json")


# -- agreement -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_scored_drafter_agrees(ask, start, kind):
    server = start(kind)
    server.alpha, scored = [0.1] * 3, server.alpha
    serve(server, 1)  # which does not count
    server.alpha = scored
    agrees, said = ask(server)
    assert agrees, said
    assert "agrees with the scorecard" in said
    assert f"{PROMPTS} held-out prompts, {PROMPTS * TOKENS} tokens answered" in said
    assert len(server.asked) == PROMPTS
    assert all((b["temperature"], b["max_tokens"]) == (0.0, TOKENS) for b in server.asked)
    assert "s_3" in said  # SGLang's from its answers
    assert "- " not in said.split("agrees")[1]


def test_sglang_without_histograms_is_judged_by_tau(ask, start):
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
    serve(server)
    agrees, said = ask(server, send=False, since_start=True)
    assert not agrees
    assert "DIFFERS" in said
    assert cause in said.split("likely causes:")[1].splitlines()[1]


def test_engine_that_drafts_nothing_is_named(ask, start):
    tokens = 'generation_tokens_total{model_name="m"} '
    for kind, changes, said in (("vllm", {}, "config"), ("sglang", {"depth": 3}, "algorithm")):
        server = start(kind)
        server.pages["/metrics"] = lambda kind=kind, server=server: (
            200,
            f"{kind}:{tokens}{server.tokens + 5}\n",
        )
        agrees, printed = ask(server, **changes)
        assert not agrees
        assert f"--speculative-{said}" in printed
    server = start()
    server.drafting = False
    agrees, printed = ask(server)
    assert not agrees
    assert "nothing was drafted" in printed


def test_watched_traffic_and_all_since_the_start(ask, start):
    server = start()
    serve(server)
    agrees, said = ask(server, send=False, since_start=True)
    assert agrees
    assert "all traffic since the start" in said
    assert not server.asked
    with pytest.raises(UserError, match="nothing was drafted in what was watched"):
        ask(server, send=False, seconds=0.01)
    with pytest.raises(UserError, match="seconds=<how long"):
        ask(server, send=False)
    first = server.page()
    server.alpha = [0.95] * 3
    serve(server)
    pages = iter([first, server.page()])
    server.pages["/metrics"] = lambda: (200, next(pages))
    agrees, said = ask(server, send=False, seconds=0.01)
    assert not agrees
    assert "its prompts are easier" in said


def test_readings_that_cannot_be_compared_are_refused(ask, start):
    with pytest.raises(UserError, match=f"too few to tell .* count= above 1; there are {PROMPTS} held-out"):
        ask(start(), count=1)
    server = start()
    serve(server, 1)
    pages = [server.page(), server.page()]
    server.reset()
    server.pages["/metrics"] = lambda: (200, pages.pop(0) if pages else server.page())
    with pytest.raises(UserError, match="restarted between the two readings"):
        ask(server, count=1)
    server = start()
    server.pages["/metrics"] = lambda: (200, (setattr(server, "born", server.born + 1), server.page())[1])
    with pytest.raises(UserError, match="restarted between"):
        ask(server)
    page = server.page()
    server.pages["/metrics"] = lambda: (200, page)  # of another replica
    with pytest.raises(UserError, match="not of the engine that answers"):
        ask(server)


def test_all_prompts_that_are_too_few_ask_for_more_prompts(base, place, start, tmp_path, capsys):
    file = write_prompts(tmp_path / "heldout.jsonl", 1, first=100)
    few = OmegaConf.merge(base, {"prompts": {"heldout": str(file)}})
    with pytest.raises(UserError, match=r"all 1 held-out prompts were sent; prompts\.heldout=<file>"):
        verify(changed(few, VerifyOptions, url=start().url, count=50))
    assert "count=50: there are 1 held-out prompts, and all of them are sent" in capsys.readouterr().out


@pytest.mark.parametrize("replayed", [True, False])
def test_as_many_prompts_are_the_scored_ones_only_if_their_ids_are(
    base, place, start, tmp_path, capsys, monkeypatch, replayed
):
    """The noise between greedy answers to the same prompts is smaller."""
    row, sent, send = a_row(), [], traffic.send
    row["replay"]["tau_interval"] = [2.5, 2.78]
    row |= {name: row["replay"][name] for name in ("tau", "tau_interval", "survival")} | {"rounds": 800}
    row |= {} if replayed else {"replay": None}
    monkeypatch.setattr(traffic, "send", lambda *given: sent.append(send(*given)) or sent[-1])
    server, other = start(), write_prompts(tmp_path / "other.jsonl", PROMPTS, first=200)

    def noise(heldout, **conditions):
        options = OmegaConf.merge(base, {"prompts": {"heldout": str(heldout)}})
        card = written(tmp_path, a_card(place / "m", [row], **conditions))
        verify(changed(options, VerifyOptions, url=server.url, checkpoint=card))
        said = capsys.readouterr().out
        (tau,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["tau"]]
        return float(tau[4]), "the scorecard's own" in said

    wide, same = noise(place / "heldout.jsonl")
    assert not same
    scored = {"replayed_digest" if replayed else "prompts_digest": sent[-1].digest}
    narrow, same = noise(place / "heldout.jsonl", **scored)
    assert same
    assert narrow < 0.75 * wide
    assert noise(other, **scored) == (pytest.approx(wide, rel=0.1), False)


def test_traffic_of_others_is_noticed(ask, start):
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


def test_row_of_the_same_plan_and_temperature_is_compared(ask, start, place, tmp_path):
    tree = a_row() | {"decode": "tree-16 (depth 3, width 4)"}
    drawn = a_row([0.5, 0.5, 0.5]) | {"decode": "chain-3-sampled"}
    deeper, warm = a_row([0.5] * 4), a_row([0.5] * 3, temperature=1.0)
    card = written(tmp_path, a_card(place / "m", [tree, deeper, warm, drawn, a_row()]))
    server = start()
    assert ask(server, checkpoint=card)[0]
    assert not ask(server, checkpoint=card, row="chain-3-sampled")[0]
    assert not ask(server, checkpoint=card, temperature=1.0)[0]
    assert server.asked[-1]["temperature"] == 1.0
    card = written(tmp_path, a_card(place / "m", [tree, deeper]))
    sent = len(server.asked)
    with pytest.raises(UserError, match=r"no row chain-3 there .*decode=chain decode\.depth=3"):
        ask(server, checkpoint=card)
    assert len(server.asked) == sent
    with pytest.raises(UserError, match="depth=2, but the engine counts drafts of 3"):
        ask(server, checkpoint=card, depth=2)


def test_engine_that_drafts_trees_is_refused(ask, start):
    server = start("sglang")
    page = server.page
    server.page = lambda: page().replace(
        'spec_num_draft_tokens{model_name="m"} 4', 'spec_num_draft_tokens{model_name="m"} 16'
    )
    with pytest.raises(UserError, match="--speculative-eagle-topk 1"):
        ask(server)
    assert not server.asked


def test_first_row_without_replay_tells_how_many_prompts(ask, start, place, tmp_path):
    row = a_row()
    counted = {"tau": row["replay"]["tau"], "tau_interval": row["replay"]["tau_interval"], "rounds": 800}
    row |= counted | {"survival": row["replay"]["survival"], "replay": None}
    agrees, said = ask(start(), checkpoint=written(tmp_path, a_card(place / "m", [row])))
    assert agrees
    assert "16 held-out prompts" in said
    assert "counted by the decoder" in said


# -- the command ---------------------------------------------------------------------------------


def test_exit_codes(place, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [f"checkpoint={place / '7'}", f"prompts={place / 'train.jsonl'}", "patience=0.2", "retries=0"]
    argv += [f"prompts.heldout={place / 'heldout.jsonl'}"]
    good = foredraft("verify-served", *argv, f"url={start().url.removesuffix('/v1')}")
    assert (good.code, good.err) == (0, "")
    assert foredraft("verify-served", *argv, f"url={start(alpha=[0.1] * 3).url}").code == 1
    bad = foredraft("verify-served", *argv, "url=http://127.0.0.1:9")
    bad.refused("http://127.0.0.1:9/metrics: no server answers")
    assert bad.out == ""
    assert not list(tmp_path.iterdir())


def test_bad_options_are_refused_before_any_request(base):
    for option, value, said in (
        ("url", "localhost:8000", "url: not an address"),
        ("url", "http://me:secret@host", "^url: contains a secret"),
        ("api_key_env", "sk-123", "^api_key_env: is the name of"),
        ("checkpoint", "nowhere", "no score.json there"),
        ("timeout", 0.0, "timeout=0.0"),
        ("tolerance", -1.0, "tolerance=-1.0"),
        ("count", 0, "count=0"),
    ):
        with pytest.raises(UserError, match=said):
            verify(changed(base, VerifyOptions, **{option: value}))


def test_pages_that_are_missing_late_or_too_long_are_refused(ask, start, monkeypatch):
    server = start()
    monkeypatch.setattr(endpoint, "MAX_BYTES", 1 << 20)
    for answer, said in (
        ((404, "no such page"), "answers with 404; .*--enable-metrics"),
        ((200, "<!doctype html><title>Login</title>"), "neither vLLM nor SGLang"),
        ((200, "vllm:x 1\n" * (1 << 18)), "more than 1 MB"),
        (None, r"timeout=0\.3"),
    ):
        server.pages["/metrics"] = lambda answer=answer: answer or (time.sleep(1.0), (200, VLLM))[1]
        with pytest.raises(UserError, match=said):
            ask(server, timeout=20.0 if answer else 0.3)


def test_key_is_asked_for_and_never_shown(ask, start, monkeypatch):
    server = start(key="sk-secret")
    with pytest.raises(UserError, match=r"rejects the key in api_key_env=OPENAI_API_KEY \(401\)"):
        ask(server)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    agrees, said = ask(server)
    assert agrees
    assert "sk-secret" not in said


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_key_does_not_follow_a_redirect_to_another_origin(ask, start, monkeypatch, scheme):
    server, other = start(), start()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    there = server.moved = f"{scheme}://127.0.0.1:{other.port}"
    with pytest.raises(UserError, match=f"redirects to {there}, another origin.*give url={there}"):
        ask(server)
    assert set(server.keys) == {"sk-secret"}
    assert not other.keys


def test_refused_redirect_shows_no_password():
    for location in ("http://H:80/x", "//h/x", "/x", "http://u:pw@h/x"):  # the same origin
        check_redirect("http://h/metrics", location, "url")
    with pytest.raises(UserError, match=r"^http://h: redirects to https://h, .* give url=https://h/v1$"):
        check_redirect("http://me:secret@h/v1/models", "https://me:secret@h/v1/models", "url", "/v1")


def test_redirect_to_another_path_of_the_server_is_followed(start):
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
        self.target, self.drafter, self.busy = target, drafter, threading.Lock()

    def _draft(self, body):
        if body["max_tokens"] == 1:
            return {"tokens": [4]}
        with self.busy:
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
def test_real_decoder_counts_what_its_scorecard_says(tmp_path, ask):
    """The pocket's draft model, scored; then served by our own decoder, whole and damaged."""
    drafter = ["drafter=lm_given", "decode=chain", "decode.depth=3", "logger=csv"]
    outcome = train([*drafter, "score.temperatures=[0.0,1.0]", f"output_dir={tmp_path}"]).succeeded()
    checkpoint = str(outcome.folder / "checkpoints" / "0")
    target = load_target("data/pocket", "bfloat16")
    whole = load(checkpoint, target)
    target.tap(whole.taps)
    chat = Chat(load_tokenizer("data/pocket"))
    bundled = {"prompts__path": "data/prompts/train.jsonl", "prompts__heldout": "data/prompts/heldout.jsonl"}
    bundled |= {"concurrency": 1, "timeout": 100.0}
    for temperature in (0.0, 1.0):
        server = Decoder(chat, target, whole, 3)
        agrees, said = ask(server, checkpoint=checkpoint, temperature=temperature, **bundled)
        server.kill()
        print(said)
        assert agrees, said
        assert "counted: the scorecard's own 48 held-out prompts" in said
    for weight in whole.parameters():
        weight.data.normal_(0, 0.02)
    server = Decoder(chat, target, whole, 3)
    agrees, said = ask(server, checkpoint=checkpoint, **bundled)
    server.kill()
    print(said)
    assert not agrees
    assert "position 1 is almost never accepted" in said
