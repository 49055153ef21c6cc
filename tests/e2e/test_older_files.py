"""What was written at a0da26c, before the source moved into sub-packages, still loads."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from workbench import ROOT, make_target

from decode.generation.generate import generate
from decode.model.load import load_target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.report.compare import Choice, read, table
from distill.report.html import write
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


def test_a_run_is_compared_and_reported(tmp_path):
    run = shutil.copytree(RUN, tmp_path / "run", symlinks=True)
    text = table(read([str(run)]), Choice())
    assert "eagle" in text
    assert write(run, tmp_path / "report.html").stat().st_size > 1_000_000
