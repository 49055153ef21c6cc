"""llama.cpp's server in the race: what it is asked, what its rows count, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ggufs import write_gguf

from benchmarks import in_llama_cpp
from benchmarks.vs_transformers import Contender, Text, race
from decode.errors import UserError
from decode.sampling import Sampler
from distill.engine_costs.in_llama_cpp import LlamaCppDecoder
from distill.engines.launch import Running

PROMPTS = [[5, 6, 7], [8, 9]]
LENGTH = 21
BURN = 0.05  # s of CPU time of an answer


class Loopback:
    """A server that answers as `llama-server` does, and keeps what it was asked.

    Attributes:
        asked: bodies of requests.
        counts: `timings` of every answer.
        tokens: number of tokens of an answer; None: as many as are asked for.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.tokens: int | None = None
        owner = self

        class Page(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.asked.append(body)
                begin = time.process_time()
                while time.process_time() - begin < BURN:
                    pass
                count = body["n_predict"] if owner.tokens is None else owner.tokens
                answer = {"tokens": list(range(count)), "timings": owner.counts}
                said = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.running = Running(url=f"http://127.0.0.1:{self.http.server_address[1]}", pid=os.getpid())


@pytest.fixture
def server():
    found = Loopback()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.fixture
def started(server, monkeypatch):
    """Names and arguments of the servers that were started, and the number of those that run."""
    seen: list[tuple[str, list[str]]] = []
    alive: list[str] = []

    @contextmanager
    def start(serving, words, name):
        seen.append((name, list(words)))
        alive.append(name)
        yield LlamaCppDecoder(server.running, serving.sampler)
        alive.remove(name)

    monkeypatch.setattr(in_llama_cpp, "started", start)
    yield seen
    assert not alive, "all ended with the context"


@contextmanager
def servers(tmp_path: Path, on_cpu_time: bool = True, ends: bool = True, most: int | None = None):
    installation: Any = None  # nothing is started
    with in_llama_cpp.contenders(
        in_llama_cpp.Peer(installation=installation, file=tmp_path / "m.gguf"),
        PROMPTS,
        max_new_tokens=LENGTH,
        most=most,
        sampler=Sampler(0.0),
        ends=ends,
        threads=1,
        on_cpu_time=on_cpu_time,
        logs=tmp_path,
    ) as found:
        yield found


def own(prompt, longest) -> Text:
    return Text(list(range(longest)), [1] * (longest - 1))


def rows(found, clock=time.perf_counter, repeats=2) -> dict[str, Any]:
    who = [Contender("ours", own), *found]
    results = race(who, PROMPTS, max_new_tokens=LENGTH, repeats=repeats, clock=clock)
    return {result.row["name"]: result.row for result in results}


def test_servers_are_started_anew_for_each_repeat_and_cache_nothing(server, started, tmp_path):
    with servers(tmp_path) as found:
        rows(found)
    names = ["plain", "ngram-simple", "ngram-mod"]
    assert [name for name, _ in started] == names * 2
    assert all(words[-2:] == ["--cache-ram", "0"] for _, words in started)
    assert [words[:-2] for _, words in started[:3]] == [[], *(["--spec-type", name] for name in names[1:])]
    warm, timed = server.asked[:3], server.asked[3:9]
    assert [(body["prompt"], body["n_predict"]) for body in warm] == [(PROMPTS[0][::-1], 8)] * 3
    assert [body["prompt"] for body in timed] == [prompt for prompt in PROMPTS for _ in names]
    asked = {"cache_prompt": False, "ignore_eos": False, "temperature": 0.0, "min_p": 0.0}
    assert all(body["n_predict"] == LENGTH and asked.items() <= body.items() for body in timed)


def test_rows_have_the_servers_cpu_time_and_its_tokens_a_pass(server, started, tmp_path):
    server.counts = {"draft_n": 12, "draft_n_accepted": 10}
    with servers(tmp_path) as found:
        assert not any(contender.alike for contender in found)
        drafted = rows(found, clock=itertools.count().__next__)
    assert drafted["ours"]["tokens_per_second"] == LENGTH, "a call takes one tick"
    # The server runs in this process here, whose CPU time is at least that of the answer.
    for name in ("plain", "ngram-simple", "ngram-mod"):
        row = drafted[f"llama.cpp-{name}"]
        assert 0.3 * LENGTH / BURN < row["tokens_per_second"] <= LENGTH / BURN
        assert row["tokens"] == 2 * LENGTH
    taus = [drafted[f"llama.cpp-{name}"]["tau"] for name in ("plain", "ngram-simple", "ngram-mod")]
    assert taus == [None, 2.0, 2.0], "20 tokens after the first in 10 passes"
    server.counts = {}
    with servers(tmp_path) as found:
        silent = rows(found, repeats=1)
    assert [row["tau"] for row in silent.values()] == [1.0, None, 1.0, 1.0]


def test_a_text_that_ended_early_says_nothing_of_passes(server, started, tmp_path):
    server.counts, server.tokens = {"draft_n": 48, "draft_n_accepted": 48}, 4
    with servers(tmp_path) as found:
        ended = rows(found, repeats=1)["llama.cpp-ngram-mod"]
    assert (ended["tau"], ended["tokens"]) == (None, 8)
    with servers(tmp_path, ends=False) as found, pytest.raises(UserError, match=r"answered 4 tokens, not 8"):
        rows(found)


def test_wall_time_is_the_races_and_the_context_ends_a_text(server, started, tmp_path):
    with servers(tmp_path, on_cpu_time=False, most=12) as found:
        assert {contender.clock for contender in found} == {None}
        rows(found, repeats=1)
    assert {body["n_predict"] for body in server.asked[3:]} == {12 - 3, 12 - 2}


# -- refusals ------------------------------------------------------------------------------------


def refused(bench, monkeypatch, *words: str):
    """The benchmark must end before anything is loaded."""

    def load(*_: Any) -> None:
        pytest.fail("something was loaded")

    monkeypatch.setattr("benchmarks.decode.load_inputs", load)
    return bench.benchmark("decode", *words)


def test_a_target_that_is_no_gguf_file_is_refused(bench, monkeypatch):
    done = refused(bench, monkeypatch, f"llama_cpp={sys.executable}")
    done.refused(f"llama_cpp: target={bench.target} is no GGUF file", "give target=/path/model.gguf")


@pytest.mark.parametrize(
    ("python", "said"), [(sys.executable, "has no package xllamacpp"), ("/nowhere/python", "no interpreter")]
)
def test_an_interpreter_without_the_package_is_refused(bench, monkeypatch, tmp_path, python, said):
    file = write_gguf(tmp_path / "m.gguf")
    refused(bench, monkeypatch, f"target={file}", f"llama_cpp={python}").refused(
        f"llama_cpp={python}: {said}"
    )
