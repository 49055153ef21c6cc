"""Hydra: its formula written out, separate blocks, and their first gradients."""

from __future__ import annotations

import pytest
import torch
from faces import ROUNDING, K, batch_of, laws_below, random_texts, unrolled
from heads import fresh, trained

from drafters.models.hydra import Hydra

FORMS = [{"own_head": True, "layers": 1}, {"own_head": False, "layers": 1}, {"own_head": True, "layers": 3}]


def silu(x):
    return x / (1 + torch.exp(-x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_probs_are_those_of_the_formula(tiny_target, form):
    target, drafter = trained(tiny_target, Hydra, **form)
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


def test_children_depend_on_the_whole_path(tiny_target):
    """Medusa's do not, and a recurrent cell may forget: here the first token is an input of the last head."""
    target, drafter = trained(tiny_target, Hydra)
    prefix = random_texts(rows=1, length=6)[0].tolist()
    probs = [laws_below(drafter, target, prefix, [first, 7])[-1] for first in (3, 4)]
    assert (probs[0] - probs[1]).abs().max() > 100 * ROUNDING


@pytest.mark.parametrize("layers", [1, 3])
def test_no_two_blocks_share_a_weight(tiny_target, layers):
    _, drafter = fresh(tiny_target, Hydra, layers=layers)
    weights = [w for _, w in drafter.named_parameters(remove_duplicate=False)]
    assert len({w.data_ptr() for w in weights}) == len(weights) == K * (2 + (layers - 1) + 1)
    widths = [block.linear.in_features for block in drafter.blocks]
    assert widths == [block.skip.in_features for block in drafter.blocks] == [32, 48, 64]


def test_fresh_blocks_have_gradients_for_every_token(tiny_target):
    """Blocks that begin at 0 are no saddle: the columns of every embedding have a gradient at once."""
    target, drafter = fresh(tiny_target, Hydra)
    for step in drafter.unroll(batch_of(target, random_texts()), target):
        step.head(step.hidden).log_softmax(-1)[:, 0].sum().backward()
    for block in drafter.blocks:
        for part in (block.skip, block.linear):
            assert all(columns.abs().max() > 0 for columns in part.weight.grad.split(16, 1))
