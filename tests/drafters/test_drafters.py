"""The contract of drafters (tests/support/contract.py), what they refuse, and every one on a GPU."""

from __future__ import annotations

import pytest
import torch
from contract import *  # noqa: F403
from drafter_checks import CHAIN, TREE, K, V, batch_of, random_texts

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.target import Target
from decode.plan import Plan
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


REUSE = {"mode": "tree_merge", "nodes": 3, "weight": 0.25, "least": 1, "tokens": 0.0, "drawn": True}
LORA = {"r": 2, "alpha": 4}
REFUSED = {
    "bigram": [{"successors": 0}, {"prior": 0.0}],
    "boosted": [{"first_weight": 1.5}, {"hit_weight": 1.5}],
    "cascade": [{"second_length": 0}, {"first_depth": 0}],
    "diffusion": [{"layers": 0}, {"layers": 1}, {"steps": 0}, {"anchors": -1}, {"taps": []}],
    "dspark": [{"markov_rank": 0}],
    "eagle": [{"start": "second"}],
    "eagle3": [
        *({"taps": []}, {"taps": None}, {"layers": 0}, {"draft_vocab_size": 0}, {"anchors": -1}),
        *({"depth_weight": 0.0}, {"rate": 0.0}, {"fc_norm": True, "norm_before_fc": True}),
    ],
    "hf_dllm": [{"depth": 0}, {"anchors": 0}, {"steps": 0}, {"steps": 4}, {"shift": 2}, {"prefix": "both"}],
    "hydra": [{"depth": 0}, {"layers": 0}],
    "lookahead": [{"columns": 0}, {"ngram": 1}, {"pool": -1}],
    "lyanna": [
        *({"root_token": "all"}, {"drafted_states": "none"}, {"layers": 0}, {"warmup": 1.0}),
        {"token_info": "full"},
        *(
            {"reuse": REUSE | change}
            for change in ({"nodes": 0}, {"least": 0}, {"weight": 0.0}, {"mode": "all"})
        ),
    ],
    "medusa": [{"depth": 0}, {"layers": 0}],
    "medusa2": [
        *({"heads": 0}, {"lora_lr": -1}, {"warmup": 1.0}, {"warmup": -0.1}),
        *({"lora": LORA | {"targets": [name]}} for name in ("lm_head", "nowhere", "embed_tokens")),
        {"lora": LORA | {"targets": ["q_proj", "lm_head"]}},
    ],
    "mlp": [{"depth": 0}, {"inner_size": -3}],
    "ngram": [{"min_n": 0, "max_n": 3}, {"min_n": 3, "max_n": 2}],
    "prism": [{"modules": order} for order in ([], [1, 0], [0, 2], [0, -1], [0, 0, 0, 1])],
    "prompt": [{"depth": 0}, {"ensemble": 0}, {"anchors": -1}],
    "recycle": [{"candidates": 0}, {"own_weight": 1.0}, {"own_weight": 0.0}, {"decay": 1.1}],
    "skip": [
        *({"cost": 0.0}, {"cost": 1.5}, {"sublayers": "bb"}, {"sublayers": "b-x-"}, {"sublayers": "----"}),
        *({"layers": 4}, {"sublayers": "bbbb", "layers": 2}, {"sublayers": None, "layers": 2, "exit": "mlp"}),
        *({"sublayers": None, "exit": "linear"}, {"sublayers": "b-b-", "exit": "linear"}),
    ],
    "sparse": [{"sinks": -1}, {"places": -1}, {"queries": 0}, {"queries": 4}, {"refresh": 7}],
    "suffix": [
        *({"longest": -1}, {"own_weight": -1}, {"escape": -1}),
        *({"min_probability": -1}, {"max_tokens": -1}, {"store_weight": -1}),
    ],
    "tidar": [{"depth": 0}, {"ensemble": 0}, {"anchors": -1}],
    "union": [{"second_alone": -1}, {"first_depth": 0}, {"first_weight": 1.5}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, cases in REFUSED.items() for options in cases], ids=str
)
def test_option_out_of_range_is_refused(tiny_target, make_drafter, name, options):
    target = tiny_target(vocab=V, layers=4, hidden=16)
    with pytest.raises(UserError) as error:
        make_drafter(name, target, **options)
    option, value = list(options.items())[-1]
    assert (option if isinstance(value, dict | bool | None) else f"{option}={value}") in str(error.value)
    assert "\n" not in str(error.value)


ENDING = ("p_eagle", "medusa", "medusa2", "hydra", "mlp", "lstm", "diffusion", "dflash", "dspark", "hf_dllm")


@pytest.mark.parametrize("name", [*ENDING, "prompt", "tidar"])
def test_plan_deeper_than_the_trained_predictions_is_refused(tiny_target, make_drafter, name):
    drafter = make_drafter(name, tiny_target(vocab=V, layers=4, hidden=16), depth=2)
    drafter.check(Plan(2))
    with pytest.raises(UserError, match=r"this drafter predicts 2 tokens; set decode\.depth=2"):
        drafter.check(Plan(3))
