"""Prompts are read in chunks: the same tokens, and no mask of a prompt's length squared."""

from __future__ import annotations

import pytest
import torch
from device_traffic import Traffic
from families import VOCAB, WORKS, save
from torch.nn import functional as F

from decode.generation.generate import generate
from decode.model import attention
from decode.model.attention import FOLDED_ROWS, attend, repeats_keys
from decode.model.causal_lm import CausalLM
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler

PROMPTS = [[*range(1, 20)], [4, 6, 10], [17, 4, 21, 6, 12, 17, 4, 2, 9, 3, 11]]
CHUNK = 4
TREE = Plan(3, 3, 7, "hybrid")


@pytest.fixture
def masks(monkeypatch):
    """Masks that attention is given."""
    seen, real = [], F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **options):
        if attn_mask is not None:
            seen.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def answers(target, drafter):
    outputs = generate(
        target, drafter, PROMPTS, max_new_tokens=12, sampler=Sampler(1.0), plan=TREE, seed=1
    ).outputs
    return [(o.tokens, o.accepted) for o in outputs]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["eagle", "lm", "dflash"])
def test_long_prompts_in_chunks_give_the_same_text(
    tiny_target, make_drafter, monkeypatch, masks, name, window
):
    target = tiny_target(vocab=24, layers=3, hidden=16, positions=64, window=window)
    drafter = make_drafter(name, target)
    whole = answers(target, drafter)
    longest = max(map(len, PROMPTS))
    tokens = torch.randint(24, (2, longest))
    target.start(2, longest)
    expected = target.extend(tokens)
    masks.clear()
    monkeypatch.setattr(CausalLM, "chunk", CHUNK)
    target.start(2, longest)
    found = target.extend(tokens)
    torch.testing.assert_close(found.last, expected.last, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.taps, expected.taps, rtol=0, atol=1e-12)
    assert answers(target, drafter) == whole
    slots, groups = TREE.nodes + 1, 2  # queries of a group are rows of one mask
    assert masks
    for mask in masks:
        assert mask.shape[-2] <= groups * max(CHUNK, slots)
    if window is None:  # rows that are alike share a mask
        rows = groups * CHUNK
        prefill = [mask for mask in masks if mask.shape[-2] == rows and mask.shape[-1] <= longest]
        assert prefill
        assert all(mask.untyped_storage().nbytes() <= rows * longest * 8 for mask in prefill[:3])


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.ci(
    "llama", "gemma2, soft caps, eager", "gemma3, window 6", "mistral, window 6", "phi3, longrope"
)
def test_every_class_reads_a_prompt_in_chunks(name, tmp_path, monkeypatch):
    target = load_target(str(save(tmp_path / "model", *WORKS[name])), dtype="float64")
    tokens = torch.randint(VOCAB, (2, 18), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target.start(2, 18)
        expected = target.read_text(tokens)
        monkeypatch.setattr(CausalLM, "chunk", CHUNK)
        target.start(2, 18)
        # transformers computes norms and softmax in fp32
        torch.testing.assert_close(target.read_text(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, FOLDED_ROWS // 2, FOLDED_ROWS // 2 + 1])
@pytest.mark.parametrize("masked", ["no", "bool", "additive", "shared"])
def test_folded_queries_attend_as_queries_of_their_own(slots, masked):
    dice = torch.Generator().manual_seed(0)
    width = slots + 2
    q = torch.randn(2, 4, slots, 8, generator=dice, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, width, 8, generator=dice, dtype=torch.float64)
    allow = torch.rand(1 if masked == "shared" else 2, 1, slots, width, generator=dice) < 0.7
    allow[..., 0] = True
    bias = torch.zeros(allow.shape, dtype=q.dtype).masked_fill(~allow, torch.finfo(q.dtype).min)
    mask = {"no": None, "bool": allow}.get(masked, bias)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, mask, scale=0.3), expected, rtol=0, atol=1e-12)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), causal, rtol=0, atol=1e-12)


def test_grouped_queries_with_a_mask_never_reach_the_plain_products_of_cuda():
    dice = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=dice)
    k, v = torch.randn(2, 2, 2, 5, 8, generator=dice)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool).tril(2)
    expected, free = attend(q, k, v, mask), attend(q, k, v)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert repeats_keys(cuda, 2, masked=True)
    for place, groups, masked in ((cuda, 1, True), (cuda, 2, False), (cpu, 2, True)):
        assert not repeats_keys(place, groups, masked)
    with Traffic():  # as if on CUDA
        torch.testing.assert_close(attend(q, k, v, mask).add(0), expected)
        torch.testing.assert_close(attend(q, k, v).add(0), free)


@pytest.mark.parametrize("name", ["eagle", "lm", "dflash"])
def test_no_call_has_a_mask_and_groups_on_cuda(tiny_target, make_drafter, monkeypatch, name):
    target = tiny_target(vocab=24, layers=3, hidden=16)
    drafter, calls, real = make_drafter(name, target), [], F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, enable_gqa=False, **options):
        calls.append((attn_mask is not None, enable_gqa))
        return real(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "FOLDED_ROWS", 0)
    expected = answers(target, drafter)
    assert (True, True) in calls, "a CPU's kernel takes both"
    calls.clear()
    with Traffic():
        assert answers(target, drafter) == expected
    assert (True, False) in calls
    assert (True, True) not in calls
