"""The Lightning side: one denominator per optimizer step, one clear end to a loss that is none."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from workbench import same, weights

from decode.errors import UserError
from decode.sampling import Sampler
from distill.data.batches import MicroBatch
from distill.data.on_policy import OnPolicy
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import Streak, constant
from distill.scoring.scorer import Scorer
from distill.training.checkpointing import ScoreCheckpoint
from distill.training.grad_norm import UnusedParameters
from distill.training.module import DistillModule
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

    def record(self, alpha, present, progress, counts):
        seen.append(progress)
        return weigh(self, alpha, present, progress, counts)

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


# -- a module without a run ------------------------------------------------------------------------


def alone(target, drafter, on_policy=None, **sizes: int) -> Any:
    """A module in the middle of a run of 8 steps; `logged` has what it logs."""
    module: Any = DistillModule(
        target, drafter, Objective(kl, constant), torch.optim.SGD, 0.0, 1.0, on_policy
    )
    micros = [micro(on_policy=3)]
    module._trainer = SimpleNamespace(
        **{"max_steps": 8, "accumulate_grad_batches": 1, "world_size": 1} | sizes,
        precision="64-true",
        datamodule=SimpleNamespace(micros=lambda step: micros),
        strategy=SimpleNamespace(reduce=lambda t, reduce_op: t, batch_to_device=lambda m: m),
    )
    module.logged = {}
    module.log_dict = module.logged.update
    return module


def micro(**changes) -> MicroBatch:
    """Two rows of six anchors each, at step 6."""
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))
    return MicroBatch(tokens, torch.arange(9).expand(2, -1) >= 3, 12, 6, 11)._replace(**changes)


@pytest.fixture
def models(tiny_target, make_drafter):
    target = tiny_target(vocab=40)
    return target, make_drafter("eagle", target)


def test_a_loss_has_its_rows_weights_and_undoes_what_lightning_divides_by(models):
    def loss(*weight: float, anchors=12, **sizes):
        rows = torch.tensor(weight) if weight else None
        return alone(*models, **sizes).training_step(micro(weight=rows, anchors=anchors), 0).item()

    first, second = loss(1.0, 0.0), loss(0.0, 1.0)
    assert loss(2.0, 0.5) == pytest.approx(2 * first + second / 2, rel=1e-12)
    assert loss() == pytest.approx(first + second, rel=1e-12)
    averaged = loss(anchors=24, accumulate_grad_batches=3, world_size=2)
    assert averaged == pytest.approx(3 * loss(), rel=1e-12)


def test_a_step_is_told_its_share_of_the_run_and_its_seed_and_reads_no_row_twice(models, monkeypatch):
    (target, drafter), seen = models, []
    unroll, states = type(drafter).unroll, target.read(micro().tokens)

    def told(self, batch, target):
        seen.append((batch.seed, batch.progress))
        return unroll(self, batch, target)

    monkeypatch.setattr(type(drafter), "unroll", told)
    monkeypatch.setattr(drafter, "aux_weights_at", lambda share: seen.append(share) or drafter.aux_weights)
    monkeypatch.setattr(target, "read", lambda *args: pytest.fail("these states are cached"))
    alone(target, drafter).training_step(micro(target_states=states), 0)
    assert seen == [(11, 0.75), 0.75]
    assert torch.initial_seed() == 11, "dropout would not be a function of the step"


def test_what_is_logged_of_a_depth_is_a_mean_over_its_rows_or_over_all_anchors(models, monkeypatch):
    target, drafter = models
    drafter.add_confidence()
    call, scores = Objective.__call__, []

    def spy(*args):
        scores.append(call(*args))
        return scores[-1]

    monkeypatch.setattr(Objective, "__call__", spy)
    module = alone(target, drafter.double(), OnPolicy(0.0, 0.0, Sampler(1.0), 4, 9))
    module.training_step(micro(), 0).backward()
    module.on_before_optimizer_step(torch.optim.SGD(drafter.parameters()))
    first, *_ = rows = scores[0][1]
    assert first.rows > rows[-1].rows
    for row in rows:
        of_depth = {
            name: module.logged[f"train/{name}_{row.depth}"] for name in ("alpha", "survival", "confidence")
        }
        want = {"alpha": row.alpha / row.rows, "survival": row.survival / first.rows}
        want["confidence"] = row.confidence_loss / row.rows
        assert of_depth == pytest.approx(want, rel=1e-6)
    assert module.logged["train/on_policy"] == pytest.approx(3 / 12)


def test_a_trial_leaves_no_micro_batch_behind(models):
    """DeepSpeed would take it for one of the first step."""
    module = alone(*models, accumulate_grad_batches=2)
    module.training_step(micro(), 0)
    module.forget()
    for _ in range(2):
        assert not module.logged
        module.training_step(micro(), 0).backward()
        module.on_before_optimizer_step(torch.optim.SGD(module.drafter.parameters()))
    assert module.logged


def test_a_weight_that_no_process_used_in_a_step_gets_no_gradient():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    unused = UnusedParameters(lambda: weights)
    others = torch.tensor([0.0, 1.0, 0.0])  # another process has used the second
    for mine in (0, 2):
        for weight in weights:
            weight.grad = None
        loss = unused.attach(weights[mine].sum())
        loss.backward()
        assert loss.item() == 2.0
        assert all(weight.grad is not None for weight in weights), "DDP would wait"
        unused.drop_gradients(lambda counts: counts + others)
        assert [weight.grad is not None for weight in weights] == [mine == 0, True, mine == 2]
