"""The contract of drafters (tests/support/contract.py), for every one in conf/drafter; and on a GPU."""

from __future__ import annotations

import pytest
import torch
from contract import *  # noqa: F403
from faces import CHAIN, TREE, K, V, batch_of, random_texts

from decode.generation.generate import generate
from decode.model.target import Target
from decode.sampling import Sampler

DEVICE = "cuda"


@pytest.mark.gpu
def test_it_trains_and_decodes_where_the_target_is(tiny_target, make_drafter, drafter_name):
    here = tiny_target(vocab=V, layers=4, hidden=16)
    there = Target(tiny_target(vocab=V, layers=4, hidden=16).model.to(DEVICE))
    made = [make_drafter(drafter_name, target, depth=K).to(target.device) for target in (here, there)]
    made[1].load_state_dict(made[0].state_dict())
    prompts = random_texts(2, 6).tolist()
    for plan in (CHAIN, TREE):
        texts, emitted = [], []
        for target, drafter in zip((here, there), made, strict=True):
            verifier = drafter.verifier(target)
            run = generate(verifier, drafter, prompts, max_new_tokens=12, sampler=Sampler(0.0), plan=plan)
            texts.append([output.tokens for output in run.outputs])
            emitted.append([output.emitted for output in run.outputs])
        assert texts[0] == texts[1]
        assert emitted[0] == emitted[1]
    if made[1].trains:
        losses = []
        for target, drafter in zip((here, there), made, strict=True):
            steps = drafter.unroll(batch_of(target, random_texts().to(target.device)), target)
            loss = sum(step.head(step.hidden).log_softmax(-1)[:, 0].sum() for step in steps)
            loss.backward()
            losses.append(loss.detach().cpu())
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
