"""EAGLE in the files of vLLM and SGLang: loaded by their rules it is the same drafter."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import eagles
import pytest
import torch
from eagles import EAGLE3, SERVED, build, written
from faces import K, V
from served_eagle import IDS, Loaded, LoadError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from drafters.base import Text
from drafters.checkpoint import io as hub
from drafters.export.layout import Layout

YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 4}


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target and a drafter of a case."""
    return partial(build, tiny_target, make_drafter)


def loaded_by(layout: Layout, engine: str, target) -> Loaded:
    return Loaded(layout, engine, target.embed.weight, target.head.weight)


def difference(target, drafter, layout, engine, texts=100) -> float:
    return eagles.difference(target, drafter, loaded_by(layout, engine, target), texts)


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_an_engine_computes_the_drafters_logits(made, case, engine):
    target, drafter = made(case)
    layout = written(drafter, target, engine)
    assert difference(target, drafter, layout, engine) < 1e-5
    assert "embed_tokens.weight" not in layout.tensors
    assert layout.config["max_position_embeddings"] >= target.config.max_position_embeddings
    assert layout.config["torch_dtype"] == "float32"
    served = layout.command("T", "D")
    assert "T" in served.split()
    assert '"model": "D"' in served if engine == "vllm" else "D --speculative-num-steps" in served


def test_both_engines_load_the_same_files_of_an_eagle3(made):
    target, drafter = made("eagle3, other taps")
    one, other = (written(drafter, target, engine) for engine in ("vllm", "sglang"))
    assert one.config == other.config
    assert all(tensor.equal(other.tensors[name]) for name, tensor in one.tensors.items())
    assert one.serve != other.serve


def test_default_taps_go_unnamed_and_others_by_both_conventions(made):
    target, drafter = made("eagle3")
    assert drafter.taps == (2, 4, 5)
    assert not {IDS, "eagle_config"} & written(drafter, target, "vllm").config.keys()
    config = written(made("eagle3, other taps")[1], target, "vllm").config
    assert config[IDS] == [1, 3]
    assert config["eagle_config"][IDS] == [0, 2]


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_only_a_smaller_draft_vocabulary_is_mapped(made, case, engine):
    """vLLM 0.32 has no parameter for a map of the whole vocabulary and refuses to load one."""
    target, drafter = made(case)
    layout = written(drafter, target, engine)
    smaller = layout.config.get("draft_vocab_size", V) < V
    assert {"d2t", "t2d"} & layout.tensors.keys() == ({"d2t", "t2d"} if smaller else set())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_broken_export_is_caught(made, engine):
    """Each is what other trainers have shipped."""
    target, drafter = made("eagle3, other taps")
    layout = written(drafter, target, engine)
    assert difference(target, drafter, layout, engine, texts=2) < 1e-5

    def without(name):
        return layout._replace(tensors={k: v for k, v in layout.tensors.items() if k != name})

    broken = [without("d2t"), without("norm.weight"), without("midlayer.hidden_norm.weight")]
    for other in broken:
        with pytest.raises(LoadError, match=r"d2t is missing|stays random"):
            loaded_by(other, engine, target)
    ids = layout.tensors["d2t"] + torch.arange(12)
    absolute = layout._replace(tensors=layout.tensors | {"d2t": ids})
    with pytest.raises(AssertionError):  # out of the vocabulary, or other tokens
        difference(target, drafter, absolute, engine, texts=2)
    config = layout.config | {IDS: [2, 4], "eagle_config": {IDS: [1, 3]}}  # ours as outputs
    assert difference(target, drafter, layout._replace(config=config), engine, texts=2) > 1e-2
    swapped = layout.tensors["fc.weight"].unflatten(1, (2, -1)).flip(1).flatten(1)
    swapped = layout._replace(tensors=layout.tensors | {"fc.weight": swapped})
    assert difference(target, drafter, swapped, engine, texts=2) > 1e-2


def test_what_an_engine_does_not_load_is_not_loaded_here_either(made):
    """A map of the whole vocabulary (vLLM), one tap and a further layer's norm by vLLM's name (SGLang)."""
    target, drafter = made("eagle3, every token")
    layout = written(drafter, target, "vllm")
    maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    with pytest.raises(LoadError, match="draft_id_to_target_id"):
        loaded_by(layout._replace(tensors=layout.tensors | maps), "vllm", target)
    loaded_by(layout._replace(tensors=layout.tensors | maps), "sglang", target)
    for more, said in (({"taps": [3]}, "fc is left out"), ({"layers": 2}, "layers.1.input_layernorm")):
        target, drafter = made("eagle3", **more)
        layout = written(drafter, target, "vllm")
        loaded_by(layout, "vllm", target)
        with pytest.raises(LoadError, match=said):
            loaded_by(layout, "sglang", target)


def test_what_the_authors_code_passes_over_is_said(made):
    for case, more, said in (
        ("eagle3", {}, ""),
        ("eagle3.1", {}, "no fc_norm; the authors' code has no norm_output. to=authors"),
        ("eagle3, other taps", {}, r"drafter.taps=\[3, 1\]: the authors' are \[2, 4, 5\] always. to=authors"),
        ("eagle3", {"layers": 2}, "2 layers, of which the authors' code has one. to=authors"),
    ):
        target, drafter = made(case, **more)
        note = written(drafter, target, "vllm").note
        assert re.search(said, note) if said else not note


def test_scaled_positions_are_there_for_readers_of_any_version(made, tiny_target, make_drafter):
    target, _ = made("eagle3")
    target.config.rope_parameters = dict(YARN)
    drafter = make_drafter("eagle3", target, taps=None, **EAGLE3).requires_grad_(False)
    layout = written(drafter, target, "vllm")
    assert difference(target, drafter, layout, "vllm", texts=5) < 1e-5
    old = {k: v for k, v in layout.config.items() if k != "rope_parameters"}
    new = {k: v for k, v in layout.config.items() if k not in ("rope_scaling", "rope_theta")}
    one, other = (LlamaRotaryEmbedding(LlamaConfig(**config)) for config in (old, new))
    assert one.inv_freq.equal(other.inv_freq)
    assert one.attention_scaling == other.attention_scaling != 1.0
    plain = layout.config | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    assert difference(target, drafter, layout._replace(config=plain), "vllm", texts=5) > 1e-3


REFUSED = {
    "vLLM's EAGLE has none; train with drafter.bias=false, or set to=sglang or": (
        "eagle with a bias",
        {},
        "vllm",
    ),
    r"behind the final norm.*drafter.taps=\[1,7\]": ("eagle3", {"taps": [1, "last"]}, "vllm"),
    r"twice.*drafter.taps=\[1,7\], or set": ("eagle3", {"taps": [1, 1]}, "sglang"),
    "passes over norm_before_residual.*set to=vllm": ("eagle3", {"norm_before_residual": True}, "sglang"),
    "2 layers.*drafter.layers=1": ("eagle3", {"layers": 2}, "sglang"),
    r"tap 0 is the embedding.*drafter.taps=\[2,3\], or set to=vllm": (
        "eagle3",
        {"taps": [0, 2, 3]},
        "sglang",
    ),
    r"a single tap .*drafter.taps=\[3,7\], or set to=vllm": ("eagle3", {"taps": [3]}, "sglang"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_an_engine_cannot_express_is_refused(made, message):
    case, more, to = REFUSED[message]
    target, drafter = made(case, **more)
    with pytest.raises(UserError, match=message):
        written(drafter, target, to)


def test_a_target_that_scales_its_embeddings_is_refused(made):
    target, drafter = made("eagle without")
    target.embed.embed_scale = 4.0
    with pytest.raises(UserError, match="scales its embeddings"):
        written(drafter, target, "vllm")


def test_the_targets_head_is_shared_as_far_as_it_goes(made):
    target, drafter = made("eagle without")
    target.head = replace(target.head, scale=0.5, softcap=30.0)
    config = written(drafter, target, "sglang").config
    assert (config["logit_scale"], config["final_logit_softcapping"]) == (0.5, 30.0)
    target.head = replace(target.head, bias=torch.zeros(V))
    with pytest.raises(UserError, match="head has a bias"):
        written(drafter, target, "sglang")


def test_a_vocabulary_that_is_not_counted_is_refused(made):
    target, drafter = made("eagle3")
    target.model.config._name_or_path = target.model.name_or_path = "some/target"
    drafter.d2t.fill_(-1)
    for to in ("vllm", "speculators"):
        with pytest.raises(UserError, match="has not been counted"):
            written(drafter, target, to)


def test_a_confidence_head_stays_here(made):
    target, drafter = made("eagle without")
    drafter.add_confidence()
    layout = written(drafter, target, "vllm")
    assert not any("confidence" in name for name in layout.tensors)
    loaded_by(layout, "vllm", target)


@pytest.mark.parametrize(("name", "to"), [("eagle", "vllm"), ("medusa", "vllm"), ("dflash", "vllm")])
def test_tokens_that_are_not_drafted_here_are_by_an_engine(tiny_target, make_drafter, name, to):
    """All were trained: the file is that of the same drafter without a draft vocabulary."""
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    layouts = [
        written(make_drafter(name, target, depth=K, draft_vocab_size=size), target, to) for size in (None, 7)
    ]
    whole, reduced = (layout.tensors for layout in layouts)
    assert layouts[0].config == layouts[1].config
    assert whole.keys() == reduced.keys()
    assert all(value.equal(reduced[key]) for key, value in whole.items())


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_a_vocabulary_whose_size_was_chosen_is_written_as_any_other(
    tiny_target, make_drafter, name, to, monkeypatch
):
    monkeypatch.setattr("drafters.vocabulary.FEWEST", 1)
    monkeypatch.setattr("drafters.vocabulary.STEP", 1)
    monkeypatch.setattr("drafters.vocabulary.SPARED", 0.3)
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafter = make_drafter(name, target, depth=K, draft_vocab_size=V // 4)
    drafter.sizes_vocabulary = True
    drafter.fit([Text([1, 2, 2, 3], [1, 1, 1, 1])] * 20, target)
    size = len(drafter.d2t)
    assert size == drafter.settings["draft_vocab_size"] < V // 4
    layout = written(drafter, target, to)
    loaded_by(layout, to, target)
    if name == "eagle3":
        assert layout.config["draft_vocab_size"] == len(layout.tensors["lm_head.weight"]) == size


def test_sglang_is_told_which_tokens_to_draft(tiny_target, make_drafter, tmp_path):
    """Its `load_token_map` reads a list of ids with `weights_only`."""
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle", target, depth=K, draft_vocab_size=7)
    layout = written(drafter, target, "sglang")
    assert "d2t" not in layout.tensors
    layout.write(tmp_path)
    ids = torch.load(tmp_path / "token_map.pt", weights_only=True)  # noqa: TID251  (as SGLang reads it)
    assert ids == drafter.d2t.tolist()
    assert "--speculative-token-map /a/drafter/token_map.pt" in layout.command("t", "/a/drafter")


def test_a_bias_of_zeros_is_read_as_none(made, tmp_path):
    """SGLang's files have one for every EAGLE; vLLM has none."""
    target, drafter = made("eagle without")
    written(drafter, target, "sglang").write(tmp_path)
    back = hub.load(tmp_path, target)
    assert not back.settings["bias"]
    assert "fc.bias" not in written(back, target, "vllm").tensors
