"""The Lightning module: one denominator per optimizer step, and what a step is told, logs and saves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from workbench import weights

from decode.errors import UserError
from decode.sampling import Sampler
from distill.data.batches import MicroBatch
from distill.data.on_policy import OnPolicy
from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import constant
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


def test_accumulation_is_one_large_batch_with_clipping(bench, tmp_path, logged):
    """Without clipping in test_equivalences.py."""
    plain = {**PLAIN, "trainer__gradient_clip_val": 0.01}
    bench.run(tmp_path / "whole", **plain, batch_size=8)
    bench.run(tmp_path / "parts", **plain, batch_size=2, trainer__accumulate_grad_batches=4)
    whole, parts = (weights(tmp_path / name / "checkpoints" / "1") for name in ("whole", "parts"))
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=1e-6)
    for name in ("train/loss", "train/divergence_1", "train/divergence_2", "train/top1_1", "train/alpha_1"):
        one, four = (logged(tmp_path / folder, name) for folder in ("whole", "parts"))
        assert len(one) == 1
        assert four == pytest.approx(one, abs=1e-6), name


def test_weights_that_are_not_finite_are_not_saved(bench, tmp_path):
    changes = {"optimizer__optimizer": SGD | {"lr": 1e30, "weight_decay": 1e30}, "optimizer__warmup": 0.0}
    with pytest.raises(UserError, match="weights are not finite after step 1"):
        bench.run(tmp_path, **PLAIN | changes, trainer__gradient_clip_val=None, score__every=1)
    assert checkpoints(tmp_path) == []


def test_rank_saves_once_where_a_disk_shows_files_late(bench, tmp_path, monkeypatch, spy):
    """Another machine's rank would save without the others, and wait for ever."""
    saved, exists = spy(ScoreCheckpoint, "save"), Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.name.isdigit() and exists(path))
    bench.run(tmp_path, score__enabled=False, trainer__accumulate_grad_batches=2)
    assert [arguments[-1] for arguments, _ in saved] == [3, 6]


def test_checkpoint_holds_the_drafter_its_moments_and_the_schedule(bench, tmp_path):
    bench.run(tmp_path, score__enabled=False, optimizer__warmup=0.3)
    newest = checkpoints(tmp_path)[-1]
    found = weights(newest)
    assert {name.split(".")[0] for name in found} == {"fc", "layer"}, "the target's are not saved"
    state = TorchCheckpointIO().load_checkpoint(newest / "trainer" / "state.ckpt", weights_only=True)
    assert set(state["state_dict"]) == {f"drafter.{name}" for name in found}
    moments = state["optimizer_states"][0]["state"].values()
    assert sum(m["exp_avg"].numel() for m in moments) == sum(w.numel() for w in found.values())
    (schedule,) = state["lr_schedulers"]
    options = bench.base.optimizer
    assert schedule["_last_lr"] == [pytest.approx(options.optimizer.lr * options.final_lr)]
    assert schedule["last_epoch"] == 6


def test_denormal_numbers_are_flushed_only_in_training(bench, tmp_path, monkeypatch):
    """A product of chances of 1e-45 costs a CPU a hundred others; decoding keeps every number."""
    seen = {}

    def flushes() -> bool:
        return (torch.full((8,), 1e-30) * 1e-10).sum().item() == 0

    def note(owner, name):
        call = getattr(owner, name)

        def noted(*args, **options):
            seen.setdefault(owner, []).append(flushes())
            return call(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(Objective, "__call__")
    note(torch.Tensor, "backward")
    note(Scorer, "__call__")
    bench.run(tmp_path, **{**PLAIN, "score__enabled": True})
    assert seen == {Objective: [True], torch.Tensor: [True], Scorer: [False]}
    assert not flushes()


# -- a module without a run ------------------------------------------------------------------------


def module_of(target, drafter, on_policy=None, **sizes: int) -> Any:
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


def test_loss_has_its_rows_weights_and_undoes_what_lightning_divides_by(models):
    def loss(*weight: float, anchors=12, **sizes):
        rows = torch.tensor(weight) if weight else None
        return module_of(*models, **sizes).training_step(micro(weight=rows, anchors=anchors), 0).item()

    first, second = loss(1.0, 0.0), loss(0.0, 1.0)
    assert loss(2.0, 0.5) == pytest.approx(2 * first + second / 2, rel=1e-12)
    assert loss() == pytest.approx(first + second, rel=1e-12)
    averaged = loss(anchors=24, accumulate_grad_batches=3, world_size=2)
    assert averaged == pytest.approx(3 * loss(), rel=1e-12)


def test_step_is_told_its_progress_and_seed_and_reads_no_row_twice(models, monkeypatch, spy):
    target, drafter = models
    states = target.read(micro().tokens)
    unrolled, shares = spy(type(drafter), "unroll"), spy(drafter, "aux_weights_at")
    weighed = spy(Objective, "__call__")
    monkeypatch.setattr(target, "read", lambda *args: pytest.fail("these states are cached"))
    module_of(target, drafter).training_step(micro(target_states=states), 0)
    (((_, batch, _), _),) = unrolled
    assert (batch.seed, batch.progress) == (11, 0.75)
    assert [arguments for arguments, _ in shares] == [(0.75,)]
    assert weighed[0][0][5] == 0.75, "weights would not warm up"
    assert torch.initial_seed() == 11, "dropout would not be a function of the step"


def test_logged_values_are_means_over_a_depths_rows_or_all_anchors(models, spy):
    target, drafter = models
    drafter.add_confidence()
    scores = spy(Objective, "__call__")
    module = module_of(target, drafter.double(), OnPolicy(0.0, 0.0, Sampler(1.0), 4, 9))
    module.training_step(micro(), 0).backward()
    module.on_before_optimizer_step(torch.optim.SGD(drafter.parameters()))
    ((_, (total, rows)),) = scores
    first = rows[0]
    assert first.rows > rows[-1].rows
    for row in rows:
        want = {"alpha": row.alpha / row.rows, "survival": row.survival / first.rows}
        want["confidence"] = row.confidence_loss / row.rows
        assert {name: module.logged[f"train/{name}_{row.depth}"] for name in want} == pytest.approx(
            want, rel=1e-6
        )
    assert module.logged["train/loss"] == pytest.approx(total.item() / 12, rel=1e-6)
    assert module.logged["train/on_policy"] == pytest.approx(3 / 12)


def test_trial_leaves_no_micro_batch(models):
    """DeepSpeed would take it for one of the first step."""
    module = module_of(*models, accumulate_grad_batches=2)
    module.training_step(micro(), 0)
    module.forget()
    for _ in range(2):
        assert not module.logged
        module.training_step(micro(), 0).backward()
        module.on_before_optimizer_step(torch.optim.SGD(module.drafter.parameters()))
    assert module.logged


def test_weight_that_no_process_used_gets_no_gradient():
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
