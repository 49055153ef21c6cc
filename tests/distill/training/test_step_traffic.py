"""A training step waits for the device as often as decoding's rounds do: one upload each, no read."""

from functools import partial

import pytest
import torch
from device_traffic import READ, SYNCHRONISATION, UPLOAD, Traffic

from distill.losses.divergences import kl
from distill.losses.objective import Objective
from distill.losses.weights import Streak, decay
from drafters.base import Batch

WEIGHTS = {"decay": partial(decay, rate=0.8), "streak": Streak(0.5, 0.0)}

# Of models that transformers runs: it looks for packed texts
READS = {"lm": 1, "cascade": 1, "medusa2": 1}
# Of a second unroll, of a tuned target's own rows, of prompts
MORE_UPLOADS = {"boosted": 1, "medusa2": 1, "prompt": 1, "tidar": 2}


def batch_of(target, device) -> Batch:
    """Two texts, whose answers begin and end at different places; the mask is on the host."""
    texts = torch.randint(target.vocab_size, (2, 24), device=device)
    place = torch.arange(24)
    mask = torch.stack([(place > 3) & (place < 20), (place > 8) & (place < 23)])
    read = target.read(texts)
    return Batch(texts, mask, read.taps, read.last)


def traffic_of_step(target, drafter, weights) -> dict[str, dict[str, int]]:
    """Call sites with their counts, by kind: unroll, objective and backward of one step."""
    objective = Objective(kl, weights, 8)
    list(drafter.unroll(batch_of(target, "cpu"), target))  # makes what all steps share
    with Traffic() as traffic:
        batch = batch_of(target, "cuda")
        traffic.take()
        steps = list(drafter.unroll(batch, target))
        total, _ = objective(steps, batch.last, target.head, drafter.aux_weights_at(1.0), tokens=batch.tokens)
        total.backward()
        sites = traffic.take()
    assert len(steps) > 0
    return {
        kind: {site: n for (k, site), n in sites.items() if k == kind}
        for kind in (UPLOAD, READ, SYNCHRONISATION)
    }


@pytest.mark.parametrize("weights", list(WEIGHTS))
@pytest.mark.states
def test_step_of_every_drafter_reads_nothing(tiny_target, make_drafter, drafter_name, weights):
    target = tiny_target(vocab=24, layers=4, hidden=16, positions=64)
    drafter = make_drafter(drafter_name, target)
    if not drafter.trains:
        pytest.skip("has no training step")
    counts = traffic_of_step(target, drafter.train(), WEIGHTS[weights])
    assert sum(counts[UPLOAD].values()) <= 2 + MORE_UPLOADS.get(drafter_name, 0), counts
    assert sum(counts[READ].values()) == READS.get(drafter_name, 0), counts
    assert not counts[SYNCHRONISATION], counts
