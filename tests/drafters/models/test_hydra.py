"""Hydra: its formula written out, blocks that share nothing, how it begins, and a run."""

from __future__ import annotations

import json

import pytest
import torch
from faces import CHUNKS, ROUNDING, SAMPLED, Follower, K, V, batch_of, laws_below, random_texts, unrolled
from torch import nn
from workbench import final

from decode.errors import UserError
from decode.model.target import LAST
from drafters.models.hydra import Hydra

FORMS = [{"own_head": True, "layers": 1}, {"own_head": False, "layers": 1}, {"own_head": True, "layers": 3}]


def fresh(tiny_target, depth=K, layers=1, own_head=True):
    target = tiny_target(vocab=V, layers=4, hidden=16, dtype=torch.float32)
    target.tap([LAST])
    return target, Hydra.for_target(target, depth=depth, layers=layers, own_head=own_head).eval()


def trained(tiny_target, **options):
    """As if: every weight is random and matters."""
    target, drafter = fresh(tiny_target, **options)
    for weight in drafter.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    target.model.lm_head.weight.data.mul_(0.3)
    return target, drafter


def silu(x):
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_law_is_that_of_the_formula(tiny_target, form):
    target, drafter = trained(tiny_target, **form)
    texts = random_texts(rows=1)
    features, w = target.read(texts).last[0], drafter.state_dict()
    embedding, found = target.model.get_input_embeddings().weight, unrolled(drafter, target, texts)
    for t in (0, 3, 11):
        for depth in range(1, K + 1):
            i = depth - 1
            x = torch.cat([features[t], *embedding[texts[0, t + 1 : t + 1 + depth]]])
            assert x.shape == (16 * (1 + depth),)
            x = w[f"blocks.{i}.skip.weight"] @ x + silu(w[f"blocks.{i}.linear.weight"] @ x)
            for layer in range(form["layers"] - 1):
                x = x + silu(w[f"blocks.{i}.rest.layers.{layer}.weight"] @ x)
            head = w[f"lm_heads.{i}.weight"] if form["own_head"] else target.head.weight
            torch.testing.assert_close(found[(0, t, depth)], (head @ x).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_both_faces_agree_in_every_form(tiny_target, form):
    target, drafter = trained(tiny_target, **form)
    texts = random_texts()
    laws, follower = unrolled(drafter, target, texts), Follower(drafter, target, texts)
    for counts in CHUNKS:
        follower.advance(counts)
        q = follower.propose(SAMPLED).q
        for row, anchor in enumerate(follower.anchors):
            for depth in range(1, K + 1):
                want = laws[(row, anchor, depth)]
                torch.testing.assert_close(q[row, depth - 1], want, rtol=0, atol=ROUNDING)


def test_the_children_of_a_node_depend_on_its_whole_path(tiny_target):
    """Medusa's do not, and a recurrent cell may forget: here the first token is an input of the last head."""
    target, drafter = trained(tiny_target)
    prefix = random_texts(rows=1, length=6)[0].tolist()
    laws = [laws_below(drafter, target, prefix, [first, 7])[-1] for first in (3, 4)]
    assert (laws[0] - laws[1]).abs().max() > 100 * ROUNDING


@pytest.mark.parametrize("layers", [1, 3])
def test_no_two_blocks_share_a_weight(tiny_target, layers):
    _, drafter = fresh(tiny_target, layers=layers)
    weights = [w for _, w in drafter.named_parameters(remove_duplicate=False)]
    assert len({w.data_ptr() for w in weights}) == len(weights) == K * (2 + (layers - 1) + 1)
    widths = [block.linear.in_features for block in drafter.blocks]
    assert widths == [block.skip.in_features for block in drafter.blocks] == [32, 48, 64]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_fresh_drafter_says_at_every_depth_what_the_target_says_next(tiny_target, form):
    target, drafter = fresh(tiny_target, **form)
    texts = random_texts()
    rows = target.head(target.read(texts).last).softmax(-1)  # (B, T, V)
    found = unrolled(drafter, target, texts)
    assert {depth for _, _, depth in found} == set(range(1, K + 1))
    for (row, t, _), law in found.items():
        torch.testing.assert_close(law, rows[row, t], rtol=0, atol=1e-6)


def test_and_learns_to_read_tokens(tiny_target):
    """Blocks that begin at 0 are no saddle: the columns of every embedding have a gradient at once."""
    target, drafter = fresh(tiny_target)
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        step.head(step.hidden).log_softmax(-1)[:, 0].sum().backward()
    for block in drafter.blocks:
        for part in (block.skip, block.linear):
            assert all(columns.abs().max() > 0 for columns in part.weight.grad.split(16, 1))


@pytest.mark.parametrize("changes", [{"depth": 0}, {"layers": 0}], ids=str)
def test_a_drafter_of_nothing_is_refused(tiny_target, changes):
    with pytest.raises(UserError, match=f"drafter.{next(iter(changes))}=0 must be at least 1"):
        fresh(tiny_target, **changes)


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.ci("True")
def test_a_run_trains_and_scores_it(bench, own_head):
    done = bench.train("drafter=hydra", f"drafter.own_head={own_head}", "decode=dynamic", "decode.depth=2")
    assert done.code == 0, done.err
    moved = final(done.folder)
    assert moved["blocks.1.linear.weight"].abs().max() > 0
    assert ("lm_heads.0.weight" in moved) is own_head
    card = json.loads((done.folder / "checkpoints" / "6" / "score.json").read_text())
    assert card["audit_passed"]
    assert card["replay_agrees"]
    assert card["drafter"] == "hydra"
