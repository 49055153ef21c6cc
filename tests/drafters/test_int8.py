"""Drafters with weights rounded to int8: replay = decoding."""

from __future__ import annotations

import pytest
import torch
from faces import CHUNKS, SAMPLED, Follower, assert_faces_agree, both, random_texts

from decode.errors import UserError
from decode.kernels import packed_linear

KINDS = ["eagle", "prism", "eagle3", "p_eagle", "lyanna", "mlp", "lstm", "medusa", "hydra"]


@pytest.mark.parametrize("fast", [0, 4], ids=["plain", "int8"])
@pytest.mark.parametrize("kind", KINDS)
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
        assert_faces_agree(drafter, target, texts, CHUNKS[:3])
        after = Follower(drafter, target, texts, CHUNKS[0]).propose(SAMPLED).q
    assert 0 < (after - before).abs().max() < 0.2, "rounded, and much the same"
    assert target.head.weight.equal(heads)


def test_a_drafter_without_layers_is_refused(tiny_target, make_drafter):
    drafter = make_drafter("ngram", tiny_target())
    with pytest.raises(UserError, match=r"score\.quantize=int8: .*leave it none"):
        drafter.round_to_int8()
