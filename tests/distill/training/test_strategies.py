"""DeepSpeed, FSDP2 and DDP on two CPU processes: one run's losses and weights, resumed to the last bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    # DeepSpeed chooses once in a process; tests marked gpu run alone (`make gpu`).
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    import_module("deepspeed")  # once, and not in every rank
    bench = Bench(tmp_path_factory.mktemp("strategies"))
    assert bench.train(*SCORELESS).code == 0  # the rollouts, once
    return bench


def two(bench: Bench, trainer: str, *more: str, before=lambda rank: None) -> Path:
    """A finished run of two ranks."""
    done = _two(bench, trainer, *more, before=before)
    assert [outcome.code for outcome in done] == [0, 0], [outcome.err for outcome in done]
    assert done[0].err == ""
    return done[0].folder


def _two(bench: Bench, trainer: str, *more: str, before) -> list[Outcome]:
    return _ranks(2, bench, trainer, *more, before=before)


def _ranks(count: int, bench: Bench, trainer: str, *more: str, before=lambda rank: None) -> list[Outcome]:
    launch = [f"trainer={trainer}", f"trainer.devices={count}", *ALL_PARTS.get(trainer, [])]
    own = [o for o in bench.command if "drafter=lm" not in more or not o.startswith("drafter.")]
    return ranks(count, [*own, *SCORELESS, *launch, *more], before=before)


def alone(bench: Bench, *more: str, count: int = 2) -> Path:
    """The same rows in one process: those of other ranks are micro-batches more."""
    accumulate = count * next((int(m.rpartition("=")[2]) for m in more if "accumulate" in m), 1)
    done = bench.train(*SCORELESS, *more, f"trainer.accumulate_grad_batches={accumulate}").succeeded()
    return done.folder


def losses(folder: Path) -> list[float]:
    lines = (folder / "csv" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/loss")
    return [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]


def assert_close(folder: Path, want: Path, step: int, tolerance: float) -> None:
    assert losses(folder) == pytest.approx(losses(want), rel=tolerance)
    for name, value in weights(want / "checkpoints" / str(step)).items():
        found = weights(folder / "checkpoints" / str(step))[name]
        torch.testing.assert_close(found, value, rtol=0, atol=tolerance)


SGD = ["optimizer.optimizer._target_=torch.optim.SGD", "~optimizer.optimizer.betas"]
SINGLE = {
    "32-true": ["trainer.precision=32-true"],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    # Devices have random numbers of their own.
    "noiseless": ["trainer.precision=32-true", "drafter.feature_noise=0"],
    "sgd": [*SGD, "trainer.precision=32-true", "trainer.accumulate_grad_batches=2"],
}
# Sums in another order, then AdamW, whose first steps have no size but the learning rate's.
CLOSE = {"32-true": 1e-5, "bf16-mixed": 2e-3}


@pytest.fixture(scope="module")
def single(bench) -> Callable[[str], Path]:
    """A run of one process, made when it is asked for."""
    return cache(lambda name: alone(bench, *SINGLE[name]))


@pytest.fixture(scope="module")
def exact(bench) -> Callable[[str, str], Path]:
    """An undisturbed run of two ranks, made when it is asked for."""
    return cache(lambda trainer, precision: two(bench, trainer, f"trainer.precision={precision}", "seed=0"))


@pytest.mark.parametrize("trainer", CUT)
@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.ci("bf16-mixed-deepspeed_1")
def test_a_run_of_two_is_that_of_one(trainer, precision, exact, single):
    """DDP's is in test_equivalences.py."""
    folder = exact(trainer, precision)
    assert_close(folder, single(precision), 6, CLOSE[precision])
    state = folder / "checkpoints" / "6" / "trainer"
    assert (state / "state.ckpt").is_dir() == trainer.startswith("deepspeed")


@pytest.mark.proof
@pytest.mark.parametrize("trainer", ["ddp", *CUT])
def test_a_run_of_four_is_that_of_one(trainer, bench):
    more = ["trainer.precision=32-true", "batch_size=1", "seed=0"]
    done = _ranks(4, bench, trainer, *more)
    assert [outcome.code for outcome in done] == [0] * 4, [outcome.err for outcome in done]
    assert_close(done[0].folder, alone(bench, *more, count=4), 6, CLOSE["32-true"])


@pytest.mark.proof
@pytest.mark.parametrize("trainer", CUT)
def test_a_killed_run_resumes_to_the_last_bit(trainer, bench, exact):
    """DDP's is in test_ranks.py."""
    options = ["trainer.precision=32-true", "seed=0"]
    straight = exact(trainer, "32-true")

    def kill(rank: int) -> None:
        end = callbacks.TrainingBar.on_train_batch_end

        def die(self, trainer, *rest):
            if trainer.global_step == 5:
                os.kill(os.getpid(), 9)
            end(self, trainer, *rest)

        callbacks.TrainingBar.on_train_batch_end = die

    killed = _two(bench, trainer, *options, before=kill)
    assert [outcome.code for outcome in killed] == [-9, -9]

    def refuse(rank: int) -> None:
        """What DeepSpeed reads files with: it would run what they say."""
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        TorchCheckpointEngine.load = None

    again = two(bench, trainer, *options, before=refuse)
    assert again != straight
    assert [c.name for c in checkpoints(again)] == ["2", "4", "6"]
    assert same(weights(again / "checkpoints" / "6"), weights(straight / "checkpoints" / "6"))


@pytest.mark.parametrize("trainer", ["ddp", *CUT])
@pytest.mark.ci("ddp")
def test_a_stopped_run_of_four_resumes_to_the_last_bit(trainer, bench):
    """With more than two processes the order in which gradients are added up decides the last bits."""
    options = ["trainer.precision=32-true", "batch_size=1", "seed=1"]

    def ask(rank: int) -> None:
        step = callbacks.TrainingBar.on_train_batch_end

        def stop(self, trainer, *rest):
            if rank == 0 and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            step(self, trainer, *rest)

        callbacks.TrainingBar.on_train_batch_end = stop

    straight = _ranks(4, bench, trainer, *options, f"output_dir={bench.root / f'straight-{trainer}'}")[
        0
    ].folder
    stopped = _ranks(4, bench, trainer, *options, before=ask)
    assert [outcome.code for outcome in stopped] == [143] * 4, [outcome.err for outcome in stopped]
    again = _ranks(4, bench, trainer, *options)
    assert [outcome.code for outcome in again] == [0] * 4, [outcome.err for outcome in again]
    assert "resuming from step 4" in again[0].out
    assert same(weights(again[0].folder / "checkpoints" / "6"), weights(straight / "checkpoints" / "6"))


@pytest.mark.parametrize("trainer", ["ddp", *CUT])
@pytest.mark.proof
def test_the_accumulation_is_divided_by_once(trainer, bench, single):
    """Under SGD: AdamW forgives a gradient of another scale."""
    assert_close(two(bench, trainer, *SINGLE["sgd"]), single("sgd"), 6, 1e-6)


@pytest.mark.parametrize(
    ("drafter", "trainer"),
    [
        ("eagle", "fsdp"),
        ("lm", "deepspeed_3"),
        pytest.param("eagle", "deepspeed_3", marks=pytest.mark.proof),
        pytest.param("lm", "fsdp", marks=pytest.mark.proof),
    ],
)
@pytest.mark.ci("eagle-fsdp")
def test_between_steps_a_rank_has_its_part_of_the_weights(drafter, trainer, bench, tmp_path):
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

    more = ["drafter=lm", "drafter.layers=1", "weights=constant"] if drafter == "lm" else []
    two(bench, trainer, *more, "trainer.max_steps=2", before=measure)
    (first, here, whole), (second, *_) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert whole <= first + second <= whole + 2 * 64, "but for padding"
    assert abs(first - second) <= 64
    if trainer == "deepspeed_3":
        assert here == 0, "nothing is left of what was gathered"


def nodes(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells the one process of a machine, of several."""
    return torchrun(rank, count, port) | {"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("trainer", ["ddp", "deepspeed_2", "fsdp"])
@pytest.mark.proof
def test_two_machines_of_one_process_are_two_processes_of_one(trainer, bench, single):
    launch = [f"trainer={trainer}", "trainer.devices=1", "trainer.num_nodes=2", "trainer.precision=32-true"]
    done = ranks(2, [*bench.command, *SCORELESS, *launch], launcher=nodes)
    assert [outcome.code for outcome in done] == [0, 0], [outcome.err for outcome in done]
    assert_close(done[0].folder, single("32-true"), 6, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["gpu", "ddp", *CUT])
def test_a_gpu_trains_as_the_cpu_does(trainer, bench, single):
    launch = [f"trainer={trainer}", "trainer.accelerator=gpu", "trainer.devices=1"]
    assert_close(alone(bench, *launch, *SINGLE["noiseless"]), single("noiseless"), 6, 1e-3)


@pytest.mark.proof
def test_optimizer_states_in_host_memory_are_the_same_run(bench, single):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()  # minutes, once: ranks would both be waiting for it
    folder = two(bench, "deepspeed_offload", "trainer.precision=32-true")
    assert_close(folder, single("32-true"), 6, 1e-5)


def test_an_optimizer_that_needs_whole_matrices_is_refused(bench):
    done = bench.train("trainer=fsdp", "optimizer=muon")
    assert done.code == 2
    assert "muon needs whole matrices" in done.err


def test_an_option_that_zero_has_not_is_one_line(bench):
    done = bench.train("trainer=deepspeed_2", "+trainer.strategy.zero.nonsense=1")
    done.refused("DeepSpeedZeroConfig nonsense Extra inputs")


@pytest.mark.proof
def test_weights_in_two_bytes_have_masters_that_checkpoints_show(bench, single):
    folder = two(bench, "deepspeed_2", "trainer.precision=bf16-true")
    found = weights(folder / "checkpoints" / "6")
    assert {w.dtype for w in found.values() if w.is_floating_point()} == {torch.float32}
    rounded = [w.bfloat16().float() for w in found.values()]
    assert not all(torch.equal(a, b) for a, b in zip(found.values(), rounded, strict=True))
    assert losses(folder) == pytest.approx(losses(single("32-true")), rel=2e-2)


@pytest.mark.parametrize("trainer", ["fsdp", "deepspeed_3"])
def test_a_drafter_in_parts_writes_no_answers(trainer, bench):
    """It would copy itself, which neither engine allows."""
    own = [option for option in bench.command if not option.startswith("drafter.")]
    answers = ["drafter=lm", "drafter.layers=1", "weights=constant", "on_policy.share=0.5"]
    done = train([*own, *SCORELESS, *answers, f"trainer={trainer}"])
    assert done.code == 2
    assert done.err == (
        "error: on_policy: the drafter writes with whole weights, and this trainer cuts them up; use "
        "trainer=ddp, deepspeed_1 or deepspeed_2\n"
    )
