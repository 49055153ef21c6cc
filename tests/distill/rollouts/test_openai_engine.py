"""Answers of a server are rows, whatever fails on the way; what cannot be used is refused or counted."""

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from fake_server import CUT, DRIP, FakeServer
from stores import PLAN
from workbench import make_tokenizer

from decode.errors import UserError
from distill.engines import http as patience
from distill.engines import openai_protocol as replies
from distill.engines.base import Request, SamplingParams
from distill.engines.http import Server, retry_after
from distill.engines.openai import OpenAIEngine
from distill.engines.openai_protocol import seed_of
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.rollouts.writer import Writer
from distill.serving.endpoint import Endpoint

END = 3
PARAMS = SamplingParams({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, 40, [END])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.1)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer())


@pytest.fixture
def start(chat):
    """Starts servers, and leaves none behind."""
    started = []

    def make(**options) -> FakeServer:
        started.append(FakeServer(chat, **options))
        return started[-1]

    yield make
    for server in started:
        server.kill()


def engine(fake: FakeServer, **options) -> OpenAIEngine:
    settings = {"model": "m", "concurrency": 4, "timeout": 20.0, "retries": 3, "patience": 20.0}
    server = Server(fake.url, **{**settings, "api_key_env": "A_KEY", **options})
    return OpenAIEngine(server, fake.chat, seed=0, context=None)


def ask(chat: Chat, *texts: str) -> list[Request]:
    talks = [({"role": "user", "content": text},) for text in texts]
    return [Request(f"p{i}", 0, chat.encode(talk), talk) for i, talk in enumerate(talks)]


def answers_of(fake: FakeServer, *texts: str, params: SamplingParams = PARAMS, **options):
    """Answers of a new engine."""
    return engine(fake, **options)(ask(fake.chat, *texts), params)


def heard(chat: Chat, answers) -> list[str]:
    return [chat.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]


def encoded(chat: Chat, text: str):
    """The answer of a server that returns no ids."""
    return ([*chat.tokenizer.encode(text), END], True, False)


MANY = [f"q{i}" for i in range(24)]
SO = [f"so: q{i}" for i in range(24)]


# -- what is asked, and in which order -----------------------------------------------------------


def test_requests_in_flight_are_limited_and_answers_in_order(chat, start):
    fake = start(delay=0.03)
    fake.message = lambda body: time.sleep(0.05 * (int(body["messages"][-1]["content"][1:]) % 3 == 0)) or {}
    assert heard(chat, answers_of(fake, *MANY)) == SO
    assert fake.most == 4
    assert len(fake.asked) == 24


def test_every_request_has_the_sampling_parameters(chat, start):
    fake = start()
    params = SamplingParams({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, 40, [END])
    first, again = ask(chat, "a", "a")
    engine(fake)([first, again._replace(id="p0", sample=1)], params)
    one, two = sorted(fake.asked, key=lambda body: body["seed"] != seed_of(first, 0))
    sent = {"model": "m", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 40}
    # What a model's own generation_config.json would have put in their place.
    sent |= {"min_p": 0.0, "repetition_penalty": 1.0}
    assert sent.items() <= one.items()
    assert sent.items() <= two.items()
    assert one["seed"] == seed_of(first, 0) != two["seed"]
    assert 0 <= two["seed"] < 2**31
    assert seed_of(first, 0) != seed_of(first, 1)
    engine(fake)([first], SamplingParams({"temperature": 0.0, "top_k": 0, "top_p": 1.0}, 40, [END]))
    assert fake.asked[-1]["top_k"] == -1


def test_answer_is_limited_to_the_context(chat, start):
    fake = start()
    made = engine(fake)
    assert made.context == 256  # max_model_len of the server's list
    (long,) = ask(chat, "x" * 230)
    (answer,) = made([long], PARAMS)
    room = 256 - len(long.tokens)
    assert (fake.asked[-1]["max_tokens"], len(answer.tokens), answer.stopped) == (room, room, False)


def test_prompt_without_a_template_is_completed(start):
    plain = Chat(make_tokenizer(None), template="none")
    for strict, prompt in ((False, plain.tokenizer.encode("ab")), (True, "ab")):
        fake = start(strict=strict)
        fake.chat = plain
        (answer,) = answers_of(fake, "ab")
        assert fake.asked[0]["prompt"] == prompt
        assert heard(plain, [answer]) == [f"so: {prompt}"]
        assert answer.exact is not strict


# -- token ids ----------------------------------------------------------------------------------


def test_ids_of_the_server_are_exact_where_it_read_our_prompt(chat, start, capsys):
    fake = start()
    ids = [10, 11, 12, END]  # not what encoding the text would give
    fake.message = lambda body: {"tokens": ids, "content": "hello"}
    assert answers_of(fake, "a") == [(ids, True, True)]
    fake.prompt = lambda ids: [5, *ids]
    assert answers_of(fake, "a") == [encoded(chat, "hello")]
    assert "reads prompt p0 as 4 tokens, where the target's chat template gives 3" in capsys.readouterr().out


def test_prompt_ids_are_where_vllm_or_sglang_puts_them(chat):
    (request,) = ask(chat, "a")
    prompt = {"prompt_token_ids": request.tokens}
    choice = {"message": {"content": "b"}, "finish_reason": "stop", "token_ids": [9, END]}
    for body in ({"choices": [choice | prompt]}, {"choices": [choice]} | prompt):
        answer = replies.to_answer(replies.read_reply(json.dumps(body)), request, PARAMS, chat)
        assert answer == ([9, END], True, True)


def test_ids_end_as_the_answer_did(chat):
    (request,) = ask(chat, "a")
    text = encoded(chat, "b")
    for ids, finish, stop, want in (
        ([9], "stop", [END], ([9, END], True, True)),  # left out, and it can only have been that one
        ([9], "stop", [END, 2], ([9, END], True, False)),
        ([9, 8], "length", [END], ([9, 8], False, True)),
        ([9, END], "length", [END], ([9, END], True, True)),
        ([9, 10**6], "stop", [END], text),  # no token of ours
        ([9, True], "stop", [END], text),
        ("9", "stop", [END], text),
    ):
        reply = replies.Reply("b", finish, {}, ids, request.tokens)
        assert replies.to_answer(reply, request, PARAMS._replace(stop=stop), chat) == want


def test_server_that_refuses_what_openai_has_not_is_asked_without(chat, start, capsys):
    fake = start(strict=True)
    made = engine(fake)
    assert made(ask(chat, *MANY), PARAMS) == [encoded(chat, text) for text in SO]
    made(ask(chat, "a"), PARAMS)
    assert len(fake.asked) == 25, "a field that was refused was sent again"
    said = capsys.readouterr().out
    assert said.count("returns no token ids (422: Unexpected fields in the request") == 1


def test_another_template_shows_in_the_length_of_a_prompt(chat, start, capsys):
    fake = start(ids=False)
    fake.prompt = lambda ids: [*ids, 1, 2]
    answers_of(fake, "a", "b")
    assert capsys.readouterr().out.count("is it the same model?") == 1


# -- how answers end ----------------------------------------------------------------------------


def test_empty_answer_is_an_end_token(chat, start):
    fake = start(ids=False)
    fake.message = lambda body: {"content": ""}
    assert answers_of(fake, "a") == [([END], True, False)]


def test_filtered_answer_makes_no_row_and_is_counted(chat, start, capsys):
    fake = start()
    fake.message = lambda body: (
        {"content": None, "finish_reason": "content_filter"} if "bad" in str(body["messages"]) else {}
    )
    prompts = [Prompt.of(t, ({"role": "user", "content": t},) * 2) for t in ("a", "bad", "c")]
    plan = replace(PLAN, self_prompts=0, max_prompt_tokens=60)
    rows = Writer(engine(fake), chat, plan)(0, prompts, 0)
    assert [row["id"] for row in rows] == ["a", "c"]
    assert all(row["loss_mask"].count(1) > 1 for row in rows)
    assert "answers omitted: 1 removed by a content filter" in capsys.readouterr().out
    with pytest.raises(UserError, match="no answer can be used: 1 removed by"):
        answers_of(fake, "bad")


CALLING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments.n }}]{% endfor %}"
    "<|end|>\n"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("finish", ["tool_calls", "length"])
def test_what_a_server_takes_apart_the_template_puts_together(start, finish):
    calling = Chat(make_tokenizer(CALLING))
    fake = start(ids=False)
    fake.chat = calling
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"n": 7}'}}
    apart = {"tool_calls": [call], "reasoning_content": "hm"}
    fake.message = lambda body: {"content": "ok", "finish_reason": finish, "apart": apart}
    (answer,) = answers_of(fake, "a")
    end = "<|end|>" if finish == "tool_calls" else ""
    assert calling.tokenizer.decode(answer.tokens) == f"(hm)ok[f:7]{end}"
    assert (answer.stopped, answer.exact) == (bool(end), False)


def test_tool_calls_are_json_to_a_server(chat):
    function = {"name": "f", "arguments": {"n": 7}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    call["train"] = False  # which is between the record and the loss mask
    user = {"role": "user", "content": "a"}
    request = Request("p", 0, [1], (user, call, user), ({"type": "function"},))
    sent = replies.body(request, PARAMS, replies.with_nothing, chat, 0)
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"n": 7}'
    assert "train" not in sent["messages"][1]
    assert (sent["messages"][0], sent["tools"]) == (user, [{"type": "function"}])
    assert function["arguments"] == {"n": 7}


def test_malformed_tool_call_ends_no_run(start):
    calling = Chat(make_tokenizer(CALLING))
    broken = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"n": '}}]}
    for ids in (True, False):
        fake = start(ids=ids)
        fake.chat = calling
        fake.message = lambda body: (
            {"tokens": [9, END], "content": "", "finish_reason": "tool_calls", "apart": broken}
            if body["messages"][0]["content"] == "a"
            else {}
        )
        first, second = answers_of(fake, "a", "b")
        assert first == (([9, END], True, True) if ids else ([], False, False))
        assert heard(calling, [second]) == ["so: b"]


# -- failures that pass --------------------------------------------------------------------------


def test_retry_after_is_waited_for(chat, start):
    fake = start()
    made = engine(fake)
    made(ask(chat, "a"), PARAMS)
    fake.fault(3, 429, '{"error": {"message": "slow down"}}', retry_after="0.4")
    assert heard(chat, made(ask(chat, *MANY), PARAMS)) == SO
    times: dict[int, list[float]] = {}
    for body in fake.asked[1:]:
        times.setdefault(body["seed"], []).append(body["at"])
    waits = [last - first for first, last in (at for at in times.values() if len(at) > 1)]
    assert len(waits) == 3
    assert min(waits) >= 0.4


def test_failures_nonsense_and_cut_bodies_lose_nothing(chat, start):
    fake = start()
    fake.faults = [(500, {}, "boom"), CUT, (503, {}, ""), CUT, (502, {"content-type": "text/html"}, "<h1>")]
    fake.faults += [(200, {}, text) for text in ("<html>login</html>", '{"choices": []}', "\x00\xff")]
    for content, reason in ((1, "stop"), ("x", "abort")):
        choice = {"message": {"content": content}, "finish_reason": reason}
        fake.faults.append((200, {}, json.dumps({"choices": [choice]})))
    assert heard(chat, answers_of(fake, *MANY)) == SO
    assert not fake.faults
    assert len(fake.asked) == 34


def test_no_more_tokens_are_kept_than_were_asked_for(chat, start, capsys):
    fake = start()
    whole = {"prompt_token_ids": ask(chat, "a")[0].tokens, "object": "x"}
    choice = {"finish_reason": "stop", "message": {"content": "x"}, "token_ids": [7] * 200_000}
    fake.fault(1, 200, json.dumps(whole | {"choices": [choice]}))
    assert answers_of(fake, "a", params=PARAMS._replace(max_new_tokens=10)) == [([7] * 10, False, True)]
    assert "returns more tokens than max_tokens=10; answers are cut there" in capsys.readouterr().out


def test_list_of_models_of_any_content(chat, start):
    for listed in ('{"data": [{"id": 3}, {"id": "m", "max_model_len": "many"}]}', "[" * 100_000):
        fake = start()
        fake.pages["/v1/models"] = lambda listed=listed: (200, listed)
        made = engine(fake)
        assert made.context is None
        fake.fault(1, 200, '{"choices": ' + "[" * 100_000)
        assert heard(chat, made(ask(chat, "a"), PARAMS)) == ["so: a"]


def test_server_killed_and_started_again_loses_nothing(chat, start, capsys):
    fake = start(delay=0.02)
    made = engine(fake)
    answers = []
    worker = threading.Thread(target=lambda: answers.extend(made(ask(chat, *MANY), PARAMS)))
    worker.start()
    while len(fake.asked) < 9:
        time.sleep(0.005)
    fake.kill()
    time.sleep(0.5)
    assert worker.is_alive()
    assert len(fake.asked) < 24
    after = start(port=fake.port)
    worker.join(20)
    assert heard(chat, answers) == SO
    assert 0 < len(after.asked) < 24
    said = capsys.readouterr().out
    assert said.count("; retrying for up to 20 s") == 1
    assert said.count(": answers again") == 1


def test_retry_after_is_seconds_or_a_date():
    past = "Fri, 31 Dec 1999 23:59:59 GMT"
    waits = {"3": 3, "0.5": 0.5, "-1": 0, past: 0, "soon": None, "inf": None, None: None}
    assert {value: retry_after(value) for value in waits} == waits
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 90 < (retry_after(later) or 0) <= 100


# -- failures that do not ------------------------------------------------------------------------


def apart(body) -> dict:
    return {"content": "", "finish_reason": "length", "apart": {"reasoning": "hm"}}


LONG, TOO_LONG = " " * (3 << 16), "a response of more than 0 MB"
GONE = '{"error": {"message": "CUDA is gone"}}'
BAD = r'{"error": {"message": "too\nlong"}}'


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, GONE, r"500: CUDA is gone; given up after 4 .*\(rollout.retries=3\)"),
        (200, LONG, TOO_LONG),
        (500, LONG, TOO_LONG),
        (400, BAD, r"^rollout.url=http\S+: refuses request p\d+ \(400: too long\)$"),
    ],
)
def test_server_that_keeps_failing_is_given_up(start, monkeypatch, status, body, said):
    fake = start()
    monkeypatch.setattr(patience, "MAX_BYTES", 1 << 16)
    fake.fault(100 if status == 500 else 1, status, body)
    with pytest.raises(UserError, match=said):
        answers_of(fake, *MANY)
    assert len(fake.asked) < 24, "the others were asked for in vain"


NO_ADDRESS = "rollout.url: the server redirects to an invalid address"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ("llama", "qwen")}, "^rollout.model=m: .*404: The model m .*lists llama, qwen$"),
        ({"moved": "http://[bad"}, NO_ADDRESS),
        ({"moved": "http://127.0.0.1:99999"}, NO_ADDRESS),
        ({"coding": "gzip"}, "answers with unrequested gzip encoding"),
        ({"ids": False, "message": apart}, "no answer can be used: 2 split into reasoning or tool"),
    ],
)
def test_server_that_cannot_be_used_is_refused(start, changes, said):
    fake = start()
    for name, value in changes.items():
        setattr(fake, name, value)
    with pytest.raises(UserError, match=said):
        answers_of(fake, "a", "b")
    assert not fake.asked or changes.get("message")


def test_patience_ends(start):
    fake = start()
    fake.fault(1000, 503, '{"detail": "loading"}')
    with pytest.raises(UserError, match=r"503: loading; given up after \d+ .*\(rollout.patience=0.5\)"):
        answers_of(fake, "a", patience=0.5)
    fake.faults.clear()
    fake.fault(1, 429, "", retry_after="3600")
    begin = time.monotonic()
    with pytest.raises(UserError, match="asks to wait 3600 s; given up after 1 attempts"):
        answers_of(fake, "a")
    assert time.monotonic() - begin < 5


def test_sampling_that_the_server_lacks_is_refused(start):
    fake = start(strict=True)
    params = SamplingParams({"temperature": 1.0, "top_k": 5, "top_p": 1.0}, 40, [END])
    with pytest.raises(UserError, match=r"refuses request p0 \(422: Unexpected fields .*top_k"):
        answers_of(fake, "a", params=params)
    assert not fake.asked


def test_wrong_key_is_one_line_without_the_key(chat, start, monkeypatch, capsys):
    fake = start(key="right")
    monkeypatch.setenv("A_KEY", "sk-very-secret")
    with pytest.raises(UserError, match="refuses the key in A_KEY") as error:
        engine(fake)
    monkeypatch.delenv("A_KEY")
    with pytest.raises(UserError, match="wants a key in A_KEY"):
        engine(fake)
    assert "secret" not in str(error.value) + capsys.readouterr().out
    monkeypatch.setenv("A_KEY", "right")
    made = engine(fake)
    assert heard(chat, made(ask(chat, "q0"), PARAMS)) == ["so: q0"]
    assert "right" not in repr(vars(made)) + repr(made.server)


def test_neither_key_nor_prompt_follows_a_redirect_to_another_origin(chat, start, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-secret")
    server, other = start(), start()
    there = server.moved = f"http://127.0.0.1:{other.port}"
    with pytest.raises(
        UserError, match=f"redirects to {there}, another origin.*give rollout.url={there}/v1$"
    ):
        answers_of(server, "private")
    assert server.keys
    assert not other.keys + other.asked


def test_half_a_character_is_no_reply():
    choice = {"message": {"content": "\ud800 a"}, "finish_reason": "stop"}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        replies.read_reply(json.dumps({"choices": [choice]}))


def test_arguments_nested_too_deeply_are_no_answer(chat):
    (request,) = ask(chat, "a")
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    answer = replies.to_answer(replies.read_reply(json.dumps({"choices": [choice]})), request, PARAMS, chat)
    assert "cannot be joined again" in answer


def test_nobody_there_is_one_line(chat, start):
    fake = start()
    fake.kill()
    with pytest.raises(UserError, match=r"^rollout.url=http://127.0.0.1:\d+/v1: no server answers there"):
        engine(fake)


def test_without_the_library_the_extra_is_named(chat, start, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install 'foredraft\[serving\]'"):
        engine(start())


# -- the whole way -------------------------------------------------------------------------------


def served(bench, fake, *more):
    fake.models = (str(bench.target),)
    short = ["trainer.max_steps=2", "score.every=2"]
    return bench.train("rollout=openai", f"rollout.url={fake.url}", *short, *more)


def rows_of(bench, server: str) -> list[dict]:
    rows = []
    for note in (bench.root / "outputs" / "rollouts").glob("*/manifest.json"):
        plan = json.loads(note.read_text())["plan"]
        if plan["server"] == server:
            for shard in sorted(note.parent.glob("*.parquet")):
                rows += pq.read_table(shard).to_pylist()
    return rows


def test_train_py_takes_a_servers_answers(bench, start, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    fake = start(key="sk-very-secret", strict=True)
    done = served(bench, fake)
    assert (done.code, done.err) == (0, "")
    rows = rows_of(bench, str(bench.target))
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(12)]
    assert {row["ids"] for row in rows} == {"reencoded"}
    assert "so: say" in make_tokenizer().decode(rows[0]["tokens"])
    # What is replayed is the target's own, whoever wrote what it trains on.
    for shard in (bench.root / "outputs" / "heldout").rglob("*.parquet"):
        assert set(pq.read_table(shard)["ids"].to_pylist()) == {"exact"}
    for note in (bench.root / "outputs" / "heldout").rglob("manifest.json"):
        assert json.loads(note.read_text())["plan"]["server"] == ""
    for file in bench.root.rglob("*"):
        assert not file.is_file() or b"very-secret" not in file.read_bytes(), file
    # The same store again, with nobody there.
    fake.kill()
    again = served(bench, fake, "seed=0", "trainer.max_steps=1", "score.enabled=false")
    assert again.code == 0
    assert "rollouts: reusing all 3 shards" in again.out
    # Another server's model, or none, has a store of its own.
    assert served(bench, start(), "rollout.patience=1.0", "score.enabled=false").code == 0
    assert bench.train("score.enabled=false", "trainer.max_steps=1").code == 0
    assert len(list((bench.root / "outputs" / "rollouts").glob("*/manifest.json"))) == 2


@pytest.mark.proof
def test_killed_run_continues_with_its_shards(bench, start):
    fake = start()
    fake.faults = [None] * 5 + [(403, {}, "")]
    first = served(bench, fake, "seed=5", "score.enabled=false")
    assert first.code == 2
    assert first.err.startswith("error: rollout.url=")
    assert len(first.err.splitlines()) == 1
    fresh = start()  # what the first run had in flight may still reach the other
    second = served(bench, fresh, "seed=5", "score.enabled=false")
    assert second.code == 0
    assert "1 of 3 shards are there already" in second.out
    assert len(fresh.asked) == 8


WRONG = {
    "rollout.url=http://me:pass@host/v1": "rollout.url: contains a secret",
    "rollout.url=127.0.0.1:8000": "rollout.url: not an address; write http",
    "rollout.store=s3://KEY:a/pass@bucket/x": "rollout.store: contains a secret",
    "rollout.api_key_env=sk-123": "rollout.api_key_env: is the name of the environment variable",
    "rollout.concurrency=0": "rollout.concurrency=0: must be at least 1",
    "rollout.until=length": "rollout=openai, ",
    "rollout.model=other": "rollout.model=other: ",
    "prompts.self=3": "prompts.self: a chat server answers prompts but writes none",
}


def test_wrong_setting_is_one_line_before_any_work(bench, start):
    fake = start()
    for setting, said in WRONG.items():
        done = served(bench, fake, setting)
        done.refused(f"error: {said}")
        assert "pass@" not in done.err
    assert not any(b"pass@" in path.read_bytes() for path in bench.root.rglob("*") if path.is_file())
    assert not fake.asked


@pytest.mark.proof
def test_server_needs_its_own_settings(bench):
    bench.train("rollout.engine=openai").refused("choose it by rollout=openai")
    bench.train("rollout=openai").refused("rollout.url: must be given")


def test_timeout_is_for_the_whole_answer_and_not_for_each_byte(chat, start):
    fake = start()
    asking = engine(fake, timeout=0.5, retries=1)
    fake.faults = [DRIP]
    begun = time.monotonic()
    assert heard(chat, asking(ask(chat, "q0"), PARAMS)) == ["so: q0"]
    assert time.monotonic() - begun < 5
    fake.faults = [DRIP, DRIP]
    with pytest.raises(UserError, match=r"no answer within rollout\.timeout=0\.5 s; given up after 2 "):
        asking(ask(chat, "q1"), PARAMS)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"]
)
def test_page_that_drips_is_given_up_at_its_timeout(head):
    """In its header as in its body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                for _ in range(100):
                    connection.sendall(b"a")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        begun = time.monotonic()
        page = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.5, "A_KEY")
        with pytest.raises(UserError, match=r"no answer within timeout=0\.5 s"):
            page.reading()
        assert time.monotonic() - begun < 3
