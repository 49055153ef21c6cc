"""SIGTERM in training: saved first, left with 143, and resumed by the same command."""

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from workbench import Bench, fork

from distill.scoring import scorer as scoring
from distill.training import checkpointing as callbacks
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints
from drafters.checkpoint import atomic as files
from drafters.models.eagle import Eagle

OPTIONS = ["score.every=2", "trainer.accumulate_grad_batches=2"]


@pytest.fixture(scope="module", autouse=True)
def noisy():
    """A drafter that draws from the global generator, as dropout does."""
    unroll = Eagle.unroll

    def with_noise(self, *args):
        for step in unroll(self, *args):
            yield step._replace(hidden=step.hidden + 0.1 * torch.randn_like(step.hidden))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle, "unroll", with_noise)
        yield


@pytest.fixture(scope="module")
def straight(bench, noisy) -> Path:
    """An undisturbed run: six steps of two micro-batches, a save point every two."""
    return bench.train(*OPTIONS).succeeded().folder


def send(monkeypatch, number: int, owner, name: str, when) -> None:
    """A signal to this process at the first call of `owner.name` for which `when` holds."""
    call, sent = getattr(owner, name), []

    def spoilt(*args, **options):
        if not sent and when(*args):
            sent.append(number)
            os.kill(os.getpid(), number)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, spoilt)


def stop(bench: Bench) -> tuple[int, str]:
    """Exit code of the command in a forked process, and what it left on stderr."""
    inside, outside = os.pipe()

    def body() -> int:
        done = bench.train(*OPTIONS)
        os.write(outside, done.err.encode())
        return done.code

    status = fork(body)
    os.close(outside)
    with os.fdopen(inside) as said:
        return os.waitstatus_to_exitcode(status), said.read()


def unfinished(bench: Bench) -> Path:
    (folder,) = [p for p in bench.runs() if not (p / "done").exists()]
    return folder


def in_a_step(_, batch, number):
    return number == 4


def between_micro_batches(_, batch, number):
    return number == 5


def saves_4(drafter, target, folder, *_):
    return folder.name == "4.tmp"


# when signals come, which signal, the step that the run stops at
MOMENTS = {
    "in a step": ([(DistillModule, "training_step", in_a_step)], "SIGTERM", 3),
    "between micro-batches": ([(DistillModule, "training_step", between_micro_batches)], "SIGUSR1", 3),
    # And once more before it is whole.
    "in a save": (
        [(callbacks.checkpoint_io, "save", saves_4), (files, "sync", lambda path: "4.tmp" in path.parts)],
        "SIGTERM",
        4,
    ),
    "in a score": ([(scoring.checkpoint_io, "load", lambda folder, *_: folder.name == "4")], "SIGTERM", 4),
    "in the last score": (
        [(scoring.checkpoint_io, "load", lambda folder, *_: folder.name == "6")],
        "SIGTERM",
        6,
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.ci("in a step")
def test_stopped_run_ends_as_undisturbed(moment, bench, straight, monkeypatch, assert_same_run, logged):
    calls, name, step = MOMENTS[moment]
    with monkeypatch.context() as spoilt:
        for call in calls:
            send(spoilt, getattr(signal, name), *call)
        code, said = stop(bench)
    assert code == 143
    assert said.startswith(f"stopped by {name} at step {step};")
    folder = unfinished(bench)
    assert [int(p.name) for p in checkpoints(folder)] == sorted({*range(2, step, 2), step})
    assert (folder / "checkpoints" / "last").readlink() == Path(str(step))
    scored = [int(p.name) for p in checkpoints(folder) if (p / "score.json").exists()]
    assert scored == list(range(2, step, 2))
    done = bench.train(*OPTIONS).succeeded()
    assert done.folder == folder
    assert f"resuming from step {step}" in done.out
    assert_same_run(folder, straight)
    assert logged(folder, "train/loss") == logged(straight, "train/loss")


# what is begun, how often a run does that, and seconds that it takes
PHASES = {
    "step": (DistillModule, "training_step", 12, 0.01),
    "save": (callbacks.ScoreCheckpoint, "_publish", 3, 0.03),
    "score": (scoring.Scorer, "__call__", 3, 0.3),
}


def within(monkeypatch, phase: str, dice: np.random.Generator, number: int, noted: Path) -> None:
    """A signal at a random moment after some step, save or score has begun; notes what it hits."""
    begun, active = Counter(), ["between"]
    chosen, delay = dice.integers(1, PHASES[phase][2] + 1), dice.uniform(0, PHASES[phase][3])

    def hit() -> None:
        noted.write_text(active[-1])
        os.kill(os.getpid(), number)

    def follow(name: str, call):
        def begin(*args):
            begun[name] += 1
            if name == phase and begun[name] == chosen:
                threading.Timer(delay, hit).start()
            active.append(name)
            try:
                return call(*args)
            finally:
                active.pop()

        return begin

    for name, (owner, method, *_) in PHASES.items():
        monkeypatch.setattr(owner, method, follow(name, getattr(owner, method)))


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_runs_interrupted_at_20_random_moments_end_as_undisturbed(
    number, bench, straight, monkeypatch, tmp_path, assert_same_run
):
    dice, interrupted = np.random.default_rng(number), Counter()
    while interrupted.total() < 20 or not interrupted.keys() >= PHASES.keys():  # a quick one is hit seldom
        assert interrupted.total() < 60, "the moments were not spread over the run"
        with monkeypatch.context() as spoilt:
            within(spoilt, list(PHASES)[interrupted.total() % 3], dice, number, tmp_path / "hit")
            code, said = stop(bench)
        if code == 0:  # it had ended by then
            continue
        assert code == (143 if number == signal.SIGTERM else -number), said
        folder = unfinished(bench)
        interrupted[(tmp_path / "hit").read_text()] += 1
        assert bench.train(*OPTIONS).succeeded().folder == folder
        assert_same_run(folder, straight)
    print(f"interrupted in {interrupted}")
