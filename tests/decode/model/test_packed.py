"""packing=true: rows that are read without padding have the hidden states of single rows."""

import datasets
import pytest
import torch
from torch.nn import functional as F
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

from decode.errors import UserError
from decode.model import target as target_module
from decode.model.packing import pack_indices
from decode.model.probe import check_packing
from decode.model.target import LAST, Target
from decode.sampling import Sampler
from distill.config import build as loading
from distill.data.batches import RolloutBatches
from distill.data.on_policy import OnPolicy
from distill.data.taps_disk import TapCache
from distill.data.taps_memory import GrowingTaps, TapMemory

LENGTHS = [5, 1, 9, 3]
ROUNDING = {"sdpa": 1e-12, "eager": 1e-5}  # transformers' eager softmax is in fp32


def make_gpt2() -> Target:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    return Target(GPT2LMHeadModel(config).double())


def texts(vocab: int) -> torch.Tensor:
    """(B, T) right-padded rows of `LENGTHS`; what pads them is a token like any other."""
    return torch.randint(vocab, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))


def check_rows(target, atol):
    """Packed rows are what each is by itself, and zeros behind it."""
    read = target.read(texts(50), LENGTHS)
    for row, n in enumerate(LENGTHS):
        single = target.read(texts(50)[row : row + 1, :n])
        for mine, want in zip(read, single, strict=True):
            torch.testing.assert_close(mine[row, :n], want[0], rtol=0, atol=atol)
            assert not mine[row, n:].any()


@pytest.mark.parametrize("kernel", ROUNDING)
@pytest.mark.parametrize("taps", [(LAST,), (0, 2), (LAST, 1)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.covering(pairs=True)
def test_packed_row_is_a_single_one(tiny_target, taps, window, kernel):
    target = tiny_target(vocab=50, layers=3, hidden=16, window=window)
    target.config._attn_implementation = kernel
    target.tap(taps)
    check_rows(target, ROUNDING[kernel])
    assert target.config._attn_implementation == kernel


def test_learned_positions_begin_with_each_row():
    check_rows(make_gpt2(), 1e-12)


def test_no_kernel_call_is_wider_than_a_row(tiny_target, monkeypatch):
    target, widths, kernel = tiny_target(vocab=50), [], F.scaled_dot_product_attention

    def spy(q, *more, **options):
        widths.append(q.shape[2])
        return kernel(q, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    target.read(texts(50), LENGTHS)
    assert widths == LENGTHS * len(target.layers)


def forgets_positions(target: Target) -> Target:
    """Reads every pack as one long row."""
    forward = target.base.forward
    target.base.forward = lambda position_ids=None, **given: forward(**given)
    return target


def test_models_that_cannot_read_packed_rows_are_refused(tiny_target):
    check_packing(make_gpt2())
    check_packing(tiny_target(vocab=50, window=4))
    shape = {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    bloom = Target(BloomForCausalLM(BloomConfig(**shape)).bfloat16())  # makes its own mask, without positions
    for target in (bloom, forgets_positions(make_gpt2())):
        with pytest.raises(UserError, match=r"packing=true: .* cannot read rows packed"):
            check_packing(target)


@pytest.fixture
def rows() -> datasets.Dataset:
    tokens = [row[:n] for row, n in zip(texts(50).tolist(), (5, 4, 9, 3), strict=True)]
    masks = [[0] + [1] * (len(row) - 1) for row in tokens]
    return datasets.Dataset.from_dict({"tokens": tokens, "loss_mask": masks, "weight": [1.0] * 4})


def test_taps_are_read_packed_wherever_they_are_kept(tiny_target, rows, tmp_path):
    target = tiny_target(vocab=50, layers=3)
    target.tap((0, 2))
    given = []
    read = target.read
    target.read = lambda tokens, lengths=None: given.append(lengths) or read(tokens, lengths)
    packed, padded = (TapMemory(target, rows, 8, packing).batch(range(4)) for packing in (True, False))
    assert given == [[5, 4, 8, 3], None]
    for mine, want in zip(packed, padded, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)
    given.clear()
    GrowingTaps(target, rows, 8, True).batch(range(4))
    TapCache(target, rows, 8, tmp_path, "key", 1.0, True)
    assert given == [[5, 4, 8, 3], [4, 3, 7, 2]]  # on disk up to the last position that is used


def test_batches_carry_lengths_also_of_rows_on_policy(tiny_target, make_drafter, rows):
    target = tiny_target(vocab=50)
    micro = RolloutBatches(rows, 2, 2, max_tokens=8, packing=True)[0]
    assert len(micro.lengths) == 2
    for text, n in zip(micro.tokens, micro.lengths, strict=True):
        (row,) = [row for row in rows["tokens"] if row[:8] == text[:n].tolist()]
        assert n == min(len(row), 8)
    mixing = OnPolicy(1.0, 0.0, sampler=Sampler(1.0), max_new_tokens=3, max_tokens=12)
    (mixed,) = mixing([micro], make_drafter("lm", target), target)
    assert mixed.on_policy
    assert mixed.tokens.shape[1] == max(mixed.lengths)
    assert [int(mask.nonzero().max()) + 1 for mask in mixed.loss_mask] == mixed.lengths


@pytest.mark.parametrize("taps", ["online", "memory"])
def test_run_reads_packed(bench, taps, monkeypatch):
    seen = []
    monkeypatch.setattr(target_module, "pack_indices", lambda *at: seen.append(at[0]) or pack_indices(*at))
    monkeypatch.setattr(loading, "check_packing", lambda target: None)
    done = bench.train("packing=true", f"taps={taps}", "score.enabled=false", "trainer.max_steps=3")
    done.succeeded()
    assert [len(lengths) for lengths in seen] == ([2, 2, 2] if taps == "online" else [12])
    assert any(len(set(lengths)) > 1 for lengths in seen)


def test_run_is_refused_before_it_works(bench, monkeypatch):
    before = bench.runs()
    monkeypatch.setattr("decode.model.probe._packing_error", lambda target: 1.0)
    done = bench.train("packing=true")
    done.refused("packing=true: LlamaForCausalLM cannot read rows packed")
    assert bench.runs() == before
