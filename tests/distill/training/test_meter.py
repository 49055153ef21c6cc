"""What is logged of the speed of training, on a clock that moves only when it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

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
    """Time passes only while a batch is read, trained on, saved, and while rollouts are made."""
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


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_are_of_the_steps_since_the_last_line(accumulate, clock, bench, tmp_path, spy, logged):
    seen = spy(DistillModule, "training_step")
    every = {"trainer__log_every_n_steps": 2, "score__every": 2, "score__enabled": False}
    bench.run(tmp_path, **every, trainer__accumulate_grad_batches=accumulate, rollout__refresh_every=3)
    names = ("step_seconds", "data_wait", "tokens_per_second", "supervised_per_second", "peak_gib")
    values = {name: logged(tmp_path, f"train/{name}") for name in names}
    assert all(list(found) == [1, 3, 5] for found in values.values())
    assert not logged(tmp_path, "train/mfu"), "no such thing on a CPU"
    files = bench.root.glob("outputs/rollouts/*/*.parquet")
    known = {tuple(t) for f in files for t in datasets.Dataset.from_parquet(str(f))["tokens"]}

    def length(padded: list[int]) -> int:
        """Of the stored row that was padded to this."""
        return next(n for n in range(len(padded), 0, -1) if tuple(padded[:n]) in known)

    for number, step in enumerate((1, 3, 5)):
        calls = seen[2 * number * accumulate : 2 * (number + 1) * accumulate]
        micros = [batch for (_, batch, _), _ in calls]
        tokens = sum(length(row) for micro in micros for row in micro.tokens.tolist())
        anchors = sum(int(micro.loss_mask[:, 2:].sum()) for micro in micros)
        seconds = 2 * accumulate * (READING + TRAINING)
        assert values["step_seconds"][step] == pytest.approx(seconds / 2)
        assert values["data_wait"][step] == pytest.approx(READING / (READING + TRAINING))
        assert values["tokens_per_second"][step] == pytest.approx(tokens / seconds)
        assert values["supervised_per_second"][step] == pytest.approx(anchors / seconds)
        assert 0.01 < values["peak_gib"][step] < 100


EAGLE3 = {
    "_target_": "drafters.models.eagle3.Eagle3.for_target",
    "_partial_": True,
    "init_from": None,
    "confidence": False,
    "taps": [0, 1, 1],
    "layers": 1,
    "depth": 2,
    "draft_vocab_size": 40,
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False),
}


def test_mfu_is_the_work_that_a_step_needs_by_its_time(clock, bench, tmp_path, monkeypatch, spy, logged):
    """The drafter's by `flops`, which counts from shapes and masks, and the target's forward pass."""
    seen, most = spy(DistillModule, "training_step"), 1e6
    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: most)
    monkeypatch.setattr(chunked_logits, "product_dtype", lambda dtype, device: dtype)  # on every machine
    run = {"trainer__max_steps": 3, "batch_size": 1, "taps": "online", "score__enabled": False}
    bench.run(tmp_path, drafter=EAGLE3, **run)
    (module, first, _), *rest = (arguments for arguments, _ in seen)
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
    length = first.tokens.shape[1]  # without attention, which torch counts only on a GPU
    needed += 2 * length * sum(w.numel() for w in layers)
    mfu = logged(tmp_path, "train/mfu")
    assert list(mfu) == [1, 2], "the step in which operations are counted takes longer"
    for (_, micro, _), value in zip(rest, mfu.values(), strict=True):
        per_second = needed / length * micro.tokens.shape[1] / (READING + TRAINING)
        assert 1 <= value * most / per_second < 1.25


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_grouped_queries_is_counted(kernel):
    """As a GPU's kernels are: torch before 2.13 ended the run in its first step."""
    b, heads, shared, n, width = 2, 4, 2, 6, 16
    q, k = (b, heads, n, width), (b, shared, n, width)
    product = 2 * b * heads * n * n * width
    formulas: Any = meter.ATTENTION
    op, gradient = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
        for suffix in ("", "_backward")
    )
    assert formulas[op](q, k, k, None, out_shape=q) == 2 * product
    assert formulas[gradient](q, q, k, k, out_shape=(q, k, k)) == 5 * product
    if kernel == "flash":  # torch calls the formulas
        with FlopCounterMode(display=False, custom_mapping=meter.ATTENTION) as counter:
            op(*(torch.empty(shape, device="meta") for shape in (q, k, k)))
        assert counter.get_total_flops() == 2 * product


def test_counting_ends_with_a_run_that_fails_and_its_error_stays(bench, tmp_path, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(meter, "get_available_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr(DistillModule, "backward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        bench.run(tmp_path, score__enabled=False)
    assert not _get_current_dispatch_mode_stack()
