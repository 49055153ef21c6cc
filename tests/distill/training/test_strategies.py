"""DeepSpeed, FSDP2 and DDP on CPU processes: one process's losses and weights, resumed to the last bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from workbench import Bench, Outcome, ranks, same, torchrun, train, weights

from distill.training import checkpointing as callbacks
from distill.utils.run_folder import checkpoints

CUT = ["deepspeed_1", "deepspeed_2", "deepspeed_3", "fsdp"]
# Small weights would stay whole on every rank.
ALL_PARTS = {"deepspeed_3": ["+trainer.strategy.zero.stage3_param_persistence_threshold=0"]}
SCORELESS = ["score.enabled=false", "score.every=2", "taps=online"]
FULL = "trainer.precision=32-true"
LM = ["drafter=lm", "drafter.layers=1", "weights=constant"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    # DeepSpeed chooses once in a process; tests marked gpu run in a process of their own (`make gpu`).
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    import_module("deepspeed")  # once, and not in every rank
    bench = Bench(tmp_path_factory.mktemp("strategies"))
    assert bench.train(*SCORELESS).code == 0  # the rollouts, once
    return bench


def command(bench: Bench, more: Iterable[str]) -> list[str]:
    """The quick run's overrides without scores, for the drafter that `more` names."""
    return [o for o in bench.command if "drafter=lm" not in more or not o.startswith("drafter.")] + SCORELESS


def run(bench: Bench, trainer: str, *more: str, count: int = 2, code: int = 0, **options) -> Outcome:
    """A run of several ranks that all end with a code; the outcome of rank 0."""
    launch = [f"trainer={trainer}", f"trainer.devices={count}", *ALL_PARTS.get(trainer, [])]
    done = ranks(count, [*command(bench, more), *launch, *more], **options)
    assert [outcome.code for outcome in done] == [code] * count, [outcome.err for outcome in done]
    assert code or done[0].err == ""
    return done[0]


def one_process(bench: Bench, *more: str, count: int = 2) -> Path:
    """The same rows in one process: other ranks have further micro-batches."""
    accumulate = count * next((int(m.rpartition("=")[2]) for m in more if "accumulate" in m), 1)
    done = bench.train(*SCORELESS, *more, f"trainer.accumulate_grad_batches={accumulate}")
    return done.succeeded().folder


@pytest.fixture
def assert_close(logged) -> Callable[[Path, Path, float], None]:
    def check(folder: Path, want: Path, tolerance: float) -> None:
        found, losses = (logged(run, "train/loss") for run in (folder, want))
        assert found == pytest.approx(losses, rel=tolerance)
        found, values = (weights(run / "checkpoints" / "6") for run in (folder, want))
        torch.testing.assert_close(found, values, rtol=0, atol=tolerance)

    return check


SGD = ["optimizer.optimizer._target_=torch.optim.SGD", "~optimizer.optimizer.betas"]
SINGLE = {
    "32-true": [FULL],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    # Devices have random numbers of their own.
    "noiseless": [FULL, "drafter.feature_noise=0"],
    "sgd": [*SGD, FULL, "trainer.accumulate_grad_batches=2"],
}
# Sums in another order, then AdamW, whose first steps have no size but the learning rate's.
CLOSE = {"32-true": 1e-5, "bf16-mixed": 2e-3}


@pytest.fixture(scope="module")
def single(bench) -> Callable[[str], Path]:
    """A run of one process, made when it is asked for."""
    return cache(lambda name: one_process(bench, *SINGLE[name]))


@pytest.mark.parametrize("trainer", CUT)
@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.ci("bf16-mixed-deepspeed_1")
def test_two_processes_train_as_one(trainer, precision, bench, single, assert_close):
    """With DDP in test_equivalences.py."""
    folder = run(bench, trainer, *SINGLE[precision], "seed=0").folder
    assert_close(folder, single(precision), CLOSE[precision])
    state = folder / "checkpoints" / "6" / "trainer"
    assert (state / "state.ckpt").is_dir() == trainer.startswith("deepspeed")


def nodes(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells the one process of a machine, of several."""
    return torchrun(rank, count, port) | {"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.proof
@pytest.mark.parametrize("trainer", ["ddp", *CUT])
def test_other_numbers_of_processes_steps_and_machines_train_as_one(trainer, bench, single, assert_close):
    more = [FULL, "batch_size=1", "seed=0"]
    assert_close(run(bench, trainer, *more, count=4).folder, one_process(bench, *more, count=4), 1e-5)
    # Under SGD, which does not forgive a gradient that is divided by the accumulation twice, as AdamW does.
    assert_close(run(bench, trainer, *SINGLE["sgd"]).folder, single("sgd"), 1e-6)
    machines = run(bench, trainer, FULL, "trainer.devices=1", "trainer.num_nodes=2", launcher=nodes)
    assert_close(machines.folder, single("32-true"), 1e-5)


@pytest.mark.proof
def test_optimizer_states_in_host_memory_train_the_same(bench, single, assert_close):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()  # minutes, once: ranks would both be waiting for it
    assert_close(run(bench, "deepspeed_offload", FULL).folder, single("32-true"), 1e-5)


def stop_after_3(rank: int) -> None:
    """A signal to rank 0 after an optimizer step."""
    end = callbacks.TrainingBar.on_train_batch_end

    def hit(self, trainer, *rest):
        if rank == 0 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        end(self, trainer, *rest)

    callbacks.TrainingBar.on_train_batch_end = hit


def refuse_pickles(rank: int) -> None:
    """What DeepSpeed reads files with: it would run what they say."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine.load = None


@pytest.mark.parametrize("trainer", ["ddp", *CUT])
@pytest.mark.proof
def test_stopped_run_of_four_resumes_to_the_last_bit(trainer, bench):
    """With more than two processes the order in which gradients are added up decides the last bits."""
    options = [FULL, "batch_size=1", "seed=1"]
    straight = run(bench, trainer, *options, f"output_dir={bench.root / trainer}", count=4).folder
    run(bench, trainer, *options, count=4, code=143, before=stop_after_3)
    again = run(bench, trainer, *options, count=4, before=refuse_pickles)
    assert "resuming from step 4" in again.out
    assert [c.name for c in checkpoints(again.folder)] == ["2", "4", "6"]
    assert same(weights(again.folder / "checkpoints" / "6"), weights(straight / "checkpoints" / "6"))


@pytest.mark.parametrize("trainer", ["fsdp", "deepspeed_3"])
@pytest.mark.parametrize("drafter", ["eagle", "lm"])
@pytest.mark.ci("eagle-fsdp")
def test_rank_has_its_part_of_the_weights_between_steps(drafter, trainer, bench, tmp_path):
    """Of a draft model too, whose layers are gathered one by one."""

    def measure(rank: int) -> None:
        save = callbacks.ScoreCheckpoint.save

        def count(self, trainer, module, step):
            parts = [getattr(w, "ds_tensor", w) for w in module.drafter.parameters()]
            own = sum(getattr(part, "_local_tensor", part).numel() for part in parts)
            here = sum(w.numel() for w in module.drafter.parameters())
            save(self, trainer, module, step)
            whole = sum(w.numel() for w in weights(self.root / str(step)).values())
            (tmp_path / f"{rank}.json").write_text(json.dumps([own, here, whole]))

        callbacks.ScoreCheckpoint.save = count

    more = LM if drafter == "lm" else []
    run(bench, trainer, *more, "trainer.max_steps=2", before=measure)
    (first, here, whole), (second, *_) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert whole <= first + second <= whole + 2 * 64, "but for padding"
    assert abs(first - second) <= 64
    if trainer == "deepspeed_3":
        assert here == 0, "nothing is left of what was gathered"


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["gpu", "ddp", *CUT])
def test_gpu_trains_as_the_cpu_does(trainer, bench, single, assert_close):
    launch = [f"trainer={trainer}", "trainer.accelerator=gpu", "trainer.devices=1"]
    assert_close(one_process(bench, *launch, *SINGLE["noiseless"]), single("noiseless"), 1e-3)


REFUSED = [
    ("muon needs whole matrices", ["trainer=fsdp", "optimizer=muon"]),
    ("nonsense", ["trainer=deepspeed_2", "+trainer.strategy.zero.nonsense=1"]),
    # The drafter would copy itself to write answers, which neither engine allows.
    *(("on_policy: ", [f"trainer={name}", *LM, "on_policy.share=0.5"]) for name in ("fsdp", "deepspeed_3")),
]


@pytest.mark.parametrize(("said", "more"), REFUSED)
def test_what_a_strategy_cannot_do_is_refused(said, more, bench):
    train([*command(bench, more), *more]).refused(said)


@pytest.mark.proof
def test_weights_in_two_bytes_have_masters_that_checkpoints_show(bench, single, logged):
    folder = run(bench, "deepspeed_2", "trainer.precision=bf16-true").folder
    found = weights(folder / "checkpoints" / "6")
    assert {w.dtype for w in found.values() if w.is_floating_point()} == {torch.float32}
    assert not all(torch.equal(w, w.bfloat16().float()) for w in found.values())
    losses, want = (logged(run, "train/loss") for run in (folder, single("32-true")))
    assert losses == pytest.approx(want, rel=2e-2)
