"""Costs of rounds in a real engine: rounds, drafted and accepted tokens as it counts them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from ggufs import F32, tiny_llama, write_gguf
from workbench import ROOT, foredraft, write_prompts

EAGLE = ROOT / "tests" / "fixtures" / "drafters" / "eagle"
TOKENS = 48
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def advise(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ["lengths=[3]", "passes=[1,4]", "score.prompts=4", f"score.max_new_tokens={TOKENS}"]
    places = [f"logs={tmp_path / 'logs'}", f"out={out}"]
    foredraft("advise", *words, *sizes, *places, "acceptance=[0.7,0.5,0.4]").succeeded()
    card = json.loads(out.read_text())
    assert all(seconds > 0 for seconds in card["measured"]["passes"].values())
    for costs, found in zip(card["measured"]["costs"], card["results"], strict=True):
        assert [row["tau"] for row in found["lengths"] if row["length"] == 3] == [pytest.approx(2.6)]
        (three,) = costs["lengths"]
        assert min(three["seconds"], three["measured"], costs["prefill"], costs["drafted_prefill"]) > 0
        assert three["drafted"] == pytest.approx(3, abs=0.5)  # the last drafts of an answer may be cut
    return card


def test_vllm_with_one_and_two_requests(vllm_python, tmp_path):
    words = ["engine=vllm", f"engine_python={vllm_python}", f"checkpoint={EAGLE}", "batch_sizes=[1,2]"]
    card = advise(tmp_path, "target=pocket", "prompts=bundled", *words)
    assert card["measured"]["engine"].startswith("vllm ")
    one, two = card["measured"]["costs"]
    assert 1.2 < one["lengths"][0]["tau"] < 4
    assert two["batch_size"] == 2


@pytest.mark.proof
def test_vllm_drops_the_temperatures_of_drafts_as_reported(vllm_python):
    """If this fails, vLLM has mended it: remove the report, CPU_DRAWS and this test."""
    report = (ROOT / "docs" / "engines.md").read_text().partition("**On CPUs, drafted texts")[2]
    script, printed = re.findall(r"\n\n((?:    .*\n|\n(?=    ))+)", report)[:2]
    done = subprocess.run([vllm_python, "-c", dedent(script)], capture_output=True, text=True)
    assert done.stdout.strip().endswith(dedent(printed).strip()), done.stderr


def test_llama_cpp_with_the_target_as_its_own_drafter(llama_cpp_python, own_cache, tmp_path):
    model = tiny_llama(layers=4, max_position_embeddings=1024, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "target.gguf", model, F32, keys={"tokenizer.ggml.eot_token_id": 0})
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)
    words = ["engine=llama.cpp", f"engine_python={llama_cpp_python}", f"target={file}", "drafter=lm_given"]
    words += [f"drafter.path={file}", "target.dtype=float32", "outtype=f32"]
    card = advise(tmp_path, *words, f"prompts={prompts}", "prompts.heldout_share=0.5")
    assert card["measured"]["engine"].startswith("llama.cpp b1")
    (three,) = card["measured"]["costs"][0]["lengths"]
    assert three["tau"] == pytest.approx(1 + three["drafted"], abs=0.05), "all are accepted"
