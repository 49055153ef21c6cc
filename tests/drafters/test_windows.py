"""Drafters that see a window of the text and its first places: contract, edges, what is kept."""

from __future__ import annotations

import pytest
import torch
from contract import (
    frozen,  # noqa: F401
    test_a_row_does_not_depend_on_its_neighbours,  # noqa: F401
    test_a_saved_drafter_comes_back_bit_for_bit,  # noqa: F401
    test_a_text_may_come_in_any_pieces,  # noqa: F401
    test_a_tree_keeps_the_likeliest_of_all_paths_it_looked_at,  # noqa: F401
    test_an_anchor_knows_tokens_up_to_its_depth_and_taps_up_to_itself,  # noqa: F401
    test_decoding_computes_the_probs_of_training,  # noqa: F401
    test_every_level_of_a_tree_computes_the_probs_of_training,  # noqa: F401
    test_gradients_reach_every_trainable_weight_and_none_of_the_targets,  # noqa: F401
    test_proposing_changes_nothing_for_later_rounds,  # noqa: F401
    test_proposing_twice_gives_the_same_draft,  # noqa: F401
    test_rows_that_join_draft_as_they_would_alone,  # noqa: F401
    test_select_keeps_these_rows_in_this_order,  # noqa: F401
)
from documented import drafters_with
from drafter_checks import (
    SAMPLED,
    Follower,
    K,
    assert_decodes_as_trained,
    batch_of,
    both,
    equal,
    plans_of,
    random_texts,
    unrolled,
)

from decode.errors import UserError
from drafters import optional
from drafters.layers import unroll_attention as attention
from drafters.layers.decoder_layer import LayerShape

W, S = 4, 1
WINDOWED = drafters_with("window")
ONE_LAYER = {"dflash": {"layers": 1}}


@pytest.fixture(params=WINDOWED)
def pair(request, tiny_target, make_drafter):
    """A target and a drafter with a window and a sink, for the contract every drafter keeps."""
    return both(tiny_target, make_drafter, request.param, window=W, sinks=S)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_holds_the_text_changes_no_bit(tiny_target, make_drafter, name):
    """The newest query stands K places behind 24 tokens."""
    texts = random_texts()
    found = []
    for window in (None, 24 + K):
        target, drafter = both(tiny_target, make_drafter, name, window=window)
        probs, follower = unrolled(drafter, target, texts), Follower(drafter, target, texts)
        drafts = []
        for counts in [(5, 3), (9, 14)]:
            follower.advance(counts)
            drafts += [follower.propose(plan) for plan in plans_of(drafter)]
        found.append((probs, drafts))
    (probs, drafts), (others, same) = found
    assert all(torch.equal(row, others[place]) for place, row in probs.items())
    assert all(map(equal, drafts, same))


def seen(name: str, t: int, depth: int, i: int) -> bool:
    """Whether the feature at i reaches a drafter of one layer at (t, depth): t - W < i <= t, or i < S."""
    ahead = {"p_eagle": depth - 1, "dflash": 1 + depth, "diffusion": 1}.get(name, 0)
    # All places of a diffusion block begin as the root's state, which holds the newest feature itself, and
    # have its window; others get earlier depths' window with their feature.
    newest = name == "diffusion" and i == t
    return newest or (i <= t and (i > t + ahead - W or i < S))


@pytest.mark.parametrize("name", ["dflash", "diffusion", "eagle", "eagle3", "lyanna", "p_eagle"])
def test_the_window_ends_where_the_rule_says(tiny_target, make_drafter, name):
    """A place inside moves every state that sees it, and one outside not a bit, in training and decoding."""
    target, drafter = both(tiny_target, make_drafter, name, window=W, sinks=S, **ONE_LAYER.get(name, {}))
    texts = random_texts(rows=1, length=14)
    batch = batch_of(target, texts)

    @torch.no_grad()
    def hidden_and_probs(taps):
        steps = drafter.unroll(batch._replace(taps=taps), target)
        taught = {(a, s.depth): h for s in steps for a, h in zip(s.anchor.tolist(), s.hidden, strict=True)}
        follower = Follower(drafter, target, texts)
        follower.taps, drawn = taps, {}
        for _ in range(10):
            follower.advance((1,))
            q = follower.propose(SAMPLED).q
            drawn |= {(follower.anchors[0], depth): q[0, depth - 1] for depth in range(1, K + 1)}
        return taught, drawn

    before = hidden_and_probs(batch.taps)
    for i in range(14):
        taps = batch.taps.clone()
        taps[0, i] += 1
        for now, old in zip(hidden_and_probs(taps), before, strict=True):
            for (t, depth), value in now.items():
                moved = float((value - old[t, depth]).abs().max())
                assert moved > 1e-6 if seen(name, t, depth, i) else moved == 0, (t, depth, i)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dflash", {"window": 2, "sinks": 2}),  # shorter than a block
        ("dflash", {"window": 3, "causal": True}),
        ("dflash", {"causal": True}),
        ("dflash", {"window": 1, "sinks": 1}),
        ("eagle3", {"window": 1, "sinks": 1}),  # drafted places leave it, too
        ("eagle3", {"window": 2, "sinks": 1}),
    ],
)
def test_a_window_shorter_than_a_draft_and_a_causal_block_are_decoded_as_trained(
    tiny_target, make_drafter, name, options
):
    target, drafter = both(tiny_target, make_drafter, name, **options)
    assert_decodes_as_trained(drafter, target, random_texts())


@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_an_unroll_does_not_depend_on_its_blocks_of_queries(tiny_target, make_drafter, name, monkeypatch):
    target, drafter = both(tiny_target, make_drafter, name, window=W, sinks=2)
    texts = random_texts(length=40)
    want = unrolled(drafter, target, texts)
    monkeypatch.setattr(attention, "MIN_QUERIES", 3)
    monkeypatch.setitem(attention.SCORE_BYTES, "cpu", 1)
    for place, probs in unrolled(drafter, target, texts).items():
        torch.testing.assert_close(probs, want[place], rtol=0, atol=1e-5)


def test_blocks_read_the_window_and_the_sinks_only():
    place, text = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    like = torch.empty(0)
    oldest = attention.oldest_keys(place, text, 64, 3, 0)
    assert oldest is not None
    blocks = attention.query_blocks(attention.Queries(place, text, oldest, 3), 32, like)
    assert [b.first for b in blocks] == [0, *(b.last for b in blocks[:-1])]
    assert max(b.seen for b in blocks) == 64 + 3 + blocks[0].last - blocks[0].first - 1
    assert attention.oldest_keys(place, text, 64, 1000, 0) is None
    assert attention.oldest_keys(place, text, None, 0, 0) is None


@pytest.mark.parametrize("name", ["eagle3", "dflash", "lyanna"])
def test_a_long_text_keeps_no_more_than_twice_the_window(tiny_target, make_drafter, name):
    """And drafts as training does, ragged, with rows dropped."""
    target, drafter = both(tiny_target, make_drafter, name, window=W, sinks=S)
    texts = random_texts(rows=3, length=60)
    trained = unrolled(drafter, target, texts)
    target.chunk = 5  # the prompt is read in chunks
    follower, whole, rows = Follower(drafter, target, texts), None, [0, 1, 2]
    for number, counts in enumerate([(3, 1, 2), (20, 2, 30), *[(1, 3, 2)] * 8]):
        follower.advance([counts[row] for row in rows])
        store = follower.state.store
        whole = whole or optional.kv_bytes_per_token(drafter, follower.state)
        assert max(store.lengths) <= 2 * (W + S)
        assert list(store.read) == follower.settled
        draft = follower.propose(SAMPLED)
        for place, (row, anchor) in enumerate(zip(rows, follower.anchors, strict=True)):
            for depth in range(1, K + 1):
                want = trained[row, anchor, depth]
                torch.testing.assert_close(draft.q[place, depth - 1], want, rtol=0, atol=1e-5)
        if number == 5:
            rows = [2, 0]
            follower.select(rows)
    assert optional.kv_bytes_per_token(drafter, follower.state) < whole / 3


def test_the_memory_of_a_long_prompt_is_given_back(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "eagle", window=W)
    follower = Follower(drafter, target, random_texts(length=2000), (1990, 3))
    assert follower.state.store.capacity < 300
    assert list(follower.state.store.read) == [1990, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0}, r"drafter\.window=0"),
        ({"window": 4, "sinks": -1}, r"drafter\.sinks=-1"),
        ({"sinks": 2}, r"drafter\.sinks=2: without drafter\.window"),
    ],
)
def test_sizes_of_no_window_are_refused(tiny_target, make_drafter, options, said):
    target = tiny_target(vocab=40, layers=4, hidden=16)
    with pytest.raises(UserError, match=said):
        make_drafter("eagle", target, **options)


def test_a_target_with_a_window_has_drafters_that_see_the_whole_text(tiny_target, make_drafter):
    target = tiny_target(vocab=40, layers=4, hidden=16, window=4, dtype=torch.float32)
    assert LayerShape.of(target).window is None
    drafter = make_drafter("eagle", target)
    assert_decodes_as_trained(drafter, target, random_texts())
