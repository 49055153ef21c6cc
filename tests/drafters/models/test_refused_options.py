"""Options of drafters that are out of range are refused in one line that names the option."""

from __future__ import annotations

import pytest
from faces import V

from decode.errors import UserError

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
