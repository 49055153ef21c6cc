"""The previous token's bias on the logits, in three drafters."""

from __future__ import annotations

import pytest
import torch
from drafter_checks import (
    CHAIN,
    CHUNKS,
    V,
    assert_decodes_as_trained,
    both,
    probs_below,
    random_rollouts,
    random_texts,
)

from decode.errors import UserError
from decode.model.head import Head, Side
from drafters.base import Text
from drafters.layers.token_bias import KINDS, OF_ONE_TOKEN, TokenInfoBias
from drafters.vocabulary import TokenCounts

DRAFTERS = ["lyanna", "medusa", "diffusion"]


def informed(tiny_target, make_drafter, name, kind, hot=V):
    more = {"reuse": {"mode": "none", "nodes": 1, "weight": 1.0, "least": 1, "tokens": 1.0}}
    options = {"token_info": kind, "info_rank": 8, "hot_tokens": hot}
    return both(tiny_target, make_drafter, name, **options, **(more if name == "lyanna" else {}))


@pytest.mark.parametrize("hot", [V, V // 2])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.covering
def test_decoding_computes_the_probs_of_training(tiny_target, make_drafter, name, kind, hot):
    target, drafter = informed(tiny_target, make_drafter, name, kind, hot)
    texts = random_texts()
    for rounds in range(1, 5):
        follower = assert_decodes_as_trained(drafter, target, texts, CHUNKS[:rounds])
        for prefix, chain in zip(follower.known, follower.propose(CHAIN).tokens.tolist(), strict=True):
            below = probs_below(drafter, target, prefix, chain[:-1])
            assert [int(probs.argmax()) for probs in below] == chain


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_fresh_bias_changes_nothing_and_can_learn(kind):
    info = TokenInfoBias(kind, 6, V, 4, V)
    state = torch.randn(5, 6)
    low, _ = info.low_rank_input(torch.arange(5), state, None)
    bias = info.side(False).add(torch.zeros(5, V), low)
    assert torch.equal(bias, torch.zeros(5, V))
    bias[:, 0].sum().backward()
    assert info.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("hot", [V, 5])
def test_cold_tokens_have_no_bias_and_get_none(kind, hot):
    torch.manual_seed(0)
    info = TokenInfoBias(kind, 6, V, 4, hot)
    torch.nn.init.normal_(info.out.weight)
    texts = random_rollouts(V)
    if info.hot is not None:
        counts = torch.bincount(torch.tensor([t for text in texts for t in text.tokens[5:]]), minlength=V)
        said = info.choose(TokenCounts(counts[None], ()), None, torch.bfloat16)
        assert sorted(info.hot.tolist()) == info.hot.tolist()
        assert counts[info.hot].sum() == counts.topk(hot).values.sum()
        share = float(counts[info.hot].sum() / counts.sum())
        assert said.startswith(f"{hot} hot of {V} tokens make {share:.2%} of the answers")
    known = torch.arange(V) if info.hot is None else info.hot
    state = torch.randn(1, 1, 6)
    with torch.no_grad():
        bias, _ = info.add(torch.zeros(1, 1, V), torch.arange(V)[None], state, None)  # (1, V, V)
    cold = torch.ones(V, dtype=torch.bool)
    cold[known] = False
    assert not bias[0, :, cold].any()
    assert bias[0, known][:, known].abs().min() > 0
    if kind in OF_ONE_TOKEN:  # others say something even after a token that they do not know
        assert not bias[0, cold].any()


@pytest.mark.parametrize("kind", OF_ONE_TOKEN)
@pytest.mark.parametrize("hot", [V, 5])
def test_a_table_of_all_pairs_is_the_two_products(kind, hot, monkeypatch):
    torch.manual_seed(0)
    info = TokenInfoBias(kind, 6, V, 4, hot)
    torch.nn.init.normal_(info.out.weight)
    info.requires_grad_(False)  # one that trains makes no table: its weights move
    logits, token, state = torch.randn(2, 1, V), torch.randint(V, (2, 4)), torch.randn(2, 1, 6)
    with torch.no_grad():
        table, _ = info.add(logits, token, state, None)
        assert info._table is not None
        monkeypatch.setattr("drafters.layers.token_bias.TABLE_BYTES", 0)
        products, _ = info.add(logits, token, state, None)
        torch.testing.assert_close(table, products, rtol=0, atol=1e-6)
        monkeypatch.undo()
        info.out.weight.mul_(2)  # a table of weights that have moved is made again
        again, _ = info.add(logits, token, state, None)
    assert (again - table).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_a_bias_with_a_memory_reads_tokens_before_the_previous_one(kind):
    """The first of three drafted tokens changes the third bias, and so does its place."""
    torch.manual_seed(0)
    info, state = TokenInfoBias(kind, 6, V, 4, V), torch.randn(3, 6)
    if info.age is not None:
        torch.nn.init.normal_(info.age)

    def biases(tokens: list[int]) -> list[torch.Tensor]:
        memory, found = None, []
        for j, token in enumerate(tokens):
            low, memory = info.low_rank_input(torch.tensor([token]), state[j : j + 1], memory)
            found.append(low)
        return found

    with torch.no_grad():
        first, other, swapped = biases([1, 2, 3]), biases([5, 2, 3]), biases([2, 1, 3])
    for j in range(3):
        assert not torch.allclose(first[j], other[j], atol=1e-6)
    assert not torch.allclose(first[2], swapped[2], atol=1e-6)


def test_a_head_with_a_side_is_one_with_a_wider_weight():
    weight, hidden, ids = torch.randn(V, 6), torch.randn(3, 10), torch.tensor([1, 4, 5])
    side = torch.randn(V, 4)
    some = torch.zeros(V, 4).index_copy(0, ids, side[ids])
    for head, rows in ((Side(side), side), (Side(side[ids], ids), some)):
        wide = torch.nn.functional.linear(hidden, torch.cat([weight, rows], 1))
        torch.testing.assert_close(Head(weight, side=head)(hidden), wide)


@pytest.mark.parametrize("options", [{"kind": "all"}, {"rank": 0}, {"hot_tokens": 0}], ids=str)
def test_a_bias_of_another_kind_or_of_nothing_is_refused(options):
    sizes = {"kind": "vanilla", "hidden_size": 6, "vocab_size": V, "rank": 4, "hot_tokens": V}
    with pytest.raises(UserError, match=r"token_info=all|info_rank=0|hot_tokens=0"):
        TokenInfoBias(**sizes | options)


def test_it_is_fitted_only_where_some_tokens_are_cold(tiny_target, make_drafter):
    assert not informed(tiny_target, make_drafter, "lyanna", "vanilla")[1].needs_fit
    assert not informed(tiny_target, make_drafter, "lyanna", "none", V // 2)[1].needs_fit
    target, drafter = informed(tiny_target, make_drafter, "medusa", "vanilla", 3)[:2]
    assert drafter.needs_fit
    drafter.fit([Text([0, 7, 7, 2, 2, 9, 1], [0, 1, 1, 1, 1, 1, 0])], target)
    assert drafter.info.hot.tolist() == [2, 7, 9]
    assert drafter.info.place[[2, 7, 9, 1]].tolist() == [0, 1, 2, -1]
