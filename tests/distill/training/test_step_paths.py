"""A run's weights do not depend on how a step is computed: fp32, 20 steps, on a CPU."""

from functools import partial

import pytest
import torch
from compilers import needs_compiler
from drafter_checks import V, batch_of, random_texts
from torch.nn.attention import flex_attention as flex

from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.row_scores import Kernels
from distill.losses.weights import decay
from drafters import optional
from drafters.layers.unroll_attention import attend_unrolled
from drafters.layers.unroll_flex import attend_flex

STEPS = 20
WEIGHTS = partial(decay, rate=0.8)


def trained(target, drafter, objective, attend=attend_unrolled, fused=False) -> list[torch.Tensor]:
    """The drafter's weights after some steps of AdamW."""
    optional.attend_with(drafter.train(), attend)
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, 1e-3, betas=(0.9, 0.95), fused=fused)
    mask = torch.arange(40).expand(3, -1) > torch.tensor([[4], [9], [30]])
    for step in range(STEPS):
        batch = batch_of(target, random_texts(3, 40, seed=step), mask)
        total, _ = objective(drafter.unroll(batch, target), batch.last, target.head, drafter.aux_weights)
        (total / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "path", ["small chunks", "fused", "flex", pytest.param("compiled", marks=needs_compiler)]
)
@pytest.mark.parametrize("name", ["eagle3", "diffusion"])
@pytest.mark.ci("eagle3-fused", "eagle3-compiled", "diffusion-small chunks", "diffusion-flex")
def test_weights_are_those_of_the_plain_path(name, path, tiny_target, make_drafter, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # torch's kernel trains on CUDA only
    target = tiny_target(vocab=V, layers=4, hidden=16, positions=64, dtype=torch.float32)
    plain = Objective(kl, WEIGHTS)
    objective = {"small chunks": Objective(kl, WEIGHTS, 8), "compiled": Objective(kl, WEIGHTS, 0, Kernels())}
    attend = partial(attend_flex, attention=flex.flex_attention) if path == "flex" else attend_unrolled
    want = trained(target, make_drafter(name, target), plain)
    drafter = make_drafter(name, target)
    at_first = [weight.detach().clone() for weight in drafter.parameters()]
    got = trained(target, drafter, objective.get(path, plain), attend, path == "fused")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    pairs = zip(drafter.parameters(), at_first, strict=True)
    assert max(float((now - before).detach().abs().max()) for now, before in pairs) > 1e-3
