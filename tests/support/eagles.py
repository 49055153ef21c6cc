"""Drafters of the EAGLE family in all forms that are written for engines."""

from __future__ import annotations

import torch
from drafter_checks import K, V, random_texts
from served_eagle import Loaded, drafted

from drafters.base import Batch
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.export.layout import Layout

EAGLE3 = {"fc_norm": False, "draft_vocab_size": 12}
# name: drafter, options, engines
CASES = {
    "eagle with a bias": ("eagle", {"bias": True}, ["sglang"]),
    "eagle without": ("eagle", {}, ["vllm", "sglang"]),
    "eagle with a window": ("eagle", {"window": 4}, ["vllm"]),
    "eagle3 with a window": ("eagle3", EAGLE3 | {"window": 4}, ["vllm", "sglang"]),
    "eagle with biases": ("eagle", {"qkv_bias": True, "o_bias": True}, ["vllm", "sglang"]),
    "eagle of Qwen2's layers": ("eagle", {"qkv_bias": True}, ["vllm", "sglang"]),
    "hass": ("hass", {}, ["vllm", "sglang"]),
    "eagle3": ("eagle3", EAGLE3, ["vllm", "sglang"]),
    "eagle3, every token": ("eagle3", EAGLE3 | {"draft_vocab_size": V}, ["vllm", "sglang"]),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}, ["vllm", "sglang"]),
    "eagle3, other taps": ("eagle3", EAGLE3 | {"taps": [3, 1]}, ["vllm", "sglang"]),
    "eagle3, five taps": ("eagle3", {"fc_norm": True, "taps": [4, 2, 1, 0, 6]}, ["vllm"]),
    "eagle3, gpt-oss": ("eagle3", EAGLE3 | {"norm_before_fc": True}, ["vllm", "sglang"]),
    "eagle3, Qwen3": ("eagle3", EAGLE3 | {"qk_norm": True, "layers": 2}, ["vllm"]),
    "eagle3, biases": ("eagle3", EAGLE3 | {"qkv_bias": True, "o_bias": True, "layers": 2}, ["vllm"]),
    "eagle3, Qwen2": ("eagle3", EAGLE3 | {"qkv_bias": True}, ["vllm"]),
    "eagle3, Qwen3 with biases": ("eagle3", EAGLE3 | {"qkv_bias": True, "qk_norm": True}, ["vllm"]),
    "eagle3 of two layers, gpt-oss": (
        "eagle3",
        EAGLE3 | {"layers": 2, "norm_before_fc": True, "norm_before_residual": True},
        ["vllm"],
    ),
}
SERVED = [(case, engine) for case, (_, _, engines) in CASES.items() for engine in engines]


def build(tiny_target, make_drafter, case, **more):
    """A target of eight layers and a drafter of a case; default taps are 2, 4 and 5."""
    name, options, _ = CASES[case]
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    options = ({"taps": None} if name == "eagle3" else {}) | options | more
    drafter = make_drafter(name, target, depth=K, **options)
    return target, drafter.requires_grad_(False)


def written(drafter, target, to) -> Layout:
    return formats.write_layout(checkpoint_io.as_saved(drafter), target, to)


@torch.no_grad()
def difference(target, drafter, loaded: Loaded, texts=100) -> float:
    """Largest between logits of the drafter in training and of what an engine has loaded."""
    tokens = random_texts(texts, 9)
    theirs = drafted(loaded, target.model, tokens, K)
    target.tap(drafter.taps)
    read, worst = target.read(tokens), 0.0
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), read.taps, read.last)
    for step in drafter.unroll(batch, target):
        own = step.head(step.hidden)
        ours = own
        if step.head.d2t is not None:
            ours = own.new_full((len(own), V), -torch.inf).index_copy_(1, step.head.d2t, own)
        row, anchor = step.anchor // tokens.shape[1], step.anchor % tokens.shape[1]
        other = torch.stack([theirs[int(a), step.depth][r] for r, a in zip(row, anchor, strict=True)])
        assert ours.isfinite().equal(other.isfinite())
        worst = max(worst, float((ours - other)[ours.isfinite()].abs().max()))
    return worst
