"""A process that hangs in training ends, and so do those that wait for it; long declared work is no hang."""

import re
import time

import pytest
from workbench import Bench, Outcome, ranks

from distill.rollouts import store as rollouts
from distill.scoring.scorer import Scorer
from distill.training.module import DistillModule
from distill.utils.run_folder import checkpoints

MINUTES = 0.05  # 3 seconds
TWO = ["trainer=ddp", "trainer.devices=2", "score.every=2"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("watchdog"))
    assert bench.train("trainer.max_steps=1", "score.enabled=false").code == 0  # the rollouts, once
    return bench


def train(bench: Bench, *more: str, before=lambda rank: None) -> list[Outcome]:
    return ranks(2, [*bench.command, *TWO, f"timeout_minutes={MINUTES}", *more], before=before)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.ci("0")
def test_rank_that_hangs_ends_with_all_others(which, bench):
    """How the same command resumes where a rank was lost is in test_ranks.py."""
    step = DistillModule.training_step

    def hang(rank: int) -> None:
        def spoilt(self, batch, number):
            if rank == which and number == 3:
                time.sleep(600)
            return step(self, batch, number)

        DistillModule.training_step = spoilt

    begun = time.monotonic()
    done = train(bench, f"seed={which + 3}", "score.enabled=false", before=hang)
    assert time.monotonic() - begun < 60
    assert [d.code for d in done] == [1, 1], done
    for rank, one in enumerate(done):
        (line,) = one.err.splitlines()
        own = rf"error: rank {rank} has made no progress for 0\.05 minutes in step 4, at \w+ \(.+:\d+\)"
        lost = r"error: another process of this run has ended"
        assert re.match(own if rank == which else f"{own}|{lost}", line), line
        assert "checkpoints/2" in line
    assert "at spoilt (test_watchdog.py:" in done[which].err
    assert "timeout_minutes= gives more time" in done[which].err


def test_scores_of_rank_0_may_take_longer(bench):
    """The other rank waits in a collective meanwhile."""
    call = Scorer.__call__

    def slow(self, *args):
        time.sleep(2 * 60 * MINUTES)
        return call(self, *args)

    def patch(rank: int) -> None:
        Scorer.__call__ = slow

    done = train(bench, "seed=5", "trainer.max_steps=2", before=patch)
    assert [d.code for d in done] == [0, 0], done
    assert [c.name for c in checkpoints(done[0].folder)] == ["2"]


@pytest.mark.proof
def test_rollouts_of_a_later_phase_may_take_longer(bench, monkeypatch):
    opened, times = rollouts.RolloutStore.open, []

    def slow(self):
        times.append(self)
        if len(times) > 1:
            time.sleep(2 * 60 * MINUTES)
        opened(self)

    monkeypatch.setattr(rollouts.RolloutStore, "open", slow)
    options = ["rollout.refresh_every=3", "score.enabled=false", f"timeout_minutes={MINUTES}"]
    assert bench.fork(*options) == 0
