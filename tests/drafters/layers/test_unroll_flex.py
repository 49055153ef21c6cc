"""Flex attention of an unroll against attention in blocks; torch's kernel trains on CUDA only."""

from functools import partial

import pytest
import torch
from compilers import needs_compiler
from drafter_checks import V, batch_of, random_texts
from torch.nn.attention import flex_attention as flex

from drafters import optional
from drafters.layers import unroll_flex
from drafters.layers.unroll_attention import Queries, Visibility, attend_unrolled, oldest_keys

CASES = {
    "eagle": {},
    "eagle3": {},
    "eagle3 with biases": {"layers": 2, "qkv_bias": True, "o_bias": True},
    "eagle3 in a window": {"window": 5, "sinks": 2},
    "eagle3 in a window shorter than a draft": {"window": 2, "sinks": 1},
    "diffusion": {"steps": 2},
    "dflash": {"causal": True},
    "dflash in a window": {"window": 6},
    "p_eagle": {},
    "mtp": {},
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Flex attention by torch's own operations, also with gradients."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    return partial(unroll_flex.attend_flex, attention=flex.flex_attention)


def trained(drafter, target, batch, attend) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Hidden states of all depths, and the gradients of their sum of squares."""
    optional.attend_with(drafter, attend)
    drafter.zero_grad()
    hidden = [step.hidden for step in drafter.unroll(batch, target)]
    torch.cat([(h * h).flatten() for h in hidden]).sum().backward()
    return hidden, [weight.grad for weight in drafter.parameters()]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci("eagle", "dflash in a window", "p_eagle")
def test_states_and_gradients_are_those_of_blocks(case, on_cpu, tiny_target, make_drafter):
    target = tiny_target(vocab=V, layers=4, hidden=16, positions=256)
    drafter = make_drafter(case.split()[0], target, **CASES[case]).train()
    mask = torch.arange(150).expand(3, -1) > torch.tensor([[9], [40], [99]])
    batch = batch_of(target, random_texts(3, 150), mask)
    (states, grads), (want, want_grads) = (
        trained(drafter, target, batch, attend) for attend in (on_cpu, attend_unrolled)
    )
    torch.testing.assert_close(states, want, rtol=0, atol=1e-10)
    for got, expected in zip(grads, want_grads, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def visibility_of(lengths, window, sinks, ahead) -> tuple[Visibility, int, torch.Tensor]:
    """Two of three keys of several texts ask; with what they see, (M, N)."""
    sizes = torch.tensor(lengths)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    keys = torch.arange(len(starts))
    place = keys[keys % 3 > 0]
    text = starts[place]
    queries = Queries(place, text, oldest_keys(place, text, window, sinks, ahead), sinks)
    first = text if window is None else torch.maximum(text, place + ahead - window + 1)
    seen = (keys <= place[:, None]) & (keys >= first[:, None])
    seen |= (keys >= text[:, None]) & (keys < text[:, None] + sinks) & (keys <= place[:, None])
    return Visibility(queries, queries.tensors(), []), len(starts), seen


@pytest.mark.parametrize("lengths", [[5], [128, 128], [300, 1, 700, 90], [1000], [60] * 20])
@pytest.mark.parametrize(
    ("window", "sinks", "ahead"),
    [(None, 0, 0), (None, 0, 3), (64, 0, 0), (64, 3, 2), (200, 130, 1), (2, 1, 5)],
)
def test_blocks_of_keys_cover_what_is_seen(lengths, window, sinks, ahead):
    visibility, count, seen = visibility_of(lengths, window, sinks, ahead)
    mask = unroll_flex.block_mask(visibility, count)
    rows, columns = torch.meshgrid(torch.arange(len(seen)), torch.arange(count), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, rows, columns), seen)
    side = unroll_flex.SIDE
    filled = torch.zeros(-(-len(seen) // side) * side, -(-count // side) * side, dtype=torch.bool)
    filled[: len(seen), :count] = seen
    tiles = filled.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
    listed = [
        [row[:number].tolist() for row, number in zip(indices[0, 0], numbers[0, 0].tolist(), strict=True)]
        for numbers, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    ]
    for tile, partial_blocks, full_blocks in zip(tiles, *listed, strict=True):
        every = [*partial_blocks, *full_blocks]
        assert len(set(every)) == len(every)
        assert set(tile.flatten(1).any(1).nonzero()[:, 0].tolist()) <= set(every)
        # Queries and keys that fill up the last blocks are not computed.
        assert all(bool(tile[block][: len(seen), :].any()) for block in full_blocks)
        for block in full_blocks:
            real = tile[block].any(1)
            assert tile[block][real].all()


@needs_compiler
@torch.no_grad()
@pytest.mark.proof
def test_compiled_kernel_reads_these_blocks():
    """On a CPU it returns no logarithms of sums, which joining with later steps needs."""
    visibility, count, seen = visibility_of([300, 1, 500, 90], 64, 3, 1)
    torch.manual_seed(0)
    q = torch.randn(len(seen), 4, 16)
    keys, values = torch.randn(2, count, 2, 16).unbind()
    mask = unroll_flex.block_mask(visibility, count)
    rows = [x.transpose(0, 1)[None] for x in (q, keys, values)]
    compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)
    got = compiled(*rows, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(got, attend_unrolled(q, [keys], [values], visibility), rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), [("eagle3", {}), ("dflash", {"window": 6}), ("diffusion", {})])
def test_compiled_kernel_trains_on_a_card(name, options, tiny_target, make_drafter):
    target = tiny_target(vocab=V, layers=4, hidden=64, positions=512, dtype=torch.float32)
    drafter = make_drafter(name, target, **options).train().to("cuda")
    target.model.to("cuda")
    batch = batch_of(target, random_texts(3, 300).to("cuda"), torch.arange(300).expand(3, -1) > 40)
    (states, grads), (want, want_grads) = (
        trained(drafter, target, batch, attend) for attend in (unroll_flex.attend_flex, attend_unrolled)
    )
    torch.testing.assert_close(states, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(grads, want_grads, rtol=1e-3, atol=1e-3)
