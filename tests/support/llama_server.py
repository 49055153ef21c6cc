"""llama.cpp's converter and server: a target as a GGUF file, and what the server counts of a draft."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

WAIT = 120.0  # seconds for a server to start
# Arithmetic as near to ours as it has: keys and values in fp32, one thread, no second request beside it.
EXACT = ("-np", "1", "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup", "-c", "2048")
EXACT_DRAFT = ("-td", "1", "-ctkd", "f32", "-ctvd", "f32")


class Answer(NamedTuple):
    """One answer of the server."""

    tokens: list[int]
    drafted: int
    accepted: int


def convert(llama_cpp: Path, folder: Path, out: Path, outtype: str) -> Path:
    """A model folder as a GGUF file, by the converter."""
    script = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(folder)]
    done = subprocess.run(
        [*script, "--outfile", str(out), "--outtype", outtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@contextmanager
def served(llama_cpp: Path, target: Path, *words: str) -> Iterator[str]:
    """The url of a server of this target, for as long as the block runs; its log is in an error."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = target.with_name(f"server-{port}.log")
    command = [str(llama_cpp / "build" / "bin" / "llama-server"), "-m", str(target), *EXACT, *words]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + WAIT
        while not _ready(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, f"not ready: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield url
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def ask(url: str, prompt: Sequence[int], tokens: int) -> Answer:
    """The likeliest tokens after a prompt, to the limit: no end token ends it."""
    asked = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    asked |= {"cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)
    timings = said["timings"]
    return Answer(said["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
