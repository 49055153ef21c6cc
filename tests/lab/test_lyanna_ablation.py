"""scripts/lab/benchmark.py lyanna: what it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
from workbench import command

from benchmark import run
from decode.kernels import packed_linear


@pytest.fixture(scope="module")
def checkpoint(bench):
    done = bench.train("drafter=lyanna", "score.enabled=false").succeeded()
    return done.folder / "checkpoints" / "last"


def ablate(bench, *more):
    given = [a for a in bench.command if a.startswith(("target=", "prompts")) and a != "prompts.self=0"]
    quick = ["score.replay_prompts=4", "score.max_new_tokens=7", "decode.depth=2", "decode.nodes=4"]
    paths = [f"out={bench.root / 'lyanna.json'}", f"answers={bench.root / 'answers'}"]
    return command(run, ["benchmark.py", "lyanna", *given, *quick, *paths, *more])


def card_of(bench):
    """What was written, its intervals looked at."""
    card = json.loads((bench.root / "lyanna.json").read_text())
    for arm in ("equal_nodes", "equal_forwards", "fresh_control"):
        difference, (low, high) = card[arm]
        assert low <= difference <= high
    return card


def test_differences_shares_and_head_products_are_written(bench, checkpoint):
    done = ablate(bench, f"checkpoint={checkpoint}", "temperature=1.0", "decode.proposal=fixed").succeeded()
    card = card_of(bench)
    assert 0 <= card["states_reused"] <= 1
    assert 0 <= card["salvage_rate"] <= 1
    assert (card["head_products"], card["prompts"], card["temperature"]) == (1, 4, 1.0)
    assert "1 head products a draft" in done.out


def test_head_products_with_packed_weights_count_too(bench, checkpoint, monkeypatch):
    monkeypatch.setattr(packed_linear, "packing_gain", lambda *shape: 9.0)
    words = ["target.dtype=bfloat16", "temperature=1.0", "decode.proposal=fixed"]
    assert "\n1 head products a draft" in ablate(bench, f"checkpoint={checkpoint}", *words).succeeded().out


def test_drawn_tokens_are_counted_by_the_decoder(bench, checkpoint):
    done = ablate(bench, f"checkpoint={checkpoint}", "temperature=1.0", "samples=2").succeeded()
    card = card_of(bench)
    assert (card["states_reused"], card["salvage_rate"], card["head_products"]) == (None, None, 1)
    assert "4 prompts, 2 answers each" in done.out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["checkpoint=/nowhere"], "no such folder"),
        (["checkpoint={lyanna}", "decode.width=1", "decode.nodes=2"], "a dynamic tree"),
        (["checkpoint={eagle}"], "the ablation is of drafter=lyanna"),
    ],
)
def test_bad_option_is_refused(bench, checkpoint, more, reason):
    eagle = bench.root / "eagle"
    eagle = eagle if eagle.exists() else bench.untrained_eagle()
    done = ablate(bench, *(word.format(lyanna=checkpoint, eagle=eagle) for word in more))
    assert done.code != 0
    assert reason in done.err
    assert "Traceback" not in done.err
