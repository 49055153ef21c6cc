"""A refused export says why and what to change, and the change helps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from drafter_checks import V
from transformers import GPT2Config, GPT2LMHeadModel

from decode.errors import UserError
from decode.model.target import LAST
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.models.ngram import Ngram
from drafters.models.union import Union
from drafters.registry import short_name

EAGLE3 = {"taps": None, "fc_norm": False}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}


def scaled(target):
    """As Gemma's."""
    target.embed.embed_scale = 4.0


def biased(target):
    target.head = replace(target.head, bias=torch.zeros(V))


def nameless(target):
    target.model.config._name_or_path = target.model.name_or_path = ""


def case(name, options, change=lambda target: None, layers=8, window=None, rope=None, **said):
    """A drafter, its settings, its target, and what every program says that has to refuse it."""
    return name, options, change, {"layers": layers, "window": window}, rope, said


REFUSED = {
    "taps of a small target": case("eagle3", {"taps": [2, LAST]}, layers=4),
    "only the head's input": case("eagle3", {"taps": [LAST]}),
    "the head's input": case("eagle3", {"taps": [1, LAST]}, vllm="after the final norm"),
    "the head's input of three": case(
        "eagle3", EAGLE3 | {"taps": [2, 4, LAST]}, speculators="final norm", gguf="final norm", authors="taps"
    ),
    "a tap three times": case("eagle3", {"taps": [2, 2, 2]}, layers=5, sglang="twice"),
    "a tap twice": case("eagle3", {"taps": [2, 4, 4]}, speculators="twice", sglang="twice"),
    "the embedding": case("eagle3", {"taps": [0, LAST]}),
    "the embedding of three": case("eagle3", {"taps": [0, 2, 3]}, sglang="0 is the embedding"),
    "a single tap": case("eagle3", {"taps": [3]}, sglang="a single tap"),
    "two taps": case("eagle3", EAGLE3 | {"taps": [2, 5]}, gguf="exactly 3 layers"),
    "four taps": case("eagle3", EAGLE3 | {"taps": [1, 2, 4, 7]}, gguf="exactly 3 layers"),
    "other taps": case("eagle3", EAGLE3 | {"taps": [3, 1]}, authors=r"always reads \[2, 4, 5\]"),
    "two layers of one tap": case("eagle3", {"taps": [0], "layers": 2}),
    "two layers": case(
        "eagle3", EAGLE3 | {"layers": 2}, sglang="2 layers", authors="2 layers", gguf="2 layers"
    ),
    "a norm of each tap": case("eagle3", {"taps": None}, gguf="no fc_norm", authors="no fc_norm"),
    "a norm of all taps": case("eagle3", EAGLE3 | {"norm_before_fc": True}, authors="no norm_before_fc"),
    "a final norm": case(
        "eagle3", EAGLE3 | {"norm_output": True}, authors="no norm_output", gguf="feeds back"
    ),
    "a norm before the residual": case(
        "eagle3", {"taps": None, "norm_before_residual": True}, sglang="norm_before_residual"
    ),
    "norms of queries and keys": case(
        "eagle3", EAGLE3 | {"qk_norm": True}, sglang="no norms of", authors="no norms of", gguf="no norms of"
    ),
    "biases": case(
        "eagle3", EAGLE3 | {"qkv_bias": True}, sglang="no biases", authors="no biases", gguf="no biases"
    ),
    "a bias of the output, and norms": case(
        "eagle3", EAGLE3 | {"qk_norm": True, "o_bias": True}, vllm="no o_bias", speculators="no o_bias"
    ),
    "a bias of the output": case("eagle", {"o_bias": True}, authors="no bias of attention's output"),
    "everything at once": case(
        "eagle3", {"taps": [0, 3, 3, LAST], "layers": 2, "norm_before_residual": True}
    ),
    "layers of which none is left": case("eagle3", {"taps": [0, LAST]}, layers=1),
    "a window of one place": case("eagle3", {"window": 1, "taps": [2, 4, 5]}, sglang="drafter.window=2"),
    "eagle3 of Gemma": case("eagle3", {"taps": [1, 2]}, scaled, vllm="scales its embeddings"),
    "eagle3 of Mistral": case("eagle3", EAGLE3, window=32, authors="the target is a Mistral"),
    "eagle3 of a window": case(
        "eagle3", {"taps": [2, 4]}, window=6, speculators=r"the target's, of 6; train with drafter\.window=6"
    ),
    "eagle3 without a target's name": case("eagle3", EAGLE3, nameless, speculators="built in memory"),
    "eagle3 of yarn": case(
        "eagle3", EAGLE3, rope={"rope_type": "yarn", "factor": 4.0}, authors="yarn, base 10000"
    ),
    "eagle3 of a part": case("eagle3", EAGLE3, rope=PARTIAL, authors="a part of each", gguf="rotate a part"),
    "p_eagle": case("p_eagle", {"taps": [1, LAST], "fc_norm": False}),
    "p_eagle of one tap": case("p_eagle", {"taps": [3, 3]}),
    "p_eagle of one tap behind a norm": case("p_eagle", {"taps": [3]}),
    "p_eagle with sinks": case(
        "p_eagle", {"window": 8, "sinks": 2, "fc_norm": False}, speculators="drafter.sinks=0"
    ),
    "dflash": case("dflash", {"taps": [0, LAST]}),
    "dflash of the embedding": case("dflash", {"taps": [0, 4]}, vllm=r"embedding; .*drafter\.taps=\[4\]"),
    "dflash of one layer": case("dflash", {"taps": [0, LAST]}, layers=1),
    "dflash of a head with a bias": case("dflash", {"taps": [2, 4]}, biased),
    "dflash of a window": case("dflash", {"taps": [2, 4]}, window=6, vllm="drafter.window=6"),
    "dflash with sinks": case(
        "dflash", {"taps": [2, 4], "window": 8, "sinks": 2}, vllm="attention sinks", sglang="attention sinks"
    ),
    "a causal dflash": case(
        "dflash",
        {"taps": [2, 4], "causal": True},
        speculators="drafter.causal=false",
        transformers="bidirectional",
    ),
    "dflash with a window": case("dflash", {"taps": [2, 4], "window": 8}, transformers="other edges"),
    "dflash of a part": case("dflash", {"taps": [2, 4]}, rope=PARTIAL, transformers="whole heads"),
    "dflash of llama3": case(
        "dflash",
        {"taps": [2, 4]},
        rope={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        gguf="llama3 scaling",
    ),
    "dspark of a window": case("dspark", {"taps": [2, 4], "window": 8}, gguf="untested"),
    "dspark": case("dspark", {"taps": [0, LAST], "sample_from_anchor": False, "draft_vocab_size": 5}),
    "dspark of Gemma": case("dspark", {"taps": [1, 2]}, scaled),
    "diffusion": case("diffusion", {}, vllm="drafter=dflash"),
    "diffusion of Gemma": case("diffusion", {}, scaled),
    "eagle": case("eagle", {"bias": True}, vllm="drafter.bias=false"),
    "eagle of Gemma": case("eagle", {"bias": True}, scaled, sglang="scales its embeddings"),
    "eagle of a head with a bias": case("eagle", {"bias": False}, biased, sglang="head has a bias"),
    "eagle of a window": case("eagle", {}, window=6, vllm="drafter.window=6"),
    "eagle with sinks": case(
        "eagle", {"window": 8, "sinks": 1}, sglang="reads the text; .*drafter.window=null"
    ),
    "eagle of another base": case(
        "eagle", {}, rope={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}, authors="base 100000"
    ),
    "medusa": case(
        "medusa", {"token_info": "gated"}, sglang="no format", vllm="no token_info", authors="token_info"
    ),
    "medusa of two layers": case("medusa", {"layers": 2}, authors="2 layers per head"),
    "medusa of a head with a bias": case("medusa", {"token_info": "gated"}, biased, vllm="head has a bias"),
    "medusa of Gemma": case("medusa", {}, scaled),
    "medusa without a target's name": case("medusa", {}, nameless, authors="built in memory"),
    "medusa2": case("medusa2", {}, authors="the tuned target"),
    "hydra": case("hydra", {}, vllm="no engine takes this drafter"),
    "lstm": case("lstm", {}, vllm="ArcticInference"),
    "bigram": case("bigram", {}, vllm="no engine takes this drafter"),
    "ngram": case(
        "ngram",
        {},
        vllm='lookup of its own.*"method": "ngram"',
        sglang="algorithm NGRAM",
        transformers="prompt_lookup",
    ),
    "suffix": case("suffix", {}, vllm='"method": "suffix"', sglang="to=native"),
    "lyanna": case("lyanna", {}, speculators="to=native"),
    "hf_dllm": case("hf_dllm", {}, vllm="to=hf or native"),
}


def refusal(drafter, target, to) -> str:
    """What `check` says without weights; it is what the export says with them."""
    said = []
    for attempt in (
        lambda: formats.check(short_name(drafter), drafter.settings, target, to),
        lambda: formats.write_layout(checkpoint_io.as_saved(drafter), target, to),
    ):
        try:
            attempt()
            said.append("")
        except UserError as error:
            said.append(str(error))
    before, after = said
    assert before == after
    return before


def suggested(text) -> dict:
    """Settings to train with."""
    changes = re.findall(r"drafter\.(\w+)=(\S+?)(?=,? |$|; )", text.partition("train with ")[2])
    return {key: yaml.safe_load(value) for key, value in changes}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_refusal_suggests_is_accepted(name, tiny_target, make_drafter):
    name, options, change, shape, rope, said = REFUSED[name]
    target = tiny_target(vocab=V, hidden=16, dtype=torch.float32, **shape)
    target.model.config._name_or_path = target.model.name_or_path = "some/target"
    if rope:
        target.config.rope_parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 32} | rope
    drafter = make_drafter(name, target, **options)
    change(target)
    accepting = formats.accepting(short_name(drafter), drafter.settings, target)
    found = {to: refusal(drafter, target, to) for to in formats.FORMATS if to != "hf"}
    assert any(found.values())
    assert [to for to, text in found.items() if not text] == [to for to in accepting if to != "hf"]
    for to, words in said.items():
        assert re.search(f"^to={to}: .*{words}", found[to]), found[to]
    for to, text in found.items():
        if not text:
            continue
        assert re.search(r"set to=[\w ]*native$", text)
        others = re.findall(r"\w+", text.partition("set to=")[2])
        assert [word for word in others if word not in ("or", "native")] == accepting
        if changed := suggested(text):
            assert refusal(make_drafter(name, target, **options | changed), target, to) == ""
        elif other := re.search(r"train drafter=(\w+)", text):
            assert refusal(make_drafter(other[1], target), target, to) == ""
        else:
            assert not (name == "p_eagle" and to == "speculators")
            own = "of its own" in text  # the engine has the method itself
            assert own or accepting or "no engine takes this drafter" in text


def test_options_of_the_first_of_two_drafters_are_named_as_such(tiny_target, make_drafter):
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    union = Union(make_drafter("eagle3", target, taps=None), Ngram(1, 3))
    with pytest.raises(UserError, match=r"train with drafter\.first\.fc_norm=false drafter\.first\.norm"):
        formats.check("union", union.settings, target, "gguf")


def test_a_small_target_is_told_taps_that_engines_take(tiny_target, make_drafter):
    for layers in range(1, 9):
        target = tiny_target(vocab=V, layers=layers, hidden=16, dtype=torch.float32)
        taps = None
        if layers < 7:
            with pytest.raises(UserError, match="engines have no last") as error:
                make_drafter("eagle3", target, taps=None)
            taps = yaml.safe_load(re.search(r"drafter\.taps=(\[.*\]);", str(error.value))[1])
        drafter = make_drafter("eagle3", target, **EAGLE3 | {"taps": taps})
        accepting = formats.accepting("eagle3", drafter.settings, target)
        assert "vllm" in accepting
        assert ("sglang" in accepting) is (layers > 2)
        assert ("authors" in accepting) is (layers >= 7)


def test_a_vocabulary_in_further_weights_is_found_without_weights(
    tiny_target, make_drafter, tmp_path, monkeypatch
):
    monkeypatch.setattr("drafters.models.lm.check_vocabulary", lambda *_: None)
    target = tiny_target(vocab=V, layers=2, hidden=16, dtype=torch.float32)
    config = GPT2Config(vocab_size=V + 3, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "draft")
    drafter = make_drafter("lm", target, path=str(tmp_path / "draft"), lora={"r": 2, "alpha": 4})
    assert formats.accepting("lm", drafter.settings, target) == ["vllm", "sglang", "transformers", "hf"]
    monkeypatch.setattr("drafters.export.hf_model._resized", lambda *_: {})
    assert formats.accepting("lm", drafter.settings, target) == ["hf"]
    with pytest.raises(UserError, match=r"more than an embedding and a head.*; set to=hf or native"):
        formats.check("lm", drafter.settings, target, "vllm")
