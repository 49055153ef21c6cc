"""Taps kept in memory are what the target says of each row, whatever batch asks for them."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode.errors import UserError
from decode.target import LAST, Target
from distill.data import RolloutBatches
from distill.taps import TapMemory, gigabytes, wanted


@pytest.fixture
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    return Target(LlamaForCausalLM(config).double())


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 50, n).tolist() for n in (5, 9, 3, 12, 7)]
    return datasets.Dataset.from_dict(
        {"tokens": tokens, "loss_mask": [[0] + [1] * (len(t) - 1) for t in tokens]}
    )


@pytest.mark.parametrize("taps", [(LAST,), (0, 2), (LAST, 1)])
def test_memory_gives_what_a_plain_read_of_the_row_gives(target, rows, taps):
    target.tap(taps)
    memory = TapMemory(target, rows, max_tokens=10)
    read = memory.batch([3, 0])
    for place, row in enumerate([3, 0]):
        tokens = torch.tensor([rows[row]["tokens"][:10]])
        want = target.read(tokens)
        n = tokens.shape[1]
        torch.testing.assert_close(read.last[place, :n], want.last[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(read.taps[place, :n], want.taps[0], atol=1e-12, rtol=0)


def test_batches_carry_the_taps_of_their_own_rows(target, rows):
    target.tap((LAST,))
    batches = RolloutBatches(rows, 2, 4, memory=TapMemory(target, rows, 12), max_tokens=12)
    for micro in (batches[i] for i in range(4)):
        want = target.read(micro.tokens).last
        real = micro.loss_mask
        torch.testing.assert_close(micro.read.last[real], want[real], atol=1e-12, rtol=0)


def test_the_estimate_is_what_memory_holds(target, rows):
    target.tap((0, 2))
    memory = TapMemory(target, rows, 10)
    held = sum(last.nbytes + taps.nbytes for last, taps in memory._rows)
    assert gigabytes(target, rows, 10) * 2**30 == held


def test_auto_keeps_taps_only_where_they_fit_and_are_used_again():
    assert wanted("auto", 1.0, 0.5, 2.0)
    assert not wanted("auto", 1.0, 1.5, 2.0)
    assert not wanted("auto", 1.0, 0.5, 0.9)
    assert wanted("memory", 1.0, 0.5, 0.1)
    assert not wanted("online", 1.0, 0.1, 9.0)
    with pytest.raises(UserError, match="taps_gb"):
        wanted("memory", 1.0, 1.5, 2.0)
    with pytest.raises(UserError, match="auto, online or memory"):
        wanted("disk", 1.0, 0.1, 1.0)
