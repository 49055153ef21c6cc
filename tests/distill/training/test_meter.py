"""What is logged of the speed of training, on a clock that only moves when it is told to."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train_step import ours as step_ours
from benchmarks.train_step.flops import products
from distill.data import datamodule as feed
from distill.data.batches import RolloutBatches
from distill.data.datamodule import RolloutData
from distill.losses import chunked_logits
from distill.losses.objective import Objective
from distill.training import throughput as meter
from distill.training.checkpointing import ScoreCheckpoint
from distill.training.module import DistillModule

READING, TRAINING, SAVING, MAKING = 2.0, 3.0, 1000.0, 500.0  # seconds by the clock of these tests


@pytest.fixture
def clock(monkeypatch):
    """Time passes while a batch is read, trained on, saved, and while rollouts are made; never else."""
    now = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: now[0])
    for part in (meter, feed):
        monkeypatch.setattr(part, "time", fake)

    def takes(kind, name, seconds):
        before = getattr(kind, name)

        def slow(*args, **options):
            now[0] += seconds
            return before(*args, **options)

        monkeypatch.setattr(kind, name, slow)

    takes(RolloutBatches, "__getitem__", READING)
    takes(Objective, "__call__", TRAINING)
    takes(ScoreCheckpoint, "save", SAVING)
    takes(RolloutData, "open", MAKING)
    return now


def table(folder: Path) -> list[dict[str, float]]:
    """Rows of the CSV file, as numbers."""
    with (folder / "csv" / "metrics.csv").open() as lines:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_are_of_the_steps_since_the_last_line_and_of_nothing_between_them(
    accumulate, clock, bench, tmp_path, monkeypatch
):
    seen = []
    step = DistillModule.training_step

    def recorded(self, batch, batch_idx):
        seen.append(batch)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DistillModule, "training_step", recorded)
    every = {"trainer__log_every_n_steps": 2, "score__every": 2, "score__enabled": False}
    bench.run(tmp_path, **every, trainer__accumulate_grad_batches=accumulate, rollout__refresh_every=3)
    rows = [row for row in table(tmp_path) if "train/step_seconds" in row]
    assert [row["step"] for row in rows] == [1, 3, 5]
    assert all("train/loss" in row for row in rows), "a line of its own"
    files = bench.root.glob("outputs/rollouts/*/*.parquet")
    known = {tuple(t) for f in files for t in datasets.Dataset.from_parquet(str(f))["tokens"]}
    for number, row in enumerate(rows):
        mine = seen[2 * number * accumulate : 2 * (number + 1) * accumulate]
        tokens = sum(length_of(row, known) for micro in mine for row in micro.tokens.tolist())
        anchors = sum(int(micro.loss_mask[:, 2:].sum()) for micro in mine)
        seconds = 2 * accumulate * (READING + TRAINING)
        assert row["train/step_seconds"] == pytest.approx(seconds / 2)
        assert row["train/data_wait"] == pytest.approx(READING / (READING + TRAINING))
        assert row["train/tokens_per_second"] == pytest.approx(tokens / seconds)
        assert row["train/supervised_per_second"] == pytest.approx(anchors / seconds)
        assert 0.01 < row["train/peak_gib"] < 100
        assert "train/mfu" not in row, "no such thing on a CPU"


def length_of(padded: list[int], known: set[tuple[int, ...]]) -> int:
    """Of the stored row that was padded to this."""
    return next(n for n in range(len(padded), 0, -1) if tuple(padded[:n]) in known)


EAGLE3 = {
    "_target_": "drafters.models.eagle3.Eagle3.for_target",
    "_partial_": True,
    "init_from": None,
    "confidence": False,
    "taps": [0, 1, 1],
    "layers": 1,
    "depth": 2,
    "draft_vocab_size": 40,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


def test_mfu_is_the_work_that_a_step_needs_by_the_time_it_took(clock, bench, tmp_path, monkeypatch):
    """The drafter's by `flops`, which counts from shapes and masks, and the target's forward pass."""
    seen, most = [], 1e6
    step = DistillModule.training_step

    def recorded(self, batch, batch_idx):
        seen.append((self, batch))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DistillModule, "training_step", recorded)
    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: most)
    monkeypatch.setattr(chunked_logits, "product_dtype", lambda dtype, device: dtype)  # on every machine
    run = {"trainer__max_steps": 3, "batch_size": 1, "taps": "online", "score__enabled": False}
    bench.run(tmp_path, drafter=EAGLE3, **run)
    (module, first), *rest = seen
    config = module.target.model.config
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "vocab_size": module.target.vocab_size,
        "taps": 3,
        **{name: EAGLE3[name] for name in ("layers", "depth", "draft_vocab_size")},
    }
    needed = products(shape, first.loss_mask[0].tolist(), True)
    layers = [w for layer in module.target.layers for w in layer.parameters() if w.dim() == 2]
    length = first.tokens.shape[1]  # its attention aside, which torch's counter knows on a GPU alone
    needed += 2 * length * sum(w.numel() for w in layers)
    rows = [row for row in table(tmp_path) if "train/mfu" in row]
    assert [row["step"] for row in rows] == [1, 2], "the step in which operations are counted takes longer"
    for (_, micro), row in zip(rest, rows, strict=True):
        per_second = needed / length * micro.tokens.shape[1] / (READING + TRAINING)
        assert 1 <= row["train/mfu"] * most / per_second < 1.25


def test_the_count_of_operations_is_that_of_step_cost():
    """EAGLE-3's training step as it is benchmarked: no more is multiplied than it cannot do without."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 4, "head_dim": 16}
    shape |= {"vocab_size": 512, "draft_vocab_size": 128, "taps": 3, "layers": 1, "depth": 3, "window": None}
    case = {
        "shape": shape,
        "train_head": False,
        "gradient_checkpointing": False,
        "compiled": False,
        "precision": "fp32",
        "device": "cpu",
        "decay": 0.8,
        "clip": 1.0,
    }
    step = step_ours.build(case | {"optimizer": {"lr": 1e-3}})([1] * 128)
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    needed = products(shape, [1] * 128, False)
    assert 1 <= counter.get_total_flops() / needed < 1.2


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_grouped_queries_is_counted(kernel):
    """As a GPU's kernels are: torch before 2.13 ended the run in its first step."""
    b, heads, shared, n, width = 2, 4, 2, 6, 16
    formulas: Any = meter.ATTENTION
    forward, backward = (formulas[op] for op in _ops(kernel))
    q, k = (b, heads, n, width), (b, shared, n, width)
    product = 2 * b * heads * n * n * width
    assert forward(q, k, k, None, out_shape=q) == 2 * product
    assert backward(q, q, k, k, out_shape=(q, k, k)) == 5 * product


def test_the_counter_calls_those_formulas():
    q, k = torch.empty(2, 4, 6, 16, device="meta"), torch.empty(2, 2, 6, 16, device="meta")
    with FlopCounterMode(display=False, custom_mapping=meter.ATTENTION) as counter:
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, k)
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 6 * 6 * 16


def _ops(kernel: str) -> list[Any]:
    name = f"_scaled_dot_product_{kernel}_attention"
    return [getattr(torch.ops.aten, name + suffix) for suffix in ("", "_backward")]


def test_counting_ends_with_a_run_that_fails(bench, tmp_path, monkeypatch):
    def broken(self, *args, **options):
        raise KeyError("broken")

    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr(DistillModule, "backward", broken)
    with pytest.raises(KeyError, match="broken"):
        bench.run(tmp_path, score__enabled=False)
    assert not _get_current_dispatch_mode_stack()
