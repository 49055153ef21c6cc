"""Costs of rounds in a real engine: a trained drafter's speed there is predicted from its scorecard."""

from __future__ import annotations

import json

import pytest
from workbench import ROOT, foredraft

EAGLE = ROOT / "tests" / "fixtures" / "drafters" / "eagle"
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_vllm_counts_rounds_and_their_seconds(vllm_python, tmp_path):
    out, tokens = tmp_path / "out.json", 48
    words = ["engine=vllm", f"engine_python={vllm_python}", f"checkpoint={EAGLE}", "acceptance=[0.7,0.5,0.4]"]
    words += ["target=pocket", "prompts=bundled", "lengths=[3]", "batch_sizes=[1,2]", "passes=[1,4]"]
    words += ["score.prompts=4", f"score.max_new_tokens={tokens}", f"logs={tmp_path}", f"out={out}"]
    said = foredraft("advise", *words).succeeded().out
    card = json.loads(out.read_text())
    assert card["measured"]["engine"].startswith("vllm ")
    assert all(seconds > 0 for seconds in card["measured"]["passes"].values())
    for costs, found in zip(card["measured"]["costs"], card["results"], strict=True):
        three = costs["lengths"][0]
        assert three["drafted"] == pytest.approx(3, abs=0.2)  # the last of an answer may be cut
        assert 1.2 < three["tau"] < 4
        # The same ratio twice: tokens a second, and tokens of a round over its price.
        assert three["measured"] == pytest.approx(three["tau"] * costs["plain"] / three["seconds"], rel=0.25)
        assert found["lengths"][0]["tau"] == pytest.approx(2.6)
    assert "T=0, batch 2" in said
