"""scripts/lab/benchmark.py batch and context: what they write, and what they refuse."""

from __future__ import annotations

import json

import pytest
from workbench import command

from benchmark import run


@pytest.fixture(scope="module")
def checkpoint(bench):
    return bench.untrained_eagle()


def sweep(bench, word, *more):
    given = [a for a in bench.command if a.startswith(("target=", "prompts")) and a != "prompts.self=0"]
    quick = ["score.prompts=2", "score.max_new_tokens=7", "plans.chain.depth=2", "~plans.tree"]
    return command(run, ["benchmark.py", word, *given, *quick, f"out={bench.root / 'sweep.json'}", *more])


def test_batches_are_compared_with_plain_decoding(bench, checkpoint):
    done = sweep(bench, "batch", f"checkpoint={checkpoint}", "batch_sizes=[1,5]").succeeded()
    card = json.loads((bench.root / "sweep.json").read_text())
    assert [(row["batch_size"], row["decode"]) for row in card["rows"]] == [
        (size, plan) for size in (1, 5) for plan in ("plain", "chain-2")
    ]
    for row in card["rows"]:
        assert row["tokens_per_second"] > 0
        assert 0 < row["verify_share"] < 1
        if row["decode"] == "plain":
            assert row["speedup"] == row["speedup_with_prefill"] == row["tau"] == 1
    assert done.out.startswith("batch_size")


def test_every_context_gets_long_and_short_answers(bench, checkpoint):
    words = ["contexts=[32,64]", "new_tokens=[7,2]"]
    sweep(bench, "context", f"checkpoint={checkpoint}", *words).succeeded()
    rows = json.loads((bench.root / "sweep.json").read_text())["rows"]
    assert [(row["context"], row["answer"]) for row in rows[::2]] == [(32, 7), (32, 2), (64, 7), (64, 2)]
    assert all(row["speedup_with_prefill"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("word", "more", "reason"),
    [
        ("batch", ["checkpoint=/nowhere"], "no such folder"),
        ("batch", [], "checkpoint"),
        ("batch", ["checkpoint=/nowhere", "batch_sizes=[0]"], "batch_sizes=[0]: must be at least 1"),
        ("context", ["contexts=[400]", "checkpoint={}"], "the target's context is 256"),
    ],
    ids=str,
)
def test_bad_option_is_refused(bench, checkpoint, word, more, reason):
    sweep(bench, word, *(a.format(checkpoint) for a in more)).refused(reason)
