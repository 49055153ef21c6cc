"""Other ways to the same step: the loss of every step is the same, through the command itself.

With SGD and without clipping, since Adam and clipping would hide a gradient of another scale, and a
learning rate that changes the loss from step to step by far more than the tolerance.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from workbench import ranks, train, weights

STEPS = 3

# All of a run is in fp64, where another order of sums changes the last of 16 digits. Weights are saved
# so; losses are logged in fp32, and may fall to either side of a rounding.
WEIGHTS, LOSSES = 1e-10, 3e-7
MEANS = "loss", "divergence_1", "top1_1", "alpha_1"
COMMAND = [
    "score.enabled=false",
    "taps=online",
    f"trainer.max_steps={STEPS}",
    f"score.every={STEPS}",
    "trainer.precision=64-true",
    "target.dtype=float64",
    "trainer.gradient_clip_val=null",
    "optimizer.optimizer._target_=torch.optim.SGD",
    "~optimizer.optimizer.betas",
    "optimizer.optimizer.lr=0.3",
    "optimizer.final_lr=1.0",
    "optimizer.warmup=0.0",
]
DRAFTERS = {
    # Its noise is drawn for a micro-batch as a whole, so other micro-batches have another.
    "eagle": ["drafter.feature_noise=0.0"],
    "medusa": [],  # its own heads train
    "lm": ["drafter.layers=1"],  # of the two that its target has
}
WAYS = {
    "processes": ["batch_size=4", "trainer=ddp", "trainer.devices=2"],
    "accumulation": ["batch_size=1", "trainer.accumulate_grad_batches=8"],
    "packing": ["packing=true"],
    "gradient checkpointing": ["gradient_checkpointing=true"],
    "hidden states kept": ["taps=memory"],
    "hidden states of some rows kept": ["taps=memory", "taps_gb=1e-5"],
}


@pytest.fixture(scope="module")
def trained(bench, logged):
    """Means by step that a run with these options logs, and its last weights; each made once."""

    @cache
    def run(drafter: str, *way: str) -> tuple[dict[str, dict[int, float]], dict[str, Tensor]]:
        quick = [option for option in bench.command if option != "drafter.depth=2" or drafter != "lm"]
        size = [] if any(option.startswith("batch_size=") for option in way) else ["batch_size=8"]
        argv = [*quick, f"drafter={drafter}", *COMMAND, *DRAFTERS[drafter], *size, *way]
        done = ranks(2, argv)[0] if "trainer.devices=2" in way else train(argv).succeeded()
        means = {name: logged(done.folder, f"train/{name}") for name in MEANS}
        return means, weights(done.folder / "checkpoints" / "last")

    return run


# Medusa has no layers to recompute, and refuses gradient checkpointing.
CASES = [(d, way) for d in DRAFTERS for way in WAYS if (d, way) != ("medusa", "gradient checkpointing")]


@pytest.mark.parametrize(("drafter", "way"), CASES)
@pytest.mark.ci("eagle-processes", "medusa-accumulation")
def test_steps_have_the_same_losses_and_end_with_the_same_weights(trained, drafter, way):
    (want, expected), (found, trained_to) = trained(drafter), trained(drafter, *WAYS[way])
    assert len(want["loss"]) == STEPS
    changes = [abs(a - b) for a, b in pairwise(want["loss"].values())]
    assert min(changes) > 1000 * LOSSES, "too alike to tell steps apart"
    for name in MEANS:
        assert found[name] == pytest.approx(want[name], rel=0, abs=LOSSES), name
    torch.testing.assert_close(trained_to, expected, rtol=0, atol=WEIGHTS)


def test_target_is_read_in_its_own_precision(bench, logged):
    """With a drafter under autocast, in the step or before it: the same losses."""
    precise = ["target.dtype=float32", "trainer.precision=bf16-mixed", "score.enabled=false"]
    runs = [bench.train(*precise, f"taps={taps}").succeeded().folder for taps in ("online", "memory")]
    first, other = (logged(run, "train/loss") for run in runs)
    assert first == pytest.approx(other, rel=1e-4)
