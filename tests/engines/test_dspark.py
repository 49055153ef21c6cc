"""vLLM drafts with an exported DSpark what our decoder drafts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as hub
from drafters.export import formats as table

RUN = Path(__file__).parents[1] / "support" / "vllm_interpreted.py"
V, D, K, TOKENS = 64, 64, 4, 20
PROMPTS = [[1, 2, 3, 5, 8, 13], [40, 30, 20]]


@pytest.fixture
def target(random_llama):
    """A Llama whose next token follows from the last one alone; what its layers pass on is random."""
    return random_llama(V, D, layers=0.02, rest=0.3)


@pytest.fixture
def drafter(target, make_drafter):
    """Its bias names the target's next token, its block's random states say something else as loudly."""
    made = make_drafter("dspark", target, depth=K, taps=[2, 4], markov_rank=V, seed=1)
    # vLLM 0.32.0 on a CPU norms the context's keys of all layers with the first one's weights.
    for layer in made.stack:
        layer.k_norm.weight.data = made.stack[0].k_norm.weight.data.clone()
    made.info.emb.weight.data = torch.eye(V)
    follows = target.head(target.read(torch.arange(V)[:, None]).last)[:, 0].argmax(-1)
    made.info.out.weight.data = 3.0 * torch.nn.functional.one_hot(follows, V).T.float()
    return made.requires_grad_(False)


def counted(target, drafter) -> tuple[list[list[int]], int, list[int]]:
    """Answers, rounds and tokens accepted at each position, by our decoder."""
    plan, accepted, rounds, answers = Plan(depth=K), [0] * K, 0, []
    for prompt in PROMPTS:
        sampler = Sampler(0.0)
        (output,) = generate(
            target, drafter, [prompt], max_new_tokens=TOKENS, sampler=sampler, plan=plan
        ).outputs
        answers.append(output.tokens)
        rounds += len(output.emitted)
        for emitted in output.emitted:
            for position in range(emitted - 1):
                accepted[position] += 1
    return answers, rounds, accepted


@pytest.mark.engine
@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("anchor", [True, False], ids=["root predicts", "masks predict"])
def test_vllm_accepts_of_an_export_what_we_accept(vllm_python, target, drafter, tmp_path, to, anchor):
    drafter.root_predicts = drafter.settings["sample_from_anchor"] = anchor
    layout = table.write_layout(hub.as_saved(drafter), target, to)
    (tmp_path / "draft").mkdir()
    layout.write(tmp_path / "draft")
    speculative = {"method": "dspark", "model": str(tmp_path / "draft"), "num_speculative_tokens": K}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(vllm_python, RUN, tmp_path / "target"),
            *(json.dumps(speculative), json.dumps(PROMPTS), str(TOKENS)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert not done.returncode, done.stderr[-2000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    answers, rounds, accepted = counted(target, drafter)
    assert theirs["answers"] == answers
    assert theirs["num_drafts"] == rounds
    assert theirs["num_accepted_tokens_per_pos"] == accepted
    assert 0 < accepted[1] < accepted[0] < rounds
