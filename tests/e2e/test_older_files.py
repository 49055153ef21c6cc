"""A checkpoint of commit a0da26c loads; a scorecard of that commit is named as older."""

import pytest
import torch
from safetensors.torch import load_file
from workbench import ROOT, foredraft, make_target

from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint.io import load
from drafters.models.eagle import Eagle

RUN = ROOT / "tests" / "fixtures" / "run_a0da26c"


@pytest.mark.parametrize("step", ["3", "6"])
def test_a_checkpoint_loads_to_the_last_bit_and_drafts(step, tmp_path):
    target = load_target(str(make_target(tmp_path / "target")))
    drafter = load(RUN / "checkpoints" / step, target)
    assert type(drafter) is Eagle
    weights = load_file(RUN / "checkpoints" / step / "model.safetensors")
    state = drafter.state_dict()
    assert weights.keys() == state.keys()
    assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in weights.items())
    target.tap(drafter.taps)
    plan, prompt = Plan(depth=2), [1, 60, 61, 2]
    options = {"max_new_tokens": 12, "sampler": Sampler(), "plan": plan}
    drafted, plain = (generate(target, d, [prompt], **options) for d in (drafter, None))
    assert drafted.outputs[0].tokens == plain.outputs[0].tokens
    assert drafted.outputs[0].drafted


def test_an_older_scorecard_is_named_in_one_line():
    done = foredraft("compare", str(RUN))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "a scorecard of version 3" in done.err
