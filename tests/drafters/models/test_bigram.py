"""Bigram: its table against counts by hand, and runs of drafters that count the training rollouts."""

from __future__ import annotations

import gc
import json
from collections import Counter

import numpy as np
import pytest
import torch
from draft_models import quick
from hypothesis import given
from hypothesis import strategies as st
from workbench import leftovers, make_tokenizer, same, train, weights

from distill import train as run_module
from distill.rollouts import produce
from distill.training import checkpointing as callbacks
from distill.utils.run_folder import checkpoints
from drafters.base import Text
from drafters.families import pair_table
from drafters.models.bigram import Bigram
from drafters.registry import drafter_class

V = 5
TEXTS = [Text([0, 1, 2, 1, 2], [0, 0, 1, 1, 1]), Text([2, 1, 3], [0, 1, 1]), Text([4], [1]), Text([], [])]


def counted(texts) -> Counter:
    return Counter(
        (text.tokens[i - 1], text.tokens[i])
        for text in texts
        for i in range(1, len(text.tokens))
        if text.loss_mask[i]
    )


def probs(drafter, token) -> list[float]:
    return drafter.logits(torch.tensor(token), torch.float64).softmax(-1).tolist()


def test_probs_are_counts_and_a_share_of_unigrams():
    drafter = Bigram(V, successors=V, prior=2.0)
    assert probs(drafter, 3) == pytest.approx([1 / V] * V)  # nothing is counted yet
    assert "5 pairs counted, 3 of them different" in drafter.fit(TEXTS)
    # Written after a token: 2 after 1 twice, 1 after 2 twice, 3 after 1 once.
    unigram = np.array([0, 2, 2, 1, 0]) + 1
    for token, counts in [(1, [0, 0, 2, 1, 0]), (2, [0, 2, 0, 0, 0]), (4, [0] * 5)]:
        mass = np.array(counts) + 2.0 * unigram / unigram.sum()
        np.testing.assert_allclose(probs(drafter, token), mass / mass.sum(), rtol=1e-12)


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), max_size=12)


@given(st.lists(rows, max_size=8), st.integers(1, 9), st.integers(1, 6))
def test_table_has_each_tokens_most_frequent_successors(texts, successors, chunk):
    texts = [Text([t for t, _ in row], [m for _, m in row]) for row in texts]
    drafter = Bigram(7, successors, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_table, "CHUNK", chunk)  # counts are merged, chunk by chunk
        drafter.fit(texts[:1])  # fitting again starts from nothing
        drafter.fit(texts)
    found, want = counted(texts), {}
    for token in range(7):
        best = sorted(((-n, w) for (v, w), n in found.items() if v == token))[:successors]
        want[token] = [(w, -n) for n, w in best]
    assert drafter.seen.tolist() == [sum(n for (_, w), n in found.items() if w == t) for t in range(7)]
    for token in range(7):
        pairs = zip(drafter.tokens[token].tolist(), drafter.counts[token].tolist(), strict=True)
        assert [(w, n) for w, n in pairs if n] == want[token]


def test_cast_to_bf16_rounds_no_count(tiny_target):
    drafter = Bigram(V, 2, 1.0)
    drafter.fit([Text([1, 2] * 2000, [1] * 4000)])
    before = probs(drafter, 1)
    assert probs(drafter.to(torch.bfloat16), 1) == before
    assert drafter.counts.max() == 2000


@pytest.mark.parametrize("name", ["bigram", "suffix"])
@pytest.mark.ci("bigram")
def test_run_counts_training_rows_only(bench, name, monkeypatch):
    seen = []
    kind = drafter_class(name)
    fit = kind.fit

    def watch(self, texts, *rest):
        seen.extend(texts)
        return fit(self, seen, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "fit", watch)
        done = train(quick(bench, drafter=name)).succeeded()
    tokenizer = make_tokenizer()
    prompts = set()
    for text in seen:
        prompt = text.tokens[: text.loss_mask.argmax()].tolist()
        assert all(text.loss_mask[len(prompt) :])
        prompts.add(int(tokenizer.decode(prompt, skip_special_tokens=True).split()[1]))
    assert prompts == set(range(12)), "100 and on are held out"
    (checkpoint,) = checkpoints(done.folder)
    assert checkpoint.name == "0"
    card = json.loads((checkpoint / "score.json").read_text())
    assert card["audit_passed"] is card["replay_agrees"] is True
    assert any((value != 0).any() for value in weights(checkpoint).values())
    # A second start of a finished run is another run, with the same table.
    again = train(quick(bench, drafter=name))
    assert again.folder != done.folder
    assert same(weights(again.folder / "checkpoints" / "0"), weights(checkpoint))


@pytest.mark.parametrize("where", ["rollouts", "save", "score"])
@pytest.mark.ci("save")
def test_stopped_run_resumes_in_its_folder(bench, where, monkeypatch):
    every = ["rollouts", "save", "score"].index(where) + 1
    argv = quick(bench, "seed=3", f"score.every={every}", drafter="bigram")

    def stop(*_, **__):
        raise KeyboardInterrupt

    point = {
        "rollouts": (produce, "fill"),
        "save": (callbacks.checkpoint_io, "save"),
        "score": (run_module.Scorer, "__call__"),
    }[where]
    gc.disable()  # the stopped command itself has to release its folder
    try:
        with monkeypatch.context() as patch:
            patch.setattr(*point, stop)
            first = train(argv)
        assert first.code == 130
        again = train(argv).succeeded()
    finally:
        gc.enable()
    assert again.out.startswith("resuming: ")
    assert str(again.folder) in first.err
    straight = train([*argv, "resume=never"])
    assert same(*(weights(run.folder / "checkpoints" / "0") for run in (again, straight)))
    assert not leftovers(bench.root)
