"""Numbers that are none, and memory that is not there: a run ends with one line on what to do."""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from workbench import CONF, Bench, fresh, ranks, same, weights

from decode.errors import TooLargeError, UserError
from decode.model.target import Target
from distill.cli.main import rewrite
from distill.config.compose import compose
from distill.data.batches import MicroBatch
from distill.losses.objective import Objective
from distill.training import memory
from distill.training.module import DistillModule
from distill.training.nonfinite import NonFiniteGuard, load, save
from distill.utils.run_folder import checkpoints

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


def spoil_loss(total):
    return total * torch.nan


def spoil_gradient(total):
    """The same number, with a gradient that is none."""
    return total + (0 * total).sqrt()


def test_a_step_that_a_broken_target_spoils_names_the_target(bench, tmp_path, monkeypatch):
    read = Target.read

    def broken(self, tokens, lengths=None):
        found = read(self, tokens, lengths)
        found.last[0] = torch.nan
        return found

    bench.run(tmp_path / "made", trainer__max_steps=1, score__enabled=False)  # its rollouts are used again
    monkeypatch.setattr(Target, "read", broken)
    with pytest.raises(
        UserError, match="the loss is nan at step 0; the target's logits are not finite behind"
    ):
        bench.run(tmp_path / "bad", score__enabled=False, taps="online")


@pytest.mark.parametrize(
    ("spoil", "what"), [(spoil_loss, "the loss is nan"), (spoil_gradient, "norm is nan")]
)
def test_a_step_without_numbers_stops_before_weights_move_and_leaves_its_batch(
    spoil, what, bench, tmp_path, monkeypatch
):
    call, step, calls, steps = Objective.__call__, DistillModule.training_step, [], []
    check = DistillModule.on_before_optimizer_step
    before = []

    def spoiled(self, *args, **options):
        total, scored = call(self, *args, **options)
        calls.append(total)
        # The trial before the first step is the first call; step 4 has the tenth and the eleventh.
        return (spoil(total) if len(calls) == 11 else total), scored

    def recorded(self, batch, batch_idx):
        steps.append((self, batch))
        return step(self, batch, batch_idx)

    def watched(self, optimizer):
        before.append([w.detach().clone() for w in self.drafter.parameters()])
        check(self, optimizer)

    monkeypatch.setattr(Objective, "__call__", spoiled)
    monkeypatch.setattr(DistillModule, "training_step", recorded)
    monkeypatch.setattr(DistillModule, "on_before_optimizer_step", watched)
    run = {"score__enabled": False, "trainer__accumulate_grad_batches": 2, "trainer__precision": "32-true"}
    with pytest.raises(UserError, match=rf"{what} at step 4; lower optimizer\.lr") as error:
        bench.run(tmp_path / "bad", **run)
    module, _ = steps[-1]
    after = list(module.drafter.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, before[-1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[-2], before[-1], strict=True))
    assert [p.name for p in checkpoints(tmp_path / "bad")] == ["3"]

    path = tmp_path / "bad" / "failed" / "step-4-rank-0.safetensors"
    assert str(path) in str(error.value)
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-4-rank-0.json", path.name]
    about = json.loads(path.with_suffix(".json").read_text())
    assert (about["step"], len(about["micro_batches"])) == (4, 2)
    assert "nan" in (about["loss"], about["grad_norm"])
    rows = store_rows(bench)
    for (_, seen), kept, said in zip(steps[-2:], load(path), about["micro_batches"], strict=True):
        assert torch.equal(kept.tokens, seen.tokens)
        assert torch.equal(kept.loss_mask, seen.loss_mask)
        assert kept._replace(tokens=0, loss_mask=0) == seen._replace(
            tokens=0, loss_mask=0, target_states=None
        )
        for number, tokens in zip(said["rows"], kept.tokens.tolist(), strict=True):
            assert tokens[: len(rows[number])] == rows[number]
    # Whoever replays it gets the number that was spoiled.
    module.forget()
    for kept, total in zip(load(path), calls[9:11], strict=True):
        module.training_step(kept, 0)
        torch.testing.assert_close(calls[-1], total, rtol=1e-5, atol=0)


def store_rows(bench: Bench) -> list[list[int]]:
    """Tokens of the rows, in store order."""
    files: Any = sorted(str(p) for p in bench.root.glob("outputs/rollouts/*/*.parquet"))
    found = datasets.Dataset.from_parquet(files, cache_dir=str(bench.root / "cache"))
    return found["tokens"][:]


def test_what_a_row_counts_is_saved_too(tmp_path):
    tokens = torch.arange(12).view(2, 6)
    micro = MicroBatch(
        tokens, tokens > 3, 5, 7, 9, on_policy=2, weight=torch.tensor([0.5, 2.0]), lengths=[6, 5]
    )
    path = tmp_path / "failed" / "a.safetensors"
    save(path, [micro], [[4, 5]], loss=float("inf"))
    (found,) = load(path)
    assert found.weight is not None
    assert found.weight.tolist() == [0.5, 2.0]
    assert (found.anchors, found.step, found.seed, found.on_policy) == (5, 7, 9, 2)
    assert found.lengths == [6, 5], "rows would be read padded"
    assert "Infinity" not in path.with_suffix(".json").read_text(), "no JSON"
    assert set(load_file(path)) == {"0.tokens", "0.loss_mask", "0.weight"}


def test_a_gradient_that_overflows_fp16_is_left_to_the_loss_scaler():
    NonFiniteGuard().check(SimpleNamespace(precision="16-mixed"), 1.0, float("inf"))


def test_a_run_folder_without_a_checkpoint_stays_for_its_batch(bench, tmp_path, monkeypatch):
    call = Objective.__call__

    def spoiled(self, *args, **options):
        total, scored = call(self, *args, **options)
        return spoil_gradient(total), scored

    monkeypatch.setattr(Objective, "__call__", spoiled)
    done = bench.train("score.enabled=false", f"output_dir={tmp_path}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    (path,) = tmp_path.glob("*/*/failed/step-0-rank-0.safetensors")
    assert f"The batch is in {path}" in done.err


@pytest.mark.parametrize("trainer", ["ddp", "fsdp", "deepspeed_2"])
@pytest.mark.ci("ddp")
def test_every_rank_stops_and_saves_its_own_batch(trainer, bench, tmp_path):
    """One of two meets the gradient that is none."""

    def spoil(rank: int) -> None:
        call = Objective.__call__

        def spoiled(self, *args, **options):
            total, scored = call(self, *args, **options)
            return (spoil_gradient(total) if rank == 1 else total), scored

        Objective.__call__ = spoiled

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
    bench.run(folder, **STEP | {"optimizer__optimizer": SGD | {"lr": 0.0}})
    return weights(folder / "checkpoints" / "1")


@pytest.mark.parametrize(("clip", "kind"), [(None, "norm"), (1e-2, "norm"), (1e3, "norm"), (1e-3, "value")])
def test_the_logged_norm_is_that_of_the_gradient_before_it_is_clipped(clip, kind, bench, unmoved, tmp_path):
    options = {"trainer__gradient_clip_val": clip, "trainer__gradient_clip_algorithm": kind}
    bench.run(tmp_path, **STEP, **options)
    found = weights(tmp_path / "checkpoints" / "1")
    moved = torch.cat([(found[name] - unmoved[name]).flatten() for name in found]) / SGD["lr"]
    norm = float(csv_value(tmp_path, "train/grad_norm"))
    assert norm > 0.1
    if kind == "value":
        assert moved.abs().max().item() == pytest.approx(clip, rel=1e-3)
    else:
        assert moved.norm().item() == pytest.approx(min(norm, clip or norm), rel=1e-4)


def csv_value(folder: Path, name: str) -> str:
    """A metric of the first row that has it."""
    header, *lines = (folder / "csv" / "metrics.csv").read_text().splitlines()
    place = header.split(",").index(name)
    return next(line.split(",")[place] for line in lines if line.split(",")[place])


def exhaust_forward(monkeypatch, at: int):
    """The objective of the optimizer step asks for more than there is."""
    call, calls = Objective.__call__, []

    def greedy(self, *args, **options):
        calls.append(1)
        if len(calls) == at + 2:  # after the trial
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return call(self, *args, **options)

    monkeypatch.setattr(Objective, "__call__", greedy)


def exhaust_backward(monkeypatch, at: int):
    backward, calls = DistillModule.backward, []

    def greedy(self, loss, *args, **options):
        calls.append(1)
        if len(calls) == at + 1:
            loss = loss * 1
            loss.register_hook(lambda gradient: torch.empty(TOO_MUCH, dtype=torch.uint8))
        return backward(self, loss, *args, **options)

    monkeypatch.setattr(DistillModule, "backward", greedy)


def exhaust_optimizer(monkeypatch, at: int):
    functional = importlib.import_module("torch.optim.adam")
    adam, calls = functional.adam, []

    def greedy(*args, **options):
        calls.append(1)
        if len(calls) == at + 1:
            bytearray(TOO_MUCH)  # a MemoryError
        return adam(*args, **options)

    monkeypatch.setattr(functional, "adam", greedy)


PHASES = {
    "the forward pass": exhaust_forward,
    "the backward pass": exhaust_backward,
    "the optimizer's step": exhaust_optimizer,
}


@pytest.mark.parametrize("phase", PHASES)
def test_out_of_memory_is_one_line_with_options_that_exist(phase, bench, tmp_path, monkeypatch):
    PHASES[phase](monkeypatch, 4)
    with pytest.raises(TooLargeError) as error:
        bench.run(tmp_path, score__enabled=False, batch_size=4, taps="memory", logits_rows=32)
    text = str(error.value)
    assert text.startswith(f"out of memory in {phase} of step 4: ")
    assert "\n" not in text
    assert f"{tmp_path / 'checkpoints' / '3'} is whole" in text
    advice = re.findall(r"(?:; |lower it with )((?:[\w.]+=\S+ ?)+) \(", text)
    assert advice[0] == "batch_size=2 trainer.accumulate_grad_batches=2"
    assert {"gradient_checkpointing=true", "drafter.depth=1", "taps=online"} < set(advice)
    compose(rewrite([*bench.command, *" ".join(advice).split()], CONF), CONF)
    assert re.search(r": [\d.]+ [MG]iB in use at the most(, \d+ bytes more wanted)?, of [\d.]+ GiB", text)


def test_other_failures_are_not_taken_for_it(bench, tmp_path, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Objective, "__call__", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        bench.run(tmp_path, score__enabled=False)


def _train_with_little_memory(bench, folder) -> None:
    def tight(device):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))

    memory.reset_peak = tight
    with torch.backends.mkldnn.flags(enabled=False):  # it would warn that it has no scratch memory
        done = bench.train(
            "try_largest=true", "score.enabled=false", "batch_size=1500", f"output_dir={folder}"
        )
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (folder / "said").write_text(done.err)
    sys.exit(done.code)


@pytest.mark.proof
def test_a_process_that_may_have_no_more_memory_says_so_before_the_first_step(bench, tmp_path):
    """The kernel refuses, in a child: exit code 1 and one line."""
    assert fresh(_train_with_little_memory, bench, tmp_path) == 1
    said = (tmp_path / "said").read_text()
    assert said.count("\n") == 1
    assert said.startswith("error: out of memory in a trial of the largest micro-batch ahead of step 0: ")
    assert "batch_size=750 trainer.accumulate_grad_batches=2 (" in said
    assert "nothing was saved yet" in said


def test_trying_the_largest_batch_changes_nothing(bench, tmp_path):
    bench.run(tmp_path / "with", score__enabled=False)
    bench.run(tmp_path / "without", score__enabled=False, try_largest=False)
    first, second = (weights(tmp_path / name / "checkpoints" / "6") for name in ("with", "without"))
    assert same(first, second)
    first, second = (csv_value(tmp_path / name, "train/loss") for name in ("with", "without"))
    assert first == second


def test_the_largest_batch_is_tried(bench, tmp_path, monkeypatch):
    seen = []
    step = DistillModule.training_step

    def recorded(self, batch, batch_idx):
        seen.append(batch.tokens.shape[1])
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DistillModule, "training_step", recorded)
    printed = bench.run(tmp_path, score__enabled=False)
    first, *rest = seen
    assert re.search(rf"memory: .* in a trial of the largest micro-batch, \d+ x {first} tokens; ", printed)
    assert (len(rest), first) == (6, max(rest))  # an epoch
    assert min(rest) < first
