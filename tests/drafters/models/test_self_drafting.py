"""A target that drafts for itself, without some sublayers (skip) or over a part of its keys (sparse)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from drafter_checks import (
    Follower,
    V,
    assert_decodes_as_trained,
    batch_of,
    both,
    random_rollouts,
    random_texts,
)
from self_drafts import self_drafted

from decode.errors import UserError
from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from decode.transfer import RowInts
from drafters import optional
from drafters.base import Text
from drafters.drafting import sublayer_search
from drafters.drafting.sublayer_search import Agreement, Costs, search
from drafters.models.skip import Skip
from drafters.models.sparse import Sparse, attention_mass

SPARSE = {"sinks": 1, "recent": 2, "places": 1, "refresh": 1, "queries": 1}
CHAIN, SAMPLED, TREE = Plan(3), Plan(3, proposal="sampled"), Plan(3, 3, 8)


def skipping(target, word, cost=0.5, exit="none"):
    return Skip(target.hidden_size, cost, word, exit).to(target.dtype).eval().requires_grad_(False)


def every_key(target, recent=64):
    return Sparse(**SPARSE | {"recent": recent})


# A drafter that computes what the target does, and one that leaves something out.
WHOLE = {
    "skip": (partial(skipping, word="bbb"), partial(skipping, word="b-b")),
    "sparse": (every_key, partial(every_key, recent=2)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("plan", "temperature"), [(CHAIN, 0.0), (SAMPLED, 0.7), (SAMPLED, 1.0)], ids=["fixed", "warm", "drawn"]
)
def test_whole_target_is_accepted_whole(tiny_target, plan, temperature, name):
    """Every draft is accepted whole, at any temperature: for a drawn one p / q is 1 but for rounding."""
    target, rounds = tiny_target(vocab=12, layers=3), []
    options = {"max_new_tokens": 25, "sampler": Sampler(temperature), "seed": 3}
    for make in WHOLE[name]:
        outputs = generate(target, make(target), [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]], plan=plan, **options)
        rounds.append([pair for o in outputs.outputs for pair in zip(o.accepted, o.emitted, strict=True)])
    whole = [accepted for accepted, emitted in rounds[0] if emitted == accepted + 1]
    assert len(whole) > 12
    assert set(whole) == {3}
    assert len(rounds[0]) < len(rounds[1])


def test_cache_has_room_for_a_tree(tiny_target):
    """A cache that grows is copied, and has twice the size."""
    target, plan = tiny_target(vocab=12, layers=2), Plan(4, 6, 7)
    sizes, options = set(), {"max_new_tokens": 20, "plan": plan, "sampler": Sampler(0.0)}

    def note(_) -> None:
        sizes.add(target.cache.store.capacity)

    generate(target, skipping(target, "b-"), [[3, 1, 4, 1, 5]], on_round=note, **options)
    assert sizes == {5 + 20 + 1 + 6 * 3}


def test_agreement_is_that_of_one_drafted_token(tiny_target):
    target, texts = tiny_target(vocab=V, layers=4, hidden=16), random_texts(3, 20)
    rollouts = [Text(text.tolist(), [0] * (3 + row) + [1] * (17 - row)) for row, text in enumerate(texts)]
    with torch.inference_mode():
        agreement = Agreement(target, rollouts)
        got = {word: agreement(word) for word in ("bbbb", "b-ab", "m--b")}
    places = [(row, t) for row in range(3) for t in range(2 + row, 19)]
    assert agreement.places == len(places)
    best = target.head(target.read(texts).last).argmax(-1)
    for word, share in got.items():
        probs = self_drafted(skipping(target, word), target, torch.cat([texts, texts[:, :1]], 1), 1)
        alike = [probs[row, t - 1, 1].argmax() == best[row, t] for row, t in places]
        assert share == pytest.approx(np.mean(alike), abs=1e-12)
    assert got["bbbb"] == 1 > max(got["b-ab"], got["m--b"]) > 0


def test_long_answers_are_compared_at_a_few_places(tiny_target, monkeypatch):
    monkeypatch.setattr(sublayer_search, "PLACES", 4)
    monkeypatch.setattr(sublayer_search, "TEXTS", 2)
    texts = [Text([1, 2, 0] * 5, mask) for mask in ([1] * 15, [0] * 15, [0] * 12 + [1] * 3, [1] * 15)]
    assert Agreement(tiny_target(), texts).places == 4 + 3
    with pytest.raises(UserError, match="the search needs answers"):
        Agreement(tiny_target(), [Text([1, 2], [1, 0])])


def test_search_beats_whole_layers_at_no_more_cost(tiny_target, monkeypatch):
    monkeypatch.setattr(sublayer_search, "EVALUATIONS", 60)
    target, texts = tiny_target(vocab=V, layers=8, hidden=16), random_rollouts(V)
    told = []
    found = search(target, texts, 0.55, lambda done, total: told.append((done, total)))
    assert told == [(n, 60) for n in range(1, 61)]
    costs = Costs(target.fused, target)
    share = costs.share(i for i in range(16) if found.word[i // 2] in "b" + "am"[i % 2])
    assert 0.4 < share <= 0.55
    assert f"at {share:.2f} of its cost (60 tried on 880 places" in found.text
    tried = [
        word for word in found.text.replace(",", "").split() if len(word) == 8 and set(word) <= set("-amb")
    ]
    with torch.inference_mode():
        agreement = Agreement(target, texts)
        starts = [agreement(word) for word in tried]
        assert starts[0] == agreement(found.word) > max(starts[1:])
    assert len(starts) == 3
    assert search(target, iter(texts), 0.55) == found


def test_cost_is_the_share_of_multiplied_weights(tiny_target):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    costs = Costs(target.fused, target)
    assert costs.whole == sum(
        module.weight.numel() for module in target.model.modules() if isinstance(module, torch.nn.Linear)
    )
    assert costs.share(range(8)) == 1
    with pytest.raises(UserError, match=r"drafter\.cost=0\.01: the head and one sublayer cost 0\.\d+; give"):
        search(target, random_rollouts(V), 0.01)


def test_found_sublayers_are_settings(tiny_target):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = Skip.for_target(target, cost=0.6)
    assert drafter.needs_fit
    assert not drafter.trains
    line = drafter.fit(random_rollouts(V), target)
    assert line.startswith(f"sublayers {drafter.settings['sublayers']} ")
    assert not drafter.needs_fit
    assert Skip.restore(drafter.settings, target).settings == drafter.settings


@pytest.fixture
def exiting(tiny_target, make_drafter):
    return both(tiny_target, make_drafter, "skip", sublayers=None, layers=2, exit="linear")


@pytest.mark.parametrize("frozen", [False, True])
def test_exit_decodes_as_trained(exiting, frozen):
    target, drafter = exiting
    assert drafter.trains
    assert drafter.taps == (2,)
    drafter.requires_grad_(not frozen)
    with torch.inference_mode(frozen):
        assert_decodes_as_trained(drafter, target, random_texts())


def test_exit_trains_the_dense_computation(exiting):
    target, drafter = exiting
    texts = random_texts()
    want = self_drafted(drafter, target, texts, 1)
    with torch.no_grad():
        (step,) = drafter.unroll(batch_of(target, texts), target)
        probs = step.head(step.hidden).softmax(-1)
    assert step.depth == 1
    for flat, p in zip(step.anchor.tolist(), probs, strict=True):
        row, t = divmod(flat, texts.shape[1])
        torch.testing.assert_close(p, want[row, t, 1], rtol=0, atol=1e-5)


def test_fresh_exit_changes_nothing(tiny_target):
    target, prompts = tiny_target(vocab=V, layers=4, hidden=16), [[3, 1, 4, 1, 5], [9, 2]]
    drafts = []
    for kind in ("linear", "none"):
        drafter = Skip.for_target(target, cost=0.5, layers=2, exit=kind).double().eval().requires_grad_(False)
        assert drafter.settings["sublayers"] == "bb--"
        target.tap(drafter.taps)
        options = {"max_new_tokens": 20, "sampler": Sampler(0.0), "plan": TREE}
        drafts.append([o.accepted for o in generate(target, drafter, prompts, **options).outputs])
    assert drafts[0] == drafts[1]


def test_target_without_separate_layers_is_refused(tiny_target):
    target = tiny_target()
    settings = Skip.for_target(target, cost=0.9, layers=1).settings
    target.config._attn_implementation = "eager"
    for build in (lambda: Skip.for_target(target, cost=0.5), lambda: Skip.restore(settings, target)):
        with pytest.raises(UserError, match="LlamaForCausalLM cannot draft for itself here"):
            build()


# -- sparse ----------------------------------------------------------------------------------------


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
    assert_decodes_as_trained(drafter, target, random_texts(length=28), chunks)


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
    run = generate(target, Sparse(**SPARSE), [[3, 1, 4, 1, 5]], plan=TREE, **options)
    assert run.outputs[0].tokens == plain


def test_target_with_a_window_is_refused(tiny_target):
    with pytest.raises(UserError, match="the target has a sliding window"):
        Sparse.for_target(tiny_target(window=4), **SPARSE)
