"""The Lightning side: one denominator per optimizer step, one clear end to a loss that is none."""

import csv
import math
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from workbench import Bench, same, weights

from decode.errors import UserError
from distill.losses.objective import Objective
from distill.losses.weights import Streak
from distill.scoring.scorer import Scorer
from distill.training.checkpointing import ScoreCheckpoint
from distill.utils.run_folder import checkpoints

SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}
# One plain step in full precision. Padding differs between ways of sharing rows out, and noise with it.
PLAIN = {
    "optimizer__optimizer": SGD,
    "trainer__precision": "32-true",
    "trainer__max_steps": 1,
    "drafter__feature_noise": 0.0,
    "score__enabled": False,
    "taps": "online",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("module"))


def logged(folder: Path, name: str) -> list[float]:
    """A metric's values in the CSV file."""
    with (folder / "csv" / "metrics.csv").open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def difference(a: Path, b: Path) -> float:
    first, second = weights(a), weights(b)
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_accumulated_micro_batches_step_like_one_large_batch(clip, bench, tmp_path):
    plain = {**PLAIN, "trainer__gradient_clip_val": clip}
    bench.run(tmp_path / "whole", **plain, batch_size=8)
    bench.run(tmp_path / "parts", **plain, batch_size=2, trainer__accumulate_grad_batches=4)
    bench.run(tmp_path / "other", **plain, batch_size=8, seed=1)
    whole, parts = (tmp_path / name / "checkpoints" / "1" for name in ("whole", "parts"))
    assert difference(whole, parts) < 1e-6
    assert difference(whole, tmp_path / "other" / "checkpoints" / "1") > 1e-3
    for name in ("train/loss", "train/divergence_1", "train/divergence_2", "train/top1_1", "train/alpha_1"):
        (one,), (four,) = (logged(tmp_path / f, name) for f in ("whole", "parts"))
        assert four == pytest.approx(one, abs=1e-6), name


def test_the_step_moves_the_weights_by_the_gradient_of_the_logged_loss(bench, tmp_path, monkeypatch):
    seen = []
    call = Objective.__call__

    def record(self, *args, **options):
        total, scored = call(self, *args, **options)
        seen.append((total.item(), sum(row.rows for row in scored if row.depth == 1)))
        return total, scored

    monkeypatch.setattr(Objective, "__call__", record)
    bench.run(tmp_path, **PLAIN, batch_size=2, trainer__accumulate_grad_batches=3)
    total, anchors = (sum(column) for column in zip(*seen, strict=True))
    assert logged(tmp_path, "train/loss") == [pytest.approx(total / anchors, rel=1e-6)]


def test_weights_warm_up_with_the_training_steps(bench, tmp_path, monkeypatch):
    seen = []
    weigh = Streak.__call__

    def record(self, alpha, present, progress):
        seen.append(progress)
        return weigh(self, alpha, present, progress)

    monkeypatch.setattr(Streak, "__call__", record)
    streak = {"_target_": "distill.losses.weights.Streak", "smoothing": 0.0, "warmup": 0.2}
    run = {**PLAIN, "trainer__max_steps": 4, "weights": streak}
    bench.run(tmp_path, **run, trainer__accumulate_grad_batches=2)
    assert seen == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_training_and_keeps_the_last_checkpoint(
    bad, bench, tmp_path, monkeypatch
):
    call, calls = Objective.__call__, []

    def spoil(self, *args, **options):
        total, scored = call(self, *args, **options)
        calls.append(1)
        return (total * bad if len(calls) == 5 else total), scored

    bench.run(tmp_path / "good", score__enabled=False)
    monkeypatch.setattr(Objective, "__call__", spoil)
    with pytest.raises(UserError, match=r"the loss is .* at step 4; lower optimizer\.lr"):
        bench.run(tmp_path / "bad", score__enabled=False)
    assert [p.name for p in checkpoints(tmp_path / "bad")] == ["3"]
    good, kept = (weights(tmp_path / name / "checkpoints" / "3") for name in ("good", "bad"))
    assert same(good, kept)
    assert all(torch.isfinite(w).all() for w in kept.values())


def test_weights_that_are_no_numbers_are_not_saved(bench, tmp_path):
    with pytest.raises(UserError, match="weights are not finite after step 1"):
        bench.run(
            tmp_path,
            **{**PLAIN, "optimizer__optimizer": SGD | {"lr": 1e30, "weight_decay": 1e30}},
            trainer__gradient_clip_val=None,
            score__every=1,
            optimizer__warmup=0.0,
        )
    assert checkpoints(tmp_path) == []


def test_a_disk_that_shows_files_late_makes_no_rank_save_twice(bench, tmp_path, monkeypatch):
    """Another machine's rank would save alone, and wait for ever."""
    saved, save = [], ScoreCheckpoint.save
    monkeypatch.setattr(ScoreCheckpoint, "save", lambda *args: (saved.append(args[-1]), save(*args)))
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.name.isdigit() and exists(path))
    bench.run(tmp_path, score__enabled=False, trainer__accumulate_grad_batches=2)
    assert saved == [3, 6]


def test_neither_file_of_a_checkpoint_holds_the_target(bench, tmp_path):
    bench.run(tmp_path, score__enabled=False)
    newest = checkpoints(tmp_path)[-1]
    names = weights(newest).keys()
    assert {name.split(".")[0] for name in names} == {"fc", "layer"}
    state = TorchCheckpointIO().load_checkpoint(newest / "trainer" / "state.ckpt", weights_only=True)
    assert set(state["state_dict"]) == {f"drafter.{name}" for name in names}
    sizes = sum(w.numel() for w in weights(newest).values())
    moments = state["optimizer_states"][0]["state"].values()
    assert sum(m["exp_avg"].numel() for m in moments) == sizes


def test_the_learning_rate_rises_then_falls_along_a_cosine(bench, tmp_path):
    bench.run(tmp_path, trainer__max_steps=10, score__enabled=False, optimizer__warmup=0.3)
    state = TorchCheckpointIO().load_checkpoint(
        checkpoints(tmp_path)[-1] / "trainer" / "state.ckpt", weights_only=True
    )
    lr, final = bench.base.optimizer.optimizer.lr, bench.base.optimizer.final_lr
    assert state["lr_schedulers"][0]["_last_lr"] == [pytest.approx(lr * final)]
    assert state["lr_schedulers"][0]["last_epoch"] == 10


def test_denormal_numbers_are_flushed_in_training_alone(bench, tmp_path, monkeypatch):
    """A product of chances of 1e-45 costs a CPU a hundred others; decoding keeps every number."""

    def flushes() -> bool:
        return (torch.full((8,), 1e-30) * 1e-10).sum().item() == 0

    seen = {"forward": [], "backward": [], "score": []}
    call, backward, score = Objective.__call__, torch.Tensor.backward, Scorer.__call__

    def record(name, function):
        return lambda *args, **options: (seen[name].append(flushes()), function(*args, **options))[1]

    monkeypatch.setattr(Objective, "__call__", record("forward", call))
    monkeypatch.setattr(torch.Tensor, "backward", record("backward", backward))
    monkeypatch.setattr(Scorer, "__call__", record("score", score))
    bench.run(tmp_path, **{**PLAIN, "score__enabled": True})
    assert seen == {"forward": [True], "backward": [True], "score": [False]}
    assert not flushes()
