"""`foredraft make` to its end with a real engine: what it decides, counts, writes and serves."""

from __future__ import annotations

import json
import shlex
import urllib.request

import pytest
from ggufs import F32, tiny_llama, write_gguf
from workbench import foredraft, write_prompts

from distill.commands.making import candidates, engines, make
from distill.engine_costs.costs import EngineCosts
from distill.engines.llama_cpp import LlamaCpp
from distill.utils.run_folder import checkpoints

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
TOKENS, LENGTH, SECONDS = 24, 2, 15.0  # of an answer, of a draft, of training
WRITTEN = slice(100, 132)  # tokens that the target writes, and no others
SMALL = [
    *("budget=20m", "lengths=[1,3]", "batch_size=2", "logger=csv", "rollout.samples=1", "max_tokens=128"),
    *(f"rollout.max_new_tokens={TOKENS}", "rollout.temperature=0", "target.dtype=float32"),
    *("trainer.precision=32-true", "score.prompts=2", "score.max_new_tokens=16", "score.replay_prompts=4"),
    *("score.early_prompts=1", "score.audit_prompts=1", "drafter.draft_vocab_size=64"),
]


@pytest.fixture
def tiny(monkeypatch):
    """Short stages, none of which is left out because a model this small gains nothing."""
    monkeypatch.setattr(make, "process_age", lambda: 0.0)
    monkeypatch.setattr(make.Making, "_check_time", lambda self, options, after: SECONDS)
    monkeypatch.setattr(engines, "PROMPTS", 4)
    monkeypatch.setattr(candidates, "PAYS", 0.0)
    monkeypatch.setattr(EngineCosts, "best", lambda self, survival: (LENGTH, 1.5))


def asked(url: str, prompt: str) -> dict:
    body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_llama_cpp_serves_what_is_made_for_it(llama_cpp_python, own_cache, tiny, tmp_path):
    model = tiny_llama(layers=8, max_position_embeddings=1024, tie_word_embeddings=False)
    model.lm_head.weight.data[WRITTEN] *= 10
    file = write_gguf(tmp_path / "target.gguf", model, F32, keys={"tokenizer.ggml.eot_token_id": 0})
    prompts, heldout = (
        write_prompts(tmp_path / "p.jsonl", 16),
        write_prompts(tmp_path / "h.jsonl", 6, first=100),
    )
    words = [f"target={file}", f"prompts={prompts}", f"prompts.heldout={heldout}", "drafter=eagle3", *SMALL]
    places = [f"output_dir={tmp_path / 'outputs'}", f"llama_cpp_python={llama_cpp_python}", "ship=[gguf]"]
    done = foredraft("make", *words, *places).succeeded()
    (folder,) = (path.parent for path in (tmp_path / "outputs").glob("*/*/make.json"))
    record = json.loads((folder / "make.json").read_text())
    decided = {one["what"]: one["chosen"] for one in record["decisions"]}
    assert decided["drafter"] == "eagle3"
    assert decided["drafter.fc_norm"] is False, "what the format needs"
    found = record["engines"]["gguf"]
    assert found["engine"].startswith("llama.cpp b1")
    assert found["measured"] > 0
    assert decided["draft length, to=gguf"] == found["length"]
    assert found["length"] == (LENGTH if found["measured"] >= 1 else 0)
    (timed,) = json.loads((folder / "costs" / "gguf.json").read_text())["measured"]["costs"][0]["lengths"]
    assert timed["drafted"] > 0
    assert timed["length"] == LENGTH
    assert 1 <= timed["tau"] == found["tau"] <= 1 + LENGTH
    best = (folder / "checkpoints" / "best").resolve()
    assert best in checkpoints(folder)
    out = folder / "export" / f"{best.name}-gguf"
    assert {"drafter.gguf", "README.md", "passport.json", "recipe.json"} <= {
        one.name for one in out.iterdir()
    }
    command = shlex.split(record["commands"]["gguf"])
    assert command[:3] == ["llama-server", "-m", str(file)]
    assert "serve it: llama-server" in done.out
    llama = LlamaCpp(str(llama_cpp_python), ("-np", "1", "-t", "1", "-c", "1024"))
    with llama.serve(file, tmp_path / "served.log", *command[3:]) as running:
        answer = asked(running.url, "<|im_start|>user\nsay 3 xxx<|im_end|>\n<|im_start|>assistant\n")
    assert answer["tokens_predicted"] == TOKENS
    assert answer["timings"]["draft_n"] >= answer["timings"]["draft_n_accepted"] > 0
