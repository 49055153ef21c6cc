"""scripts/lab/benchmark.py decode with llama.cpp's servers, which take turns with this process's decoders."""

from __future__ import annotations

import json

import pytest
from ggufs import F32, tiny_llama, write_gguf
from workbench import command, write_prompts

from benchmark import run

TOKENS, PROMPTS = 150, 3
WRITTEN = slice(100, 104)  # tokens that the target writes again and again
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_servers_race_and_each_repeat_has_new_ones(llama_cpp_python, own_cache, tmp_path):
    model = tiny_llama(layers=4, max_position_embeddings=1024, tie_word_embeddings=False)
    model.lm_head.weight.data[WRITTEN] *= 10
    file = write_gguf(tmp_path / "target.gguf", model, F32, keys={"tokenizer.ggml.eot_token_id": 0})
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 12), tmp_path / "out.json"
    words = [f"target={file}", "target.dtype=float32", f"prompts={prompts}", "prompts.heldout_share=0.5"]
    words += [f"llama_cpp={llama_cpp_python}", "compiled=false", "ends=false", f"out={out}"]
    words += ["score.repeats=2", f"score.prompts={PROMPTS}", f"score.max_new_tokens={TOKENS}"]
    done = command(run, ["benchmark.py", "decode", *words]).succeeded()
    card = json.loads(out.read_text())
    served = {row["name"]: row for row in card["rows"] if row["name"].startswith("llama.cpp-")}
    assert list(served) == ["llama.cpp-plain", "llama.cpp-ngram-simple", "llama.cpp-ngram-mod"]
    for row in served.values():
        assert row["tokens"] == PROMPTS * TOKENS
        assert 0 < row["spread"][0] <= row["spread"][1]
        assert (row["differ"], row["near_ties"], row["largest_gap"]) == (None, None, None)
    assert served["llama.cpp-plain"]["tau"] is None
    assert served["llama.cpp-ngram-mod"]["tau"] > 1.1, "its texts repeat themselves"
    assert served["llama.cpp-ngram-simple"]["tau"] >= 1.0
    assert card["llama_cpp"]["build"].startswith("b1")
    assert "so its texts are its own and not compared; CPU time of its server" in done.out
    log = (tmp_path / "out.logs" / "llama-cpp-ngram-mod.log").read_text()
    assert log.count("prompt eval time") == PROMPTS + 1, "the last server answered one repeat and a warm-up"
