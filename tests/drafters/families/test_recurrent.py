"""The base of the EAGLE family: later depths that are trained on a sample of the places."""

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


@pytest.fixture(params=OPTIONS)
def unrolled(request, tiny_target, make_drafter):
    """Its unrolls over two texts: of all places, and of four of each for the seed of a batch."""
    name, options = request.param.split()[0], OPTIONS[request.param]
    target, drafter = both(tiny_target, make_drafter, name, anchors=4, **options)
    batch = batch_of(target, random_texts())

    def steps(seed):
        return list(drafter.train(seed is not None).unroll(batch._replace(seed=seed or 0), target))

    return steps, options.get("depth_weight", 1.0)


def test_later_depths_are_trained_on_some_places_that_stand_for_all(unrolled):
    unroll, decay = unrolled
    every, some = unroll(None), unroll(3)
    assert torch.equal(some[0].anchor, every[0].anchor)
    assert some[0].weight == 1
    for step, whole in zip(some[1:], every[1:], strict=True):
        assert step.weight == len(every[0].anchor) / 8 * decay ** (step.depth - 1)
        assert whole.weight == decay ** (step.depth - 1)
        assert set(step.anchor.tolist()) <= set(whole.anchor.tolist())
        assert len(step.anchor) in range(9 - step.depth, 9)  # a text's last places have fewer tokens
    assert torch.equal(some[1].anchor, unroll(3)[1].anchor)
    assert not torch.equal(some[1].anchor, unroll(4)[1].anchor)


def test_a_places_states_do_not_depend_on_which_others_are_taken(unrolled):
    unroll, _ = unrolled
    alone = {(s.depth, a): h for s in unroll(None) for a, h in zip(s.anchor.tolist(), s.hidden, strict=True)}
    for step in unroll(3):
        for anchor, hidden in zip(step.anchor.tolist(), step.hidden, strict=True):
            torch.testing.assert_close(hidden, alone[step.depth, anchor], rtol=0, atol=1e-5)


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
