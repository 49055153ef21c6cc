"""Prompts are read in chunks: the same tokens, and no mask of a prompt's length squared."""

import pytest
import torch
from device_traffic import Traffic
from families import VOCAB, WORKS, save
from torch.nn import functional as F

from decode.generation.generate import generate
from decode.model import attention
from decode.model.attention import FOLDED_ROWS, attend
from decode.model.causal_lm import CausalLM
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler

PROMPTS = [[*range(1, 20)], [4, 6, 10], [17, 4, 21, 6, 12, 17, 4, 2, 9, 3, 11]]
CHUNK = 4
TREE = Plan(3, 3, 7, "hybrid")


@pytest.fixture
def calls(monkeypatch):
    """(mask, whether queries are grouped) of every call of attention."""
    seen, real = [], F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, enable_gqa=False, **options):
        seen.append((attn_mask, enable_gqa))
        return real(*args, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def answers(target, drafter):
    options = {"max_new_tokens": 12, "sampler": Sampler(1.0), "plan": TREE, "seed": 1}
    return [(o.tokens, o.accepted) for o in generate(target, drafter, PROMPTS, **options).outputs]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["eagle", "lm", "dflash"])
@pytest.mark.covering("name", "window")
def test_prompts_read_in_chunks_give_the_same_text(
    tiny_target, make_drafter, monkeypatch, calls, name, window
):
    target = tiny_target(vocab=24, layers=3, hidden=16, window=window)
    drafter = make_drafter(name, target)
    whole = answers(target, drafter)
    longest = max(map(len, PROMPTS))
    tokens = torch.randint(24, (2, longest))
    target.start(2, longest)
    expected = target.extend(tokens)
    calls.clear()
    monkeypatch.setattr(CausalLM, "chunk", CHUNK)
    target.start(2, longest)
    for found, want in zip(target.extend(tokens), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert answers(target, drafter) == whole
    masks = [mask for mask, _ in calls if mask is not None]
    groups = 2  # queries of a group are rows of one mask
    assert max(mask.shape[-2] for mask in masks) <= groups * max(CHUNK, TREE.nodes + 1)
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


@pytest.mark.parametrize(
    "slots", [1, 3, *(rows // 2 + more for rows in FOLDED_ROWS.values() for more in (0, 1))]
)
@pytest.mark.parametrize("masked", ["no", "bool", "additive", "shared"])
@pytest.mark.covering(pairs=True)
def test_folded_queries_attend_as_single_ones(slots, masked):
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
    with Traffic():  # as if on CUDA, where keys of a masked call are repeated, or its queries folded
        torch.testing.assert_close(attend(q, k, v, mask, scale=0.3).add(0), expected, rtol=0, atol=1e-12)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), causal, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["eagle", "lm", "dflash"])
@pytest.mark.parametrize("folded", [{}, {"cuda": 256}], ids=["repeated", "folded"])
@pytest.mark.covering
def test_no_call_has_a_mask_and_groups_on_cuda(tiny_target, make_drafter, monkeypatch, calls, name, folded):
    target = tiny_target(vocab=24, layers=3, hidden=16)
    drafter = make_drafter(name, target)
    monkeypatch.setattr(attention, "FOLDED_ROWS", folded)
    expected = answers(target, drafter)
    assert any(mask is not None and grouped for mask, grouped in calls), "a CPU's kernel takes both"
    calls.clear()
    with Traffic():
        assert answers(target, drafter) == expected
    masked = [grouped for mask, grouped in calls if mask is not None]
    assert masked
    assert not any(masked)
