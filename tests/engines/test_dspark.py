"""vLLM drafts with an exported DSpark what our decoder drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_process import ask_script

from decode.generation.generate import generate
from decode.generation.types import Round
from decode.plan import Plan
from decode.sampling import Sampler
from distill.scoring.served import figures
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats

RUN = Path(__file__).parents[1] / "support" / "vllm_interpreted.py"
V, D, K, TOKENS = 64, 64, 4, 20
PROMPTS = [[1, 2, 3, 5, 8, 13], [40, 30, 20]]


@pytest.fixture
def target(random_llama):
    """A Llama whose next token depends on the last one only; what its layers pass on is random."""
    return random_llama(V, D, layers=0.02, rest=0.3)


@pytest.fixture
def drafter(target, make_drafter, one_k_norm):
    """Its bias names the target's next token, its block's random states say something else as loudly."""
    made = one_k_norm(make_drafter("dspark", target, depth=K, taps=[2, 4], markov_rank=V, seed=1))
    made.info.emb.weight.data = torch.eye(V)
    follows = target.head(target.read(torch.arange(V)[:, None]).last)[:, 0].argmax(-1)
    made.info.out.weight.data = 3.0 * torch.nn.functional.one_hot(follows, V).T.float()
    return made.requires_grad_(False)


def counted(target, drafter) -> tuple[list[list[int]], int, list[int]]:
    """Answers, rounds and tokens accepted at each position, by our decoder.

    As vLLM counts: all that the last round accepts, also what the end of the answer cuts off.
    """
    kept, answers = [], []
    for prompt in PROMPTS:
        rounds: list[Round] = []
        options = {"max_new_tokens": TOKENS, "sampler": Sampler(0.0), "plan": Plan(depth=K)}
        (output,) = generate(target, drafter, [prompt], on_round=rounds.append, **options).outputs
        answers.append(output.tokens)
        kept += [int(one.result.accepted) for one in rounds[1:]]  # the first is the prefill
    return answers, len(kept), [sum(count > position for count in kept) for position in range(K)]


@pytest.mark.engine
@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("anchor", [True, False], ids=["root predicts", "masks predict"])
def test_vllm_accepts_of_an_export_what_we_accept(
    vllm_python, target, drafter, engine_row, tmp_path, to, anchor
):
    drafter.root_predicts = drafter.settings["sample_from_anchor"] = anchor
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, to)
    (tmp_path / "draft").mkdir()
    layout.write(tmp_path / "draft")
    speculative = {"method": "dspark", "model": str(tmp_path / "draft"), "num_speculative_tokens": K}
    theirs = ask_script(vllm_python, RUN, tmp_path / "target", speculative, PROMPTS, TOKENS)
    answers, rounds, accepted = counted(target, drafter)
    counts = accepted, theirs["num_accepted_tokens_per_pos"]
    shares = [figures([count / rounds for count in each]) for each in counts]
    equal = f"{sum(map(list.__eq__, theirs['answers'], answers))} of {len(answers)} equal"
    kind = "the root predicts" if anchor else "masks predict"
    engine_row(f"DSpark, random, {kind}", to, "vllm 0.32.0, second runner, interpreted", equal, *shares)
    assert theirs["answers"] == answers
    assert theirs["num_drafts"] == rounds
    assert theirs["num_accepted_tokens_per_pos"] == accepted
    assert 0 < accepted[1] < accepted[0] < rounds
