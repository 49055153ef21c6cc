"""SIGTERM in training: saved first, left with 143, and gone on as if nothing had happened."""

import csv
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from workbench import Bench, final, fork, leftovers, same, tau

from distill.scoring import scorer as scoring
from distill.training import checkpointing as callbacks
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints
from drafters.checkpoint import atomic as files
from drafters.models.eagle import Eagle

OPTIONS = ["score.every=2", "trainer.accumulate_grad_batches=2"]


def noisy(monkeypatch) -> None:
    """A drafter that draws from the global generator, as dropout does."""
    unroll = Eagle.unroll

    def with_noise(self, *args):
        for step in unroll(self, *args):
            yield step._replace(hidden=step.hidden + 0.1 * torch.randn_like(step.hidden))

    monkeypatch.setattr(Eagle, "unroll", with_noise)


@pytest.fixture(scope="module")
def straight(bench) -> Path:
    """An undisturbed run: six steps of two micro-batches, a save point every two."""
    with_noise = pytest.MonkeyPatch()
    noisy(with_noise)
    done = bench.train(*OPTIONS)
    with_noise.undo()
    assert done.code == 0, done.err
    return done.folder


def send(monkeypatch, owner, name: str, when, number: int = signal.SIGTERM) -> None:
    """A signal to this process at the first call of `owner.name` for which `when` holds."""
    call, sent = getattr(owner, name), []

    def spoilt(*args, **options):
        if not sent and when(*args):
            sent.append(number)
            os.kill(os.getpid(), number)
        return call(*args, **options)

    monkeypatch.setattr(owner, name, spoilt)


def stop(bench: Bench, *more: str) -> tuple[int, str]:
    """Exit code of the command in a forked process, and what it left on stderr."""
    inside, outside = os.pipe()

    def body() -> int:
        done = bench.train(*more)
        os.write(outside, done.err.encode())
        return done.code

    status = fork(body)
    os.close(outside)
    with os.fdopen(inside) as said:
        return os.waitstatus_to_exitcode(status), said.read()


def in_a_step(monkeypatch):
    send(monkeypatch, DistillModule, "training_step", lambda _, batch, number: number == 4)


def between_micro_batches(monkeypatch):
    at = lambda _, batch, number: number == 5  # noqa: E731
    send(monkeypatch, DistillModule, "training_step", at, signal.SIGUSR1)


def in_a_save(monkeypatch):
    """And once more before it is whole."""
    send(monkeypatch, callbacks.hub, "save", lambda drafter, target, folder, *rest: folder.name == "4.tmp")
    send(monkeypatch, files, "sync", lambda path: "4.tmp" in path.parts)


def in_a_score(monkeypatch):
    send(monkeypatch, scoring.hub, "load", lambda folder, *_: folder.name == "4")


def in_the_last_score(monkeypatch):
    send(monkeypatch, scoring.hub, "load", lambda folder, *_: folder.name == "6")


# what is arranged, the signal, the step that the run stops at
MOMENTS = {
    "in a step": (in_a_step, "SIGTERM", 3),
    "between micro-batches": (between_micro_batches, "SIGUSR1", 3),
    "in a save": (in_a_save, "SIGTERM", 4),
    "in a score": (in_a_score, "SIGTERM", 4),
    "in the last score": (in_the_last_score, "SIGTERM", 6),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.ci("in a step")
def test_a_stopped_run_ends_as_if_nothing_had_happened(moment, bench, straight, monkeypatch):
    arrange, name, step = MOMENTS[moment]
    noisy(monkeypatch)
    with monkeypatch.context() as spoilt:
        arrange(spoilt)
        code, said = stop(bench, *OPTIONS)
    assert code == 143
    assert said == f"stopped by {name} at step {step}; the same command goes on from there\n"
    (folder,) = [p for p in bench.runs() if not (p / "done").exists()]
    there = [int(p.name) for p in checkpoints(folder)]
    assert there == sorted({*range(2, step, 2), step})
    assert (folder / "checkpoints" / "last").readlink() == Path(str(step))
    assert [p.name for p in checkpoints(folder) if (p / "score.json").exists()] == [
        str(s) for s in range(2, step, 2)
    ]
    done = bench.train(*OPTIONS).succeeded()
    assert done.folder == folder
    assert f"resuming from step {step}" in done.out
    as_undisturbed(folder, straight)
    assert logged(folder) == logged(straight)


def as_undisturbed(folder: Path, straight: Path) -> None:
    """The same weights, checkpoints and scores, and nothing else."""
    assert same(final(folder), final(straight))
    assert [p.name for p in checkpoints(folder)] == ["2", "4", "6"]
    for checkpoint in checkpoints(folder):
        assert tau(checkpoint) == tau(straight / "checkpoints" / checkpoint.name)
        assert (checkpoint / "trainer").exists() == (checkpoint.name != "2")
    assert (folder / "checkpoints" / "last").readlink() == Path("6")
    assert (folder / "checkpoints" / "best").exists()
    assert not leftovers(folder)


def logged(folder: Path) -> dict[str, str]:
    """The loss of every step, as it is written down."""
    found = {}
    for file in folder.glob("csv/**/metrics.csv"):
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row.get("train/loss")]
        found |= {row["step"]: row["train/loss"] for row in rows}
    return found


# -- random moments ------------------------------------------------------------------------------


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
def test_runs_interrupted_at_20_random_moments_end_as_if_nothing_had_happened(
    number, bench, straight, monkeypatch, tmp_path
):
    noisy(monkeypatch)
    dice, interrupted = np.random.default_rng(number), Counter()
    while interrupted.total() < 20 or not interrupted.keys() >= PHASES.keys():  # a quick one is hit seldom
        assert interrupted.total() < 60, "the moments were not spread over the run"
        with monkeypatch.context() as spoilt:
            within(spoilt, list(PHASES)[interrupted.total() % 3], dice, number, tmp_path / "hit")
            code, said = stop(bench, *OPTIONS)
        if code == 0:  # it had ended by then
            continue
        assert code == (143 if number == signal.SIGTERM else -number), said
        (folder,) = [p for p in bench.runs() if not (p / "done").exists()]
        interrupted[(tmp_path / "hit").read_text()] += 1
        done = bench.train(*OPTIONS).succeeded()
        assert done.folder == folder
        as_undisturbed(folder, straight)
    print(f"interrupted in {interrupted}")


# -- the end of a disk ---------------------------------------------------------------------------


@pytest.mark.proof
def test_a_disk_that_is_full_when_a_run_is_stopped_costs_no_checkpoint(bench, straight, monkeypatch):
    noisy(monkeypatch)
    save = callbacks.hub.save

    def full(drafter, target, folder, *rest):
        if folder.name == "3.tmp":
            raise OSError(28, "No space left on device", str(folder))
        save(drafter, target, folder, *rest)

    with monkeypatch.context() as spoilt:
        in_a_step(spoilt)
        spoilt.setattr(callbacks.hub, "save", full)
        code, said = stop(bench, *OPTIONS)
    assert code == 1
    assert re.match(r"error: No space left on device \(\S+/3\): the disk at /\S* has", said)
    done = bench.train(*OPTIONS)
    assert "resuming from step 2" in done.out
    as_undisturbed(done.folder, straight)
