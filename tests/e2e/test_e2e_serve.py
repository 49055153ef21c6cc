"""`transformers serve` on loopback with the bundled target: a real server for rollout=openai."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from stores import PLAN
from workbench import ROOT

from decode.model.load import load_tokenizer, stop_tokens
from distill.engines.base import InProcess
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.prompts.sources import read_prompts
from distill.rollouts.store import RolloutStore
from distill.rollouts.writer import Writer

pytestmark = pytest.mark.proof
MODEL = str(ROOT / "data" / "pocket")
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason="pip install -e '.[serving]'")


class Served:
    """The server's process; it may be killed, and started again on the same port."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.process = log, None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = "from transformers.cli.transformers import main; main()"
        options = ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        # In fp32 nothing but the last digits differs from our own decoding.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, "serve", MODEL, *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(f"no server: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def engine(self, chat: Chat) -> OpenAIEngine:
        settings = {"model": MODEL, "concurrency": 4, "timeout": 60.0, "retries": 3, "patience": 120.0}
        server = Server(f"http://127.0.0.1:{self.port}/v1", **settings, api_key_env="NO_KEY")
        return OpenAIEngine(server, chat, seed=0, context=2048)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("serve") / "log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(load_tokenizer(MODEL))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return read_prompts(ROOT / "data" / "prompts" / "heldout.jsonl")[:12]


def plan_for(pocket, **changes):
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    settings = {"stop": stop_tokens(pocket), "sampler": greedy, "self_prompts": 0, "max_prompt_tokens": 160}
    return replace(PLAN, **{**settings, "max_new_tokens": 24, "batch_size": 4, **changes})


def test_served_greedy_text_equals_the_target_in_process(served, pocket, chat, prompts):
    plan = plan_for(pocket)
    two = Prompt.of("two", (*prompts[0].messages, {"role": "user", "content": "And then?"}))
    asked = [*prompts[:7], two]
    own = Writer(InProcess(pocket, 4, seed=0), chat, plan)(0, asked, 0)
    theirs = Writer(served.engine(chat), chat, plan)(0, asked, 0)
    decode = chat.tokenizer.decode
    for mine, row in zip(own, theirs, strict=True):
        assert decode(row["tokens"]) == decode(mine["tokens"])
        assert (row["id"], row["finish_reason"]) == (mine["id"], mine["finish_reason"])
        assert (mine["ids"], row["ids"]) == ("exact", "reencoded")
        prompt = mine["loss_mask"].index(1)
        assert row["loss_mask"][: prompt + 1] == mine["loss_mask"][: prompt + 1]
    assert {row["finish_reason"] for row in own} == {"stop", "length"}, "the test has to see both"


def test_restarted_server_loses_no_row(served, chat, prompts, pocket, tmp_path, capsys):
    plan = plan_for(pocket, server=MODEL, max_new_tokens=16)
    store = RolloutStore(tmp_path, plan, prompts)
    writer = Writer(served.engine(chat), chat, plan)
    filling = threading.Thread(target=store.fill, args=(writer, lambda missing: None), daemon=True)
    filling.start()
    while not store.path(0).exists():
        time.sleep(0.01)
    served.kill()
    time.sleep(1.5)
    assert filling.is_alive()
    served.start()
    filling.join(120)
    rows = [row for i in range(store.shards) for row in pq.read_table(store.path(i)).to_pylist()]
    own = Writer(InProcess(pocket, 4, seed=0), chat, plan)(0, prompts, 0)
    texts = [[chat.tokenizer.decode(row["tokens"]) for row in some] for some in (rows, own)]
    assert texts[0] == texts[1]
    assert [row["id"] for row in rows] == [prompt.id for prompt in prompts]
    printed = capsys.readouterr().out
    assert printed.count("retrying for up to 120 s") == printed.count("answers again") == 1
