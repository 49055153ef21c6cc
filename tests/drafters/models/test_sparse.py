"""Sparse: the target drafts over a part of its keys; which places it keeps."""

import pytest
import torch
from faces import Follower, V, assert_faces_agree, both, random_texts

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters import optional
from drafters.models.sparse import Sparse, attention_mass

SMALL = {"sinks": 1, "recent": 2, "places": 1, "refresh": 1, "queries": 1}
CHAIN, SAMPLED, TREE = Plan(3), Plan(3, proposal="sampled"), Plan(3, 3, 8)


@pytest.mark.parametrize(
    ("plan", "temperature"), [(CHAIN, 0.0), (SAMPLED, 0.7), (SAMPLED, 1.0)], ids=["fixed", "warm", "drawn"]
)
def test_with_all_keys_drafts_are_accepted_whole(tiny_target, plan, temperature):
    target, prompts = tiny_target(vocab=12, layers=3), [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    rounds = []
    for recent in (64, 2):
        drafter = Sparse(**SMALL | {"recent": recent})
        options = {"max_new_tokens": 25, "sampler": Sampler(temperature), "seed": 3}
        run = generate(target, drafter, prompts, plan=plan, **options)
        rounds.append(sum(len(o.emitted) for o in run.outputs))
        if recent == 64:
            whole = [a for o in run.outputs for a, e in zip(o.accepted, o.emitted, strict=True) if e == a + 1]
            assert len(whole) > 12
            assert set(whole) == {3}
    assert rounds[0] < rounds[1]


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 0, "recent": 4, "places": 2, "refresh": 4, "queries": 4},
        {"sinks": 2, "recent": 5, "places": 0, "refresh": 1, "queries": 1},
        {"sinks": 0, "recent": 1, "places": 0, "refresh": 1, "queries": 1},
        {"sinks": 0, "recent": 7, "places": 5, "refresh": 2, "queries": 1},
    ],
    ids=str,
)
def test_kept_places_depend_on_the_text_only(tiny_target, make_drafter, options):
    """The dense computation looks at every place again, whatever was settled in one round."""
    target, drafter = both(tiny_target, make_drafter, "sparse", **options)
    chunks = [(5, 1), (1, 4), (7, 3), (2, 9), (1, 1), (4, 3)]
    assert_faces_agree(drafter, target, random_texts(length=28), chunks)


def test_kept_places_are_few_and_hold_the_newest(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "sparse")
    follower = Follower(drafter, target, random_texts(2, 40))
    most, sparse = drafter.sinks + drafter.places + drafter.recent, 0
    for counts in [(2, 9), *[(1, 1)] * 6, (5, 4), (6, 1)]:
        follower.advance(counts)
        places, kept = drafter._visible_places(follower.state, target)
        for row, (n, count) in enumerate(zip(follower.settled, kept, strict=True)):
            assert count <= min(n, most)
            assert (count < n) == (n - n % drafter.refresh > most - drafter.refresh)
            sparse += count < n
            for seen in places[:, row, :count].transpose(1, 2).flatten(0, 1).tolist():
                assert len({*seen}) == count
                newest = n - n % drafter.refresh - (drafter.recent - drafter.refresh)
                assert {*seen} >= {0, *range(max(newest, 0), n)}
        bytes_ = follower.cache.store.bytes_per_token
        kept_bytes = bytes_ * sum(kept) / sum(follower.settled)
        assert optional.kv_bytes_per_token(drafter, follower.state) == pytest.approx(kept_bytes, abs=1)
    assert sparse > 10


def test_mass_is_the_targets_attention(tiny_target):
    target, texts = tiny_target(vocab=V, layers=3, hidden=16), random_texts(2, 12)
    lengths = RowInts([12, 9])
    target.start(2, 12)
    target.extend(texts)
    target.keep(lengths)
    before = target.cache.store._data.clone()
    places = torch.tensor([[9, 10, 11], [6, 7, 8]])
    mass = attention_mass(target.fused, target.cache.store, texts.gather(1, places), places)
    assert torch.equal(target.cache.store._data, before)
    target.model.set_attn_implementation("eager")
    probs = target.model(input_ids=texts, output_attentions=True).attentions  # layers of (B, heads, T, T)
    for row in range(2):
        want = torch.stack([layer[row][:, places[row]].sum((0, 1)) for layer in probs])  # one head of keys
        torch.testing.assert_close(mass[row, :, 0], want, rtol=0, atol=1e-6)


def test_text_may_reach_the_end_of_the_context(tiny_target):
    target = tiny_target(vocab=12, layers=2, positions=24)
    options = {"max_new_tokens": 19, "sampler": Sampler(0.0)}
    plain = generate(target, None, [[3, 1, 4, 1, 5]], **options).outputs[0].tokens
    run = generate(target, Sparse(**SMALL), [[3, 1, 4, 1, 5]], plan=TREE, **options)
    assert run.outputs[0].tokens == plain


def test_target_with_a_window_is_refused(tiny_target):
    with pytest.raises(UserError, match="the target has a sliding window"):
        Sparse.for_target(tiny_target(window=4), **SMALL)
