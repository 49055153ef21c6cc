"""Scores: two scorecards compared, a checkpoint that is scored again, a control of its taps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cards import card_of, row_of
from compared import FAST, SLOW, TOKENS, row, timing
from workbench import foredraft

from decode.errors import UserError
from decode.evaluation.scorecard import Training
from distill.scoring.compare import earlier
from distill.scoring.paired import (
    MIN_SAMPLES,
    Estimate,
    speedup,
    speedup_ratio,
    tau_difference,
    why_incomparable,
)
from distill.scoring.tap_control import ShuffledTaps


def timed(value, columns, **more):
    """A row that was measured by batch."""
    return row_of(row(FAST, speedup=value, timing=columns, **more))


def noisy(speed, seed, batches=40):
    """A row whose batches differ in length and in speed, on a machine whose mood both decoders share."""
    random = np.random.default_rng(seed)
    tokens = random.integers(30, 90, batches)
    plain = 0.01 * tokens * random.uniform(0.5, 2.0, batches)  # the machine's mood
    mine = plain / speed * random.normal(1, 0.05, batches)
    columns = {"tokens": tokens, "seconds": mine, "plain_tokens": tokens, "plain_seconds": plain}
    value = plain.sum() / mine.sum()
    return timed(float(value), {name: column.tolist() for name, column in columns.items()})


def test_speedup_intervals_cover_19_of_20():
    """And is narrow: the machine's mood, a factor of four, is in both times."""
    found = [speedup(noisy(1.3, seed)).interval for seed in range(60)]
    assert 51 <= sum(low <= 1.3 <= high for low, high in found) <= 60
    assert found[0][1] - found[0][0] < 0.08


def test_equal_drafters_are_as_fast_as_each_other():
    one = noisy(1.3, 1)
    assert speedup_ratio(one, one) == Estimate(1.0, (1.0, 1.0))
    low, high = speedup_ratio(one, noisy(1.0, 1)).interval
    assert low == pytest.approx(1.3) == high, "the same noise in both"


def test_too_few_batches_have_no_interval():
    enough = timing(1.5, 1.5, 1.5, 1.5, 1.5)
    assert speedup(timed(1.5, enough)).interval is not None
    few = {name: column[: MIN_SAMPLES - 1] for name, column in enough.items()}
    one = timed(1.5, few)
    assert speedup(one) == speedup_ratio(one, timed(1.0, few)) == Estimate(1.5, None)
    short = slice(MIN_SAMPLES - 1)
    fast, slow = (row_of(row(rounds[short], tokens=TOKENS[short])) for rounds in (FAST, SLOW))
    assert tau_difference(fast, slow).interval is None


def test_scores_of_other_answers_or_dtypes_are_incomparable():
    columns = timing(1.5, 1.5, 1.5, 1.5, 1.5)
    one, other = (timed(1.5, columns | more) for more in ({}, {"plain_tokens": [30, 40, 50, 60, 71]}))
    card, float32 = card_of(), card_of(dtype="float32")
    assert why_incomparable(card, one, card, one) == ""
    assert why_incomparable(card, one, card, other) == "other answers"
    assert why_incomparable(float32, one, card, one) == "other dtype"


def test_step_and_training_time_are_known_from_folder_and_card(tmp_path):
    folder = tmp_path / "800"
    folder.mkdir()
    (tmp_path / "best").symlink_to("800")
    assert earlier(tmp_path / "best") == Training(800)
    known = {"train_seconds": 61.5, "train_cpu_seconds": 60.5, "train_precision": "32-true", "tau": 2.0}
    (folder / "score.json").write_text(json.dumps({"step": 800, **known}))
    assert earlier(tmp_path / "best") == Training(800, 61.5, 60.5, "32-true")
    (tmp_path / "scorecard.json").write_text(json.dumps({"step": 400, "train_seconds": 7.0}))  # exported
    assert earlier(tmp_path) == Training(400, 7.0)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": "far", "train_seconds": null, "train_precision": 1}'])
def test_damaged_card_is_ignored(tmp_path, text):
    (tmp_path / "score.json").write_text(text)
    assert earlier(tmp_path) == Training()


PROMPTS = [[5, 9, 2, 7], [4, 3, 3, 8, 1], [6, 6]]


def score(bench, *more: str):
    argv = [f"target={bench.target}", f"prompts={bench.heldout}", f"answers={bench.root / 'heldout'}", *more]
    small = ["score.prompts=3", "score.replay_prompts=4", "score.max_new_tokens=12", "decode=chain"]
    small += ["decode.proposal=sampled", "score.temperatures=[1]"]  # its replay is never the same by chance
    return foredraft("score", *argv, *small)


def test_every_tap_comes_from_another_position(tiny_target):
    target = tiny_target(vocab=23, layers=4, hidden=16)
    target.tap((1, "last"))
    tokens = torch.randint(23, (2, 20), generator=torch.Generator().manual_seed(0))
    real = target.read(tokens)
    known = torch.cat([target.read(torch.tensor([p])).taps[0] for p in PROMPTS])
    ShuffledTaps(target, PROMPTS, 0)
    shown = target.read(tokens)
    assert torch.equal(shown.last, real.last), "the verifier sees its own"
    assert shown.taps.shape == real.taps.shape
    places = [next(i for i, k in enumerate(known) if torch.equal(k, t)) for t in shown.taps.flatten(0, 1)]
    assert len(set(places)) > 6, "of the 11 there are"
    assert torch.equal(target.read(tokens).taps, shown.taps), "a function of the taps and the seed"
    assert torch.equal(target.read(tokens[:1, :5]).taps, shown.taps[:1, :5]), "each by itself"
    ShuffledTaps(target, PROMPTS, 1)
    assert not torch.equal(target.read(tokens).taps, shown.taps)
    target.tap(())
    with pytest.raises(UserError, match="reads none of the target's hidden states"):
        ShuffledTaps(target, PROMPTS, 0)


def test_control_score_is_marked_and_still_lossless(bench, tmp_path):
    folder = bench.untrained_eagle()
    cards = []
    for control in ("none", "shuffled_taps"):
        out = tmp_path / f"{control}.json"
        done = score(bench, f"checkpoint={folder}", f"control={control}", f"out={out}").succeeded()
        assert ("control=shuffled_taps: no real score" in done.out) == (control != "none")
        cards.append(json.loads(out.read_text()))
    assert [card["control"] for card in cards] == ["none", "shuffled_taps"]
    assert all(card["audit_passed"] for card in cards)
    assert cards[0]["rows"][0]["replay"]["tau"] != cards[1]["rows"][0]["replay"]["tau"]
    score(bench, "checkpoint=/nowhere", "control=taps").refused("control=taps")
