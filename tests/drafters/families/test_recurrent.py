"""The EAGLE family's later depths, which are trained on a sample of the places."""

from __future__ import annotations

import pytest
import torch
from faces import batch_of, both, random_texts

OPTIONS = {
    "lyanna": {"feature_noise": 0.0},
    "eagle3": {"depth_weight": 1.0},
    "eagle3 with less of later depths": {"depth_weight": 0.25},
    "p_eagle": {},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_later_depths_are_trained_on_some_places_that_stand_for_all(case, tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, case.split()[0], anchors=4, **OPTIONS[case])
    batch = batch_of(target, random_texts())

    def steps(seed):
        return list(drafter.train(seed is not None).unroll(batch._replace(seed=seed or 0), target))

    every, some, decay = steps(None), steps(3), OPTIONS[case].get("depth_weight", 1.0)
    states = {(s.depth, a): h for s in every for a, h in zip(s.anchor.tolist(), s.hidden, strict=True)}
    assert torch.equal(some[0].anchor, every[0].anchor)
    assert some[0].weight == 1
    for step, whole in zip(some[1:], every[1:], strict=True):
        assert step.weight == len(every[0].anchor) / 8 * decay ** (step.depth - 1)
        assert whole.weight == decay ** (step.depth - 1)
        assert set(step.anchor.tolist()) <= set(whole.anchor.tolist())
        assert len(step.anchor) in range(9 - step.depth, 9)  # a text's last places have fewer tokens
    for step in some:  # a place's states do not depend on which others are taken
        for anchor, hidden in zip(step.anchor.tolist(), step.hidden, strict=True):
            torch.testing.assert_close(hidden, states[step.depth, anchor], rtol=0, atol=1e-5)
    assert torch.equal(some[1].anchor, steps(3)[1].anchor)
    assert not torch.equal(some[1].anchor, steps(4)[1].anchor)


@pytest.mark.parametrize("name", ["lyanna", "eagle3", "p_eagle"])
def test_every_place_is_in_the_sample_of_some_seed(tiny_target, make_drafter, name):
    target, drafter = both(tiny_target, make_drafter, name, anchors=1, **OPTIONS[name])
    batch = batch_of(target, random_texts())
    taken = [
        set(list(drafter.train().unroll(batch._replace(seed=seed), target))[1].anchor.tolist())
        for seed in range(150)
    ]
    second = drafter.eval().unroll(batch, target)
    next(second)
    assert set.union(*taken) == set(next(second).anchor.tolist())
    assert not set.intersection(*taken)
