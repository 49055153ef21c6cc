"""A run ends when its acceptance falls beyond noise, and a resumed one ends there too."""

import pytest
from cards import card_of, replay, row
from workbench import Bench

from decode.evaluation.replay import Counts
from decode.evaluation.scorecard import read_scorecard
from distill.training import early_end
from distill.training.early_end import worse
from distill.utils.run_folder import checkpoints

OPTIONS = ["score.every=2", "trainer.max_steps=20", "score.patience=2", "score.early_prompts=1"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("early"))


def test_run_ends_after_save_points_that_are_worse(bench, monkeypatch):
    monkeypatch.setattr(early_end, "worse", lambda card, best: card.checkpoint.step > 6)
    done = bench.train(*OPTIONS).succeeded()
    names = [int(path.name) for path in checkpoints(done.folder)]
    best = int((done.folder / "checkpoints" / "best").readlink().name)
    newest = names[-1]
    assert newest < 20
    assert newest == max(best, 6) + 4, "two save points in a row after the best one"
    assert f"ended at step {newest}: tau of the last 2 save points is below that of step {best}" in done.out
    prompts = [
        read_scorecard(done.folder / "checkpoints" / name / "score.json").conditions.prompts
        for name in ("best", str(newest))
    ]
    assert prompts[0] > prompts[1] == 1, "the best is scored in full"


def test_run_without_falling_acceptance_goes_on(bench, monkeypatch):
    monkeypatch.setattr(early_end, "worse", lambda card, best: False)
    done = bench.train(*OPTIONS, "trainer.max_steps=8").succeeded()
    assert [int(path.name) for path in checkpoints(done.folder)][-1] == 8


@pytest.mark.proof
def test_run_that_was_killed_at_its_end_ends_there(bench, monkeypatch):
    """The decision is made again from the scorecards."""
    monkeypatch.setattr(early_end, "worse", lambda card, best: card.checkpoint.step > 6)
    options = [*OPTIONS, "seed=5"]

    def killed(self, trainer, step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(early_end.EarlyEnd, "_end", killed)
        assert bench.train(*options).code == 130
    before = {path.name for path in checkpoints(bench.runs()[-1])}
    done = bench.train(*options).succeeded()
    assert {path.name for path in checkpoints(done.folder)} == before


def scored(*rounds):
    """A scorecard of answers of 24 tokens each, by their rounds."""
    every = list(rounds) if len(rounds) > 1 else list(rounds) * 24
    return card_of([row(0.0, replay=replay(2.0, Counts([24] * len(every), [float(r) for r in every])))])


@pytest.mark.parametrize(("rounds", "is_worse"), [(12, True), (10, False), (8, False)])
def test_worse_is_beyond_noise_on_the_same_answers(rounds, is_worse):
    assert worse(scored(rounds), scored(10)) == is_worse


def test_noise_is_not_worse():
    assert not worse(scored(*[12, 10.1] * 12), scored(*[10, 12] * 12))
