"""Numbers that are not finite, and memory that is not there: a run ends with one line on what to do."""

from __future__ import annotations

import json
import re
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from workbench import CONF, Bench, final, ranks, same, weights

from decode.errors import TooLargeError, UserError
from decode.model.target import Target
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.data.batches import MicroBatch
from distill.losses.objective import Objective
from distill.training.module import DistillModule
from distill.training.nonfinite import NonFiniteGuard, load, save
from distill.utils.run_folder import checkpoints

adam: Any = import_module("torch.optim.adam")  # `torch.optim.adam` is a function
SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}
STEP = {
    "optimizer__optimizer": SGD,
    "optimizer__warmup": 0.0,
    "trainer__precision": "32-true",
    "trainer__max_steps": 1,
    "score__enabled": False,
}
TOO_MUCH = 2**46  # bytes that no machine gives


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("guard"))
    bench.base.try_largest = True  # as is the default
    return bench


def replace(monkeypatch, owner, name: str, which: int | None, change) -> None:
    """Call number `which` of `owner.name`, or each, returns `change` of what it would have returned."""
    call, calls = getattr(owner, name), count(1)

    def changed(*args, **options):
        found = call(*args, **options)
        return change(found) if which in (next(calls), None) else found

    monkeypatch.setattr(owner, name, changed)


def spoil_gradient(scored):
    """The same total, with a gradient that is nan."""
    total, *rest = scored
    return (total + (0 * total).sqrt(), *rest)


SPOILT = {
    "the loss is nan": lambda scored: (scored[0] * torch.nan, *scored[1:]),
    "the loss is inf": lambda scored: (scored[0] * torch.inf, *scored[1:]),
    "norm is nan": spoil_gradient,
}


def test_broken_target_is_named(bench, tmp_path, monkeypatch):
    def broken(found):
        found.last[0] = torch.nan
        return found

    bench.run(tmp_path / "made", trainer__max_steps=1, score__enabled=False)  # its rollouts are used again
    replace(monkeypatch, Target, "read", None, broken)
    said = "the loss is nan at step 0; the target's logits are not finite"
    with pytest.raises(UserError, match=said):
        bench.run(tmp_path / "bad", score__enabled=False, taps="online")


@pytest.mark.parametrize("what", SPOILT)
def test_step_that_is_not_finite_moves_no_weight_and_is_saved(what, bench, tmp_path, monkeypatch, spy):
    totals, steps = spy(Objective, "__call__"), spy(DistillModule, "training_step")
    # The trial before the first step is the first call; step 4 has the tenth and the eleventh.
    replace(monkeypatch, Objective, "__call__", 11, SPOILT[what])
    check, before = DistillModule.on_before_optimizer_step, []

    def watched(self, optimizer):
        before.append([w.detach().clone() for w in self.drafter.parameters()])
        check(self, optimizer)

    monkeypatch.setattr(DistillModule, "on_before_optimizer_step", watched)
    run = {"score__enabled": False, "trainer__accumulate_grad_batches": 2, "trainer__precision": "32-true"}
    with pytest.raises(UserError, match=rf"{what} at step 4; lower optimizer\.optimizer\.lr") as error:
        bench.run(tmp_path, **run)
    seen = [batch for (_, batch, _), _ in steps[-2:]]
    module = steps[-1][0][0]
    after = list(module.drafter.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, before[-1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[-2], before[-1], strict=True))
    (kept,) = checkpoints(tmp_path)
    assert kept.name == "3"
    assert all(torch.isfinite(w).all() for w in weights(kept).values())

    path = tmp_path / "failed" / "step-4-rank-0.safetensors"
    assert str(path) in str(error.value)
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-4-rank-0.json", path.name]
    about = json.loads(path.with_suffix(".json").read_text())
    assert (about["step"], len(about["micro_batches"])) == (4, 2)
    assert what.rpartition(" ")[2] in (about["loss"], about["grad_norm"])
    files: Any = sorted(str(p) for p in bench.root.glob("outputs/rollouts/*/*.parquet"))
    rows = datasets.Dataset.from_parquet(files, cache_dir=str(bench.root / "cache"))["tokens"][:]
    for micro, kept, said in zip(seen, load(path), about["micro_batches"], strict=True):
        assert torch.equal(kept.tokens, micro.tokens)
        assert torch.equal(kept.loss_mask, micro.loss_mask)
        assert kept[2:] == micro._replace(target_states=None)[2:]
        for number, tokens in zip(said["rows"], kept.tokens.tolist(), strict=True):
            assert tokens[: len(rows[number])] == rows[number]
    # Whoever replays it gets the number that was spoiled.
    module.forget()
    for kept, (_, (total, _)) in zip(load(path), totals[9:11], strict=True):
        module.training_step(kept, 0)
        torch.testing.assert_close(totals[-1][1][0], total, rtol=1e-5, atol=0)


def test_weights_and_lengths_of_rows_are_saved(tmp_path):
    tokens, weight = torch.arange(12).view(2, 6), torch.tensor([0.5, 2.0])
    micro = MicroBatch(tokens, tokens > 3, 5, 7, 9, on_policy=2, weight=weight, lengths=[6, 5])
    path = tmp_path / "failed" / "a.safetensors"
    save(path, [micro], [[4, 5]], loss=float("inf"))
    (found,) = load(path)
    assert found.weight is not None
    assert torch.equal(found.weight, weight)
    assert found._replace(weight=None)[2:] == micro._replace(weight=None)[2:]
    assert "Infinity" not in path.with_suffix(".json").read_text(), "no JSON"
    assert set(load_file(path)) == {"0.tokens", "0.loss_mask", "0.weight"}


def test_fp16_overflow_is_left_to_the_loss_scaler():
    NonFiniteGuard().check(SimpleNamespace(precision="16-mixed"), 1.0, float("inf"))


@pytest.mark.parametrize("trainer", ["ddp", "fsdp", "deepspeed_2"])
@pytest.mark.ci("ddp")
def test_every_rank_stops_and_saves_its_own_batch(trainer, bench, tmp_path):
    """One of two meets the gradient that is nan; the run folder stays, which has no checkpoint yet."""

    def spoil(rank: int) -> None:
        call = Objective.__call__
        if rank == 1:
            Objective.__call__ = lambda *args, **options: spoil_gradient(call(*args, **options))

    options = ["try_largest=true", "score.enabled=false", f"output_dir={tmp_path}"]
    done = ranks(2, [*bench.command, *options, f"trainer={trainer}", "trainer.devices=2"], before=spoil)
    assert [outcome.code for outcome in done] == [2, 2]
    found = []
    for rank, outcome in enumerate(done):
        (path,) = tmp_path.glob(f"*/*/failed/step-0-rank-{rank}.safetensors")
        # DeepSpeed calls whatever is none infinite.
        assert re.search(rf"norm is (nan|inf) at step 0; .* The batch is in {path}", outcome.err)
        found += load(path)
    assert found[0].seed != found[1].seed
    assert found[0].anchors == found[1].anchors == sum(int(m.loss_mask[:, 2:].sum()) for m in found)


@pytest.fixture(scope="module")
def unmoved(bench, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The drafter's weights as a run begins with them."""
    folder = tmp_path_factory.mktemp("zero")
    bench.run(folder, **STEP | {"optimizer__optimizer": SGD | {"lr": 1e-30}})
    return weights(folder / "checkpoints" / "1")


@pytest.mark.parametrize(("clip", "kind"), [(None, "norm"), (1e-2, "norm"), (1e3, "norm"), (1e-3, "value")])
def test_logged_norm_is_of_the_gradient_before_it_is_clipped(clip, kind, bench, unmoved, tmp_path, logged):
    options = {"trainer__gradient_clip_val": clip, "trainer__gradient_clip_algorithm": kind}
    bench.run(tmp_path, **STEP, **options)
    found = weights(tmp_path / "checkpoints" / "1")
    moved = torch.cat([(found[name] - unmoved[name]).flatten() for name in found]) / SGD["lr"]
    (norm,) = logged(tmp_path, "train/grad_norm").values()
    assert norm > 0.1
    if kind == "value":
        assert moved.abs().max().item() == pytest.approx(clip, rel=1e-3)
    else:
        assert moved.norm().item() == pytest.approx(min(norm, clip or norm), rel=1e-4)


def exhaust(*_):
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def exhaust_in_backward(scored):
    """A total whose gradient asks for more than there is."""
    total = scored[0] * 1
    total.register_hook(exhaust)
    return (total, *scored[1:])


# the call that asks for too much: of the trial before the first step, or of step 4
PHASES = {
    "a trial of the largest micro-batch ahead of step 0": (Objective, "__call__", 1, exhaust),
    "the forward pass of step 4": (Objective, "__call__", 6, exhaust),
    "the backward pass of step 4": (Objective, "__call__", 6, exhaust_in_backward),
    "the optimizer's step of step 4": (adam, "adam", 5, lambda _: bytearray(TOO_MUCH)),
}


@pytest.mark.parametrize("phase", PHASES)
def test_out_of_memory_is_one_line_with_options_that_exist(phase, bench, tmp_path, monkeypatch):
    replace(monkeypatch, *PHASES[phase])
    with pytest.raises(TooLargeError) as error:
        bench.run(tmp_path, score__enabled=False, batch_size=4, taps="memory", logits_rows=32)
    (text,) = str(error.value).splitlines()
    assert text.startswith(f"out of memory in {phase}: ")
    kept = "nothing was saved yet" if "trial" in phase else f"{tmp_path / 'checkpoints' / '3'} is whole"
    assert kept in text
    advice = re.findall(r"(?:; |lower it with )((?:[\w.]+=\S+ ?)+) \(", text)
    assert advice[0] == "batch_size=2 trainer.accumulate_grad_batches=2"
    assert {"gradient_checkpointing=true", "drafter.depth=1", "taps=online"} < set(advice)
    compose(rewrite([*bench.command, *" ".join(advice).split()], CONF), CONF)
    assert re.search(r": [\d.]+ [MG]iB in use at the most(, \d+ bytes more wanted)?, of [\d.]+ GiB", text)


def test_largest_batch_is_tried_and_changes_nothing(bench, tmp_path, spy, logged):
    bench.run(tmp_path / "without", score__enabled=False, try_largest=False)
    seen = spy(DistillModule, "training_step")
    printed = bench.run(tmp_path / "with", score__enabled=False)
    first, *rest = (batch.tokens.shape[1] for (_, batch, _), _ in seen)
    assert re.search(rf"memory: .* in a trial of the largest micro-batch, \d+ x {first} tokens; ", printed)
    assert (len(rest), first) == (6, max(rest))  # an epoch
    assert min(rest) < first
    assert same(final(tmp_path / "with"), final(tmp_path / "without"))
    assert logged(tmp_path / "with", "train/loss") == logged(tmp_path / "without", "train/loss")
