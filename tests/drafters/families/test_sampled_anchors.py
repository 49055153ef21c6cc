"""Training takes a sample of the places, each of which stands for those that are left out."""

from __future__ import annotations

import pytest
import torch
from drafter_checks import V, batch_of, both, random_texts

# The EAGLE family and diffusion train their first depth, or root, on every place.
OPTIONS = {
    "lyanna": {"feature_noise": 0.0},
    "eagle3": {"depth_weight": 1.0},
    "eagle3 with less of later depths": {"depth_weight": 0.25},
    "p_eagle": {},
    "diffusion": {},
    "dflash": {},
    "hf_dllm": {},
    "prompt": {},
    "tidar": {},
}
OF_ALL_DEPTHS = ("dflash", "hf_dllm", "prompt", "tidar")


@pytest.mark.parametrize("case", OPTIONS)
def test_places_of_the_sample_stand_for_all(case, tiny_target, make_drafter):
    name = case.split()[0]
    target = tiny_target(vocab=V, layers=4, hidden=16)
    drafter = make_drafter(name, target, anchors=4, **OPTIONS[case])
    error = 1e-4 if name == "hf_dllm" else 1e-12  # transformers' norms compute in fp32
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, :6] = name not in OF_ALL_DEPTHS  # windows of the sample are padded otherwise
    batch = batch_of(target, random_texts(), mask)

    @torch.no_grad()
    def steps(seed):
        found = drafter.train(seed is not None).unroll(batch._replace(seed=seed or 0), target)
        return [step for step in found if step.depth]

    every, some, decay = steps(None), steps(3), OPTIONS[case].get("depth_weight", 1.0)
    states = {(s.depth, a): h for s in every for a, h in zip(s.anchor.tolist(), s.hidden, strict=True)}
    if name not in OF_ALL_DEPTHS:
        assert torch.equal(some[0].anchor, every[0].anchor)
        assert some.pop(0).weight == every.pop(0).weight == 1
    places = len({anchor for _, anchor in states})
    for step, whole in zip(some, every, strict=True):
        assert (step.weight / decay ** (step.depth - 1), step.training_only) == (places / 8, False)
        assert whole.weight == decay ** (step.depth - 1)
        assert set(step.anchor.tolist()) <= set(whole.anchor.tolist())
        assert len(step.anchor) in range(9 - step.depth, 9)  # a text's last places have fewer tokens
        for anchor, hidden in zip(step.anchor.tolist(), step.hidden, strict=True):
            torch.testing.assert_close(hidden, states[step.depth, anchor], rtol=0, atol=error)
    assert torch.equal(some[0].anchor, steps(3)[-len(some)].anchor)
    assert not torch.equal(some[0].anchor, steps(4)[-len(some)].anchor)


@pytest.mark.parametrize("name", ["lyanna", "eagle3", "p_eagle"])
def test_every_place_is_in_the_sample_of_some_seed(tiny_target, make_drafter, name):
    target, drafter = both(tiny_target, make_drafter, name, anchors=1, **OPTIONS[name])
    batch = batch_of(target, random_texts())
    taken = [
        set(list(drafter.train().unroll(batch._replace(seed=seed), target))[1].anchor.tolist())
        for seed in range(150)
    ]
    second = list(drafter.eval().unroll(batch, target))[1]
    assert set.union(*taken) == set(second.anchor.tolist())
    assert not set.intersection(*taken)
