"""foredraft score control=shuffled_taps: the taps that a drafter reads, and the score."""

from __future__ import annotations

import json

import pytest
import torch
from workbench import foredraft

from decode.errors import UserError
from distill.scoring.tap_control import ShuffledTaps

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


def test_a_control_score_is_marked_and_still_lossless(bench, tmp_path):
    folder = bench.untrained_eagle()
    cards = []
    for control in ("none", "shuffled_taps"):
        out = tmp_path / f"{control}.json"
        done = score(bench, f"checkpoint={folder}", f"control={control}", f"out={out}").succeeded()
        assert ("control=shuffled_taps: no real score" in done.out) == (control != "none")
        cards.append(json.loads(out.read_text()))
    assert [card["control"] for card in cards] == ["none", "shuffled_taps"]
    assert all(card["audit_passed"] for card in cards)
    assert cards[0]["replay"]["tau"] != cards[1]["replay"]["tau"]
    score(bench, "checkpoint=/nowhere", "control=taps").refused("control=taps")
