"""A drafter that vLLM serves is watched; one that was exchanged for a worse one is named in time."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workbench import ROOT, foredraft

from decode.model.load import load_target, load_tokenizer
from distill.engines.vllm import VLLM
from distill.prompts.chat_template import Chat
from drafters.checkpoint.io import as_saved, load
from drafters.export import formats

EAGLE = ROOT / "tests" / "fixtures" / "drafters" / "eagle"
POCKET = ROOT / "data" / "pocket"
TRAIN, HELDOUT = (ROOT / "data" / "prompts" / f"{name}.jsonl" for name in ("train", "heldout"))
PROMPTS, TOKENS, MOST = 20, 24, 200  # served prompts, tokens of an answer, requests until it is said
pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.fixture
def card(tmp_path) -> Path:
    """The EAGLE's scorecard on the prompts that are served."""
    lines = HELDOUT.read_text().splitlines(keepends=True)
    served, out = tmp_path / "served.jsonl", tmp_path / "score.json"
    served.write_text("".join(lines[:: len(lines) // PROMPTS][:PROMPTS]))
    words = [f"checkpoint={EAGLE}", "decode=chain", "decode.depth=3", "score.alternatives=[]"]
    words += ["target.dtype=float32", f"prompts={TRAIN}", f"prompts.heldout={served}", f"out={out}"]
    words += ["score.temperatures=[0]", "score.prompts=2", "score.audit_prompts=1"]
    words += [f"score.replay_prompts={PROMPTS}", f"score.max_new_tokens={TOKENS}"]
    foredraft("score", *words, f"answers={tmp_path / 'answers'}").succeeded()
    return out


@pytest.fixture
def worse(tmp_path) -> Path:
    """The same EAGLE with a layer that is partly noise."""
    folder = tmp_path / "worse"
    folder.mkdir()
    (folder / "config.json").write_text((EAGLE / "config.json").read_text())
    weights = load_file(EAGLE / "model.safetensors")
    torch.manual_seed(0)
    noisy = {name: w + 0.5 * w.std() * torch.randn_like(w) for name, w in weights.items() if w.ndim == 2}
    save_file(weights | noisy, folder / "model.safetensors")
    return folder


@pytest.fixture
def serving(vllm_python, tmp_path):
    """A vLLM with a drafter and traffic of the served prompts; yields its address and the answers so far."""

    @contextmanager
    def serving(checkpoint: Path) -> Iterator[tuple[str, list[int]]]:
        target = load_target(str(POCKET), dtype="float32")
        folder = tmp_path / f"export-{checkpoint.name}"
        folder.mkdir()
        layout = formats.write_layout(as_saved(load(checkpoint, target)), target, "vllm")
        layout.write(folder)
        words = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "1", "--enforce-eager"]
        chat = Chat(load_tokenizer(str(POCKET)))
        records = [json.loads(line) for line in (tmp_path / "served.jsonl").read_text().splitlines()]
        prompts = [chat.encode(one["messages"]) for one in records]
        answered, over = [], threading.Event()
        command = layout.command(str(POCKET), str(folder))
        log = tmp_path / f"{checkpoint.name}.log"
        with VLLM(str(vllm_python), [], 600.0).serve(command, log, *words) as running:

            def ask() -> None:
                for prompt in itertools.cycle(prompts):
                    if over.is_set():
                        return
                    body = {"model": str(POCKET), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                    headers = {"Content-Type": "application/json"}
                    url = f"{running.url}/v1/completions"
                    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answered.append(json.load(response)["usage"]["completion_tokens"])

            thread = threading.Thread(target=ask)
            thread.start()
            try:
                yield running.url, answered
            finally:
                over.set()
                thread.join()

    return serving


def test_an_exchanged_drafter_is_named_within_two_hundred_requests(card, worse, serving):
    words = [f"checkpoint={card}", "interval=0.5", "windows=2"]
    with serving(EAGLE) as (url, answered):
        done = foredraft("watch", f"url={url}", *words).succeeded()
        assert "LOWER" not in done.out + done.err
        assert len(answered) >= 160
    with serving(worse) as (url, answered):
        done = foredraft("watch", f"url={url}", *words)
        assert len(answered) <= MOST
    assert done.code == 1, done.err
    assert "LOWER than scored in 2 windows in a row" in done.out + done.err
    assert "foredraft follow" in done.out + done.err
