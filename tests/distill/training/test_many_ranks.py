"""Eight processes that are killed again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from workbench import Bench, Ranks, leftovers, ranks, same, weights

from distill.utils.run_folder import checkpoints

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]  # eight processes on a few cores
STEPS, KILLS = 12, 20


def options(bench: Bench, folder: Path) -> list[str]:
    sizes = ["batch_size=1", f"trainer.max_steps={STEPS}", "trainer.precision=32-true", "score.every=2"]
    launch = ["trainer=ddp", "trainer.devices=8", f"hydra.run.dir={folder}"]
    return [*bench.command, *sizes, *launch, "score.enabled=false", "taps=online"]


def one(pids: list[int], dice: random.Random) -> None:
    os.kill(dice.choice(pids), signal.SIGKILL)


def every(pids: list[int], dice: random.Random) -> None:
    for pid in dice.sample(pids, len(pids)):
        os.kill(pid, signal.SIGKILL)


def asked(pids: list[int], dice: random.Random) -> None:
    os.kill(dice.choice(pids), signal.SIGTERM)


def test_a_run_of_eight_that_is_killed_20_times_ends_with_the_same_bits(bench, tmp_path):
    """At random moments: one process, all of them, or a signal to one, which stops all at the same step."""
    begun = time.monotonic()
    done = ranks(8, options(bench, tmp_path / "straight"))
    assert [outcome.code for outcome in done] == [0] * 8, done
    whole = time.monotonic() - begun
    straight = weights(tmp_path / "straight" / "checkpoints" / str(STEPS))

    dice, kills, runs, resumed = random.Random(0), 0, 0, 0
    while kills < KILLS or resumed == 0:
        runs += 1
        assert runs <= 2 * KILLS, "kills come too late to prove anything"
        folder = tmp_path / f"killed-{runs}"
        while True:
            begun = time.monotonic()
            started = Ranks(8, options(bench, folder))
            resumed += bool(checkpoints(folder))
            time.sleep(dice.uniform(0.2, 0.9) * whole)
            alive = [pid for pid in started.pids if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"]
            if len(alive) == 8 and kills < KILLS:
                dice.choice([one, every, asked])(alive, dice)
                kills += 1
            if all(outcome.code == 0 for outcome in started.wait()):
                whole = min(whole, time.monotonic() - begun)
                break
        assert same(weights(folder / "checkpoints" / str(STEPS)), straight)
        assert not leftovers(folder)
    assert kills == KILLS
