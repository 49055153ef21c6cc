"""Frozen weights: shares of tokens that follow them, and rounding to int8."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from drafter_checks import (
    CHUNKS,
    SAMPLED,
    TREE,
    Follower,
    K,
    assert_decodes_as_trained,
    both,
    random_texts,
    unrolled,
)
from torch import nn

from decode.errors import UserError
from decode.kernels import packed_linear
from drafters.layers import decode_step
from drafters.layers.decode_step import SharesCache

KINDS = ["eagle", "hass", "prism", "eagle3", "p_eagle"]


def frozen(tiny_target, make_drafter, kind):
    target, drafter = both(tiny_target, make_drafter, kind)
    return target, drafter.eval().requires_grad_(False)


def made(drafter):
    """The shares that it has made."""
    return drafter._shares._cached


@torch.inference_mode()
def agree(drafter, target):
    """Decode, and compare with the unroll."""
    assert_decodes_as_trained(drafter, target, random_texts(), CHUNKS[:3])
    return made(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_follow_every_change_of_a_weight(kind, tiny_target, make_drafter):
    target, drafter = frozen(tiny_target, make_drafter, kind)
    last = agree(drafter, target)
    assert agree(drafter, target) is last, "they are made once"
    read = {"embedding", "layer.qkv_proj.weight", "layers.0.qkv_proj.weight"}
    read |= {"fc.weight"} if kind in ("eagle", "hass", "prism") else set()
    for name, weight in [*drafter.named_parameters(), ("embedding", target.embed.weight)]:
        with torch.no_grad():
            weight.mul_(1.0 + 0.1 * torch.rand(weight.shape))
        agree(drafter, target)
        weight.data = weight.data * 1.1  # other memory
        agree(drafter, target)
        if name in read:
            assert made(drafter) is not last
        last = made(drafter)


def test_a_cast_or_a_copy_of_the_drafter_makes_its_own(tiny_target, make_drafter):
    target, drafter = frozen(tiny_target, make_drafter, "eagle")
    agree(drafter, target)
    twin = copy.deepcopy(drafter)
    with torch.no_grad():
        twin.fc.weight.mul_(2)
    agree(twin, target)
    agree(drafter, target)
    target.model.double()
    drafter.double()
    with torch.inference_mode():
        Follower(drafter, target, random_texts(), (5, 3))
    assert made(drafter)[1].table.dtype == torch.float64
    assert all(name.split(".")[0] in ("fc", "layer") for name in drafter.state_dict())


@pytest.mark.parametrize("when", ["weights train", "gradients", "a large table", "training"])
def test_no_shares_are_made(when, tiny_target, make_drafter, monkeypatch):
    target, drafter = frozen(tiny_target, make_drafter, "eagle")
    drafter.requires_grad_(when == "weights train").train(when == "training")
    if when == "a large table":
        monkeypatch.setattr(decode_step, "TABLE_BYTES", 1000)
    with torch.inference_mode(when != "gradients"):
        Follower(drafter, target, random_texts(), (5, 3)).propose(TREE)
    assert made(drafter) is None


@torch.inference_mode()
def test_an_embedding_on_another_device_is_asked_for_each_token():
    with torch.inference_mode(False):
        target = SimpleNamespace(embed=nn.Embedding(4, 2, device="meta").requires_grad_(False))
        weight = nn.Parameter(torch.ones(3, 2), requires_grad=False)
    assert SharesCache().of(target, [weight], 3, lambda embedded: (embedded, weight)) is None


def test_they_round_no_worse_in_half_precision(tiny_target, make_drafter, monkeypatch):
    """Of many rows: the error of each is a sum of roundings, and either may be lucky."""
    errors: dict[int, list[float]] = {}
    for limit in (0, decode_step.TABLE_BYTES):
        monkeypatch.setattr(decode_step, "TABLE_BYTES", limit)
        target, drafter = frozen(tiny_target, make_drafter, "eagle")
        exact = unrolled(drafter, target, random_texts())
        target.model.bfloat16()
        drafter.bfloat16()
        found = errors[limit] = []
        with torch.inference_mode():
            follower = Follower(drafter, target, random_texts())
            for counts in CHUNKS[:3]:
                follower.advance(counts)
                q = follower.propose(SAMPLED).q
                for row, anchor in enumerate(follower.anchors):
                    found += [float((q[row, d] - exact[row, anchor, d + 1]).norm()) for d in range(K)]
        assert (made(drafter) is not None) == (limit > 0)
    plain, shared = (math.fsum(found) for found in errors.values())
    assert shared < 1.2 * plain


@pytest.mark.parametrize("fast", [0, 4], ids=["plain", "int8"])
@pytest.mark.parametrize("kind", [*KINDS, "lyanna", "mlp", "lstm", "medusa", "hydra"])
def test_replay_and_decoding_are_of_the_rounded_model(kind, fast, monkeypatch, tiny_target, make_drafter):
    monkeypatch.setattr(packed_linear, "int8_rows", lambda *shape: fast)
    target, drafter = both(tiny_target, make_drafter, kind)
    drafter.eval().requires_grad_(False)
    texts = random_texts()
    heads = target.head.weight.clone()
    with torch.inference_mode():
        before = Follower(drafter, target, texts, CHUNKS[0]).propose(SAMPLED).q
    drafter.round_to_int8()
    with torch.inference_mode():
        assert_decodes_as_trained(drafter, target, texts, CHUNKS[:3])
        after = Follower(drafter, target, texts, CHUNKS[0]).propose(SAMPLED).q
    assert 0 < (after - before).abs().max() < 0.2, "rounded, and much the same"
    assert target.head.weight.equal(heads)


def test_a_drafter_without_layers_is_refused(tiny_target, make_drafter):
    drafter = make_drafter("ngram", tiny_target())
    with pytest.raises(UserError, match=r"score\.quantize=int8: .*leave it none"):
        drafter.round_to_int8()
