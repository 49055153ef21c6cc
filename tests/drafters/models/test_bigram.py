"""The table is what counting by hand gives, and a run counts it once, from training rollouts alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_models import quick
from faces import SAMPLED, Follower, random_rollouts, random_texts
from hypothesis import given
from hypothesis import strategies as st
from workbench import leftovers, make_tokenizer, same, train, weights

from decode.errors import UserError
from decode.sampling import Sampler
from distill import train as run_module
from distill.rollouts import produce
from distill.training import checkpointing as callbacks
from distill.utils.run_folder import checkpoints
from drafters.base import Text
from drafters.drafting import pair_table
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


def law(drafter, token) -> list[float]:
    return drafter.logits(torch.tensor(token), torch.float64).softmax(-1).tolist()


def test_a_law_is_the_counts_and_a_little_of_the_unigram_law():
    drafter = Bigram(V, successors=V, prior=2.0)
    said = drafter.fit(TEXTS)
    # Written after a token: 2 after 1 twice, 1 after 2 twice, 3 after 1 once.
    assert said == "5 pairs counted, 3 of them different; nothing is trained"
    unigram = np.array([0, 2, 2, 1, 0]) + 1
    for token, counts in [(1, [0, 0, 2, 1, 0]), (2, [0, 2, 0, 0, 0]), (4, [0] * 5)]:
        mass = np.array(counts) + 2.0 * unigram / unigram.sum()
        np.testing.assert_allclose(law(drafter, token), mass / mass.sum(), rtol=1e-12)


def test_an_empty_table_is_uniform():
    assert law(Bigram(V, 2, 1.0), 3) == pytest.approx([1 / V] * V)


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), max_size=12)


@given(st.lists(rows, max_size=8), st.integers(1, 9), st.integers(1, 6))
def test_the_table_holds_each_tokens_most_frequent_successors(texts, successors, chunk):
    texts = [Text([t for t, _ in row], [m for _, m in row]) for row in texts]
    drafter = Bigram(7, successors, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_table, "CHUNK", chunk)  # counts are merged, chunk by chunk
        drafter.fit(texts)
    found, want = counted(texts), {}
    for token in range(7):
        best = sorted(((-n, w) for (v, w), n in found.items() if v == token))[:successors]
        want[token] = [(w, -n) for n, w in best]
    assert drafter.seen.tolist() == [sum(n for (_, w), n in found.items() if w == t) for t in range(7)]
    for token in range(7):
        pairs = zip(drafter.tokens[token].tolist(), drafter.counts[token].tolist(), strict=True)
        assert [(w, n) for w, n in pairs if n] == want[token]


def test_counting_again_gives_the_same_table():
    once, twice = Bigram(V, 3, 1.0), Bigram(V, 3, 1.0)
    once.fit(TEXTS)
    twice.fit(TEXTS[:1])
    twice.fit(TEXTS)
    assert all(torch.equal(a, b) for a, b in zip(once.buffers(), twice.buffers(), strict=True))


def test_a_cast_to_bf16_rounds_no_count(tiny_target):
    drafter = Bigram(V, 2, 1.0)
    drafter.fit([Text([1, 2] * 2000, [1] * 4000)])
    before = law(drafter, 1)
    assert law(drafter.to(torch.bfloat16), 1) == before
    assert drafter.counts.max() == 2000


@pytest.mark.parametrize("changes", [{"successors": 0}, {"prior": 0.0}])
def test_a_table_of_nothing_is_refused(changes):
    with pytest.raises(UserError, match="must be at least 1 and above 0"):
        Bigram(**{"vocab_size": V, "successors": 2, "prior": 1.0} | changes)


def test_a_chain_follows_the_table(tiny_target):
    target = tiny_target(vocab=40, dtype=torch.float32)
    drafter = Bigram.for_target(target, successors=8, prior=0.5)
    drafter.fit(random_rollouts(40))
    follower = Follower(drafter, target, random_texts(), (4, 7))
    q = follower.propose(SAMPLED, Sampler(1.0)).q
    for row, end in enumerate([4, 7]):
        for depth in range(3):
            want = drafter.logits(follower.texts[row, end + depth], torch.float32).softmax(-1)
            torch.testing.assert_close(q[row, depth], want)


# -- runs of drafters that count -----------------------------------------------------------------


COUNTED = ["bigram", "suffix"]


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.ci("bigram")
def test_a_run_counts_every_training_row_and_scores_checkpoint_0(bench, name, monkeypatch):
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
    assert done.err == ""
    said = done.out.splitlines()
    assert any(line.startswith(f"drafter={name}: ") for line in said)
    assert next(line for line in said if re.match(r" +0 +", line)).split()[-1] == "pass"
    folder = done.folder
    assert (folder / "done").exists()
    assert [p.name for p in checkpoints(folder)] == ["0"]
    names = {p.name for p in (folder / "checkpoints" / "0").iterdir()}
    assert names == {"model.safetensors", "config.json", "score.json"}
    for link in ("best", "last"):
        assert (folder / "checkpoints" / link).readlink() == Path("0")
    card = json.loads((folder / "checkpoints" / "0" / "score.json").read_text())
    assert card["audit_passed"]
    assert card["replay_agrees"]
    assert card["drafter"] == name
    assert any((value != 0).any() for value in weights(folder / "checkpoints" / "0").values())
    assert not leftovers(bench.root)
    # A second start of a finished run is another run, with the same table.
    again = train(quick(bench, drafter=name))
    assert again.folder != folder
    assert same(weights(again.folder / "checkpoints" / "0"), weights(folder / "checkpoints" / "0"))


@pytest.mark.parametrize("name", ["bigram", pytest.param("suffix", marks=pytest.mark.proof)])
@pytest.mark.parametrize("where", ["rollouts", "save", "score"])
@pytest.mark.ci("save-bigram")
def test_a_run_that_was_stopped_goes_on_in_its_folder(bench, name, where, monkeypatch):
    every = ["rollouts", "save", "score"].index(where) + 1
    argv = quick(bench, "seed=3", f"score.every={every}", drafter=name)

    def stop(*_, **__):
        raise KeyboardInterrupt

    point = {
        "rollouts": (produce, "fill"),
        "save": (callbacks.hub, "save"),
        "score": (run_module.Scorer, "__call__"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*point, stop)
        first = train(argv)
    assert first.code == 130
    again = train(argv).succeeded()
    assert again.out.startswith("resuming: ")
    assert str(again.folder) in first.err
    straight = train([*argv, "resume=never"])
    assert same(*(weights(run.folder / "checkpoints" / "0") for run in (again, straight)))
    assert not leftovers(bench.root)
