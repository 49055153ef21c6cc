"""EAGLE in the files of vLLM and SGLang: loaded by their rules it is the same drafter, and it comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from faces import K, V, random_texts
from loaders_eagle import IDS, Loaded, LoadError, drafted
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.plan import Plan
from decode.replay import replay
from decode.sampling import Sampler
from decode.starts import Rollout
from drafters import hub
from drafters.base import Batch
from drafters.export import table
from drafters.export.layout import Layout

EAGLE3 = {"fc_norm": False, "draft_vocab_size": 12}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 4}
# name: drafter, options, engines
CASES = {
    "eagle with a bias": ("eagle", {}, ["sglang"]),
    "eagle without": ("eagle", {"bias": False}, ["vllm", "sglang"]),
    "hass": ("hass", {"bias": False}, ["vllm", "sglang"]),
    "eagle3": ("eagle3", EAGLE3, ["vllm", "sglang"]),
    "eagle3, every token": ("eagle3", EAGLE3 | {"draft_vocab_size": V}, ["vllm", "sglang"]),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}, ["vllm", "sglang"]),
    "eagle3, other taps": ("eagle3", EAGLE3 | {"taps": [3, 1]}, ["vllm", "sglang"]),
    "eagle3, five taps": ("eagle3", {"fc_norm": True, "taps": [4, 2, 1, 0, 6]}, ["vllm"]),
    "eagle3 of two layers, gpt-oss": (
        "eagle3",
        EAGLE3 | {"layers": 2, "norm_before_fc": True, "norm_before_residual": True},
        ["vllm"],
    ),
}
SERVED = [(case, engine) for case, (_, _, engines) in CASES.items() for engine in engines]


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target of eight layers and a drafter of a case; default taps are 2, 4 and 5."""

    def make(case, **more):
        name, options, _ = CASES[case]
        target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
        options = ({"taps": None} if name == "eagle3" else {}) | options | more
        drafter = make_drafter(name, target, depth=K, **options)
        return target, drafter.requires_grad_(False)

    return make


def loaded_by(layout: Layout, engine: str, target) -> Loaded:
    return Loaded(layout, engine, target.embed.weight, target.head.weight)


@torch.no_grad()
def difference(target, drafter, layout, engine, texts=100) -> float:
    """Largest between logits of the drafter's training face and of what the engine has loaded."""
    tokens = random_texts(texts, 9)
    theirs = drafted(loaded_by(layout, engine, target), target.model, tokens, K)
    target.tap(drafter.taps)
    read, worst = target.read(tokens), 0.0
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), read.taps, read.last)
    for step in drafter.unroll(batch, target):
        own = step.head(step.hidden)
        ours = own
        if step.head.d2t is not None:
            ours = own.new_full((len(own), V), -torch.inf).index_copy_(1, step.head.d2t, own)
        row, anchor = step.anchor // tokens.shape[1], step.anchor % tokens.shape[1]
        other = torch.stack([theirs[int(a), step.depth][r] for r, a in zip(row, anchor, strict=True)])
        assert ours.isfinite().equal(other.isfinite())
        worst = max(worst, float((ours - other)[ours.isfinite()].abs().max()))
    return worst


def written(drafter, target, to) -> Layout:
    return table.written(hub.opened(drafter), target, to)


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_an_engine_computes_the_drafters_logits(made, case, engine):
    target, drafter = made(case)
    layout = written(drafter, target, engine)
    assert difference(target, drafter, layout, engine) < 1e-5
    assert "embed_tokens.weight" not in layout.tensors
    assert layout.config["max_position_embeddings"] >= target.config.max_position_embeddings
    assert layout.config["torch_dtype"] == "float32"
    served = layout.serve.format(target="T", drafter="D")
    assert {"T", "D"} <= set(served.split())


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
    "vLLM's EAGLE has none; set to=sglang.*drafter.bias=false": ("eagle with a bias", {}, "vllm"),
    "never `last`; train with drafter.taps of numbers": ("eagle3", {"taps": [1, "last"]}, "vllm"),
    "has one twice": ("eagle3", {"taps": [1, 1]}, "sglang"),
    "does not know norm_before_residual.*set to=vllm": ("eagle3", {"norm_before_residual": True}, "sglang"),
    "does not know norm_before_fc": ("eagle3", {"norm_before_fc": True}, "sglang"),
    "2 layers.*drafter.layers=1": ("eagle3", {"layers": 2}, "sglang"),
    "cannot tap the embedding": ("eagle3", {"taps": [0, 3]}, "sglang"),
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
    drafter.d2t.fill_(-1)
    with pytest.raises(UserError, match="has not been counted"):
        written(drafter, target, "vllm")


def test_a_confidence_head_stays_here(made):
    target, drafter = made("eagle without")
    drafter.add_confidence()
    layout = written(drafter, target, "vllm")
    assert not any("confidence" in name for name in layout.tensors)
    loaded_by(layout, "vllm", target)


def test_a_bias_of_zeros_is_none(made):
    target, drafter = made("eagle with a bias")
    drafter.fc.bias.zero_()
    assert "fc.bias" not in written(drafter, target, "vllm").tensors


# -- and back ----------------------------------------------------------------------------------


def folder_of(layout: Layout, path):
    path.mkdir()
    layout.write(path)
    return path


def answers(target, texts=4, tokens=8) -> list[Rollout]:
    """What the target writes by itself."""
    found = random_texts(texts, 6)
    with torch.no_grad():
        for _ in range(tokens):
            found = torch.cat([found, target.head(target.read(found).last[:, -1:]).argmax(-1)], 1)
    return [Rollout(row[:6], row[6:]) for row in found.tolist()]


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_exported_and_imported_it_scores_the_same(made, case, engine, tmp_path):
    target, drafter = made(case)
    back = hub.load(folder_of(written(drafter, target, engine), tmp_path / "served"), target)
    assert type(back) is type(drafter)
    ours, theirs = drafter.state_dict(), back.state_dict()
    if theirs.keys() != ours.keys():  # an EAGLE without a bias, which SGLang's has
        assert engine == "sglang"
        assert not theirs.pop("fc.bias").any()
    if list(drafter.taps) == list(back.taps):
        assert all(value.equal(ours[name]) for name, value in theirs.items())
    else:
        assert sorted(drafter.taps) == list(back.taps)
    assert theirs.keys() == ours.keys()
    plans, rollouts = [Plan(depth=K), Plan(depth=K, width=3, nodes=8)], answers(target)
    taus = []
    for one in (drafter, back):
        target.tap(one.taps)
        taus.append([found.counts.tau for found in replay(target, one, rollouts, plans, Sampler(0.0))])
    assert taus[0] == pytest.approx(taus[1], abs=1e-9)
    assert written(back, target, engine).config.keys() == written(drafter, target, engine).config.keys()


def public(layout: Layout, folder, pickled=True, config=None, **tensors):
    """Files as the authors of EAGLE have them."""
    drop = ("rope_parameters", "head_dim", "bias", "attention_bias", "mlp_bias", *EXTRA)
    config = {k: v for k, v in layout.config.items() if k not in drop} | (config or {})
    config["architectures"] = ["LlamaForCausalLM"]
    found = {k: v for k, v in (layout.tensors | tensors).items() if v is not None}
    folder.mkdir()
    if pickled:
        torch.save(found, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
    else:
        Layout(config, found).write(folder)
    return folder


EXTRA = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize("case", ["eagle with a bias", "eagle without", "eagle3", "eagle3, every token"])
def test_the_authors_files_are_read(made, case, tmp_path, make_drafter):
    """Pickled, with the target's embedding in half precision, and less in config.json."""
    target, drafter = made(case)
    layout = written(drafter, target, "vllm" if case == "eagle without" else "sglang")
    embedding = {"embed_tokens.weight": target.embed.weight.half()}
    folder = public(layout, tmp_path / "public", **embedding)
    back = hub.load(folder, target)
    assert all(value.equal(back.state_dict()[name]) for name, value in drafter.state_dict().items())
    options = CASES[case][1] | ({"taps": None} if case.startswith("eagle3") else {})
    fresh = make_drafter(CASES[case][0], target, seed=3, **options)
    assert hub.warm_start(fresh, folder, target) == []
    assert all(value.equal(fresh.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_names_of_layers_and_prefixes_differ(made, tmp_path):
    target, drafter = made("eagle3")
    layout = written(drafter, target, "vllm")
    renamed = {f"model.{k.replace('midlayer.', 'layers.0.')}": v for k, v in layout.tensors.items()}
    renamed = {k.replace("model.lm_", "lm_").replace("model.d2", "d2"): v for k, v in renamed.items()}
    renamed.pop("model.t2d")
    back = hub.load(public(layout._replace(tensors=renamed), tmp_path / "x", pickled=False), target)
    assert all(value.equal(back.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_a_head_that_is_not_there_is_the_targets(made, tmp_path):
    target, drafter = made("eagle3, every token")
    layout = written(drafter, target, "vllm")
    less = {k: v for k, v in layout.tensors.items() if k not in ("lm_head.weight", "d2t", "t2d")}
    back = hub.load(public(layout._replace(tensors=less), tmp_path / "x", pickled=False), target)
    assert back.state_dict()["lm_head.weight"].equal(target.head.weight)


def test_draft_ids_in_any_order_are_sorted_with_the_head(made, tmp_path):
    target, drafter = made("eagle3")
    layout = written(drafter, target, "vllm")
    order = torch.randperm(12)
    ids = (layout.tensors["d2t"] + torch.arange(12))[order]
    mixed = {"d2t": ids - torch.arange(12), "lm_head.weight": layout.tensors["lm_head.weight"][order]}
    back = hub.load(public(layout, tmp_path / "x", pickled=False, **mixed), target)
    assert all(value.equal(back.state_dict()[name]) for name, value in drafter.state_dict().items())


FOREIGN = {
    "hidden_size is 32, the target's 16": ("eagle without", {"config": {"hidden_size": 32}}),
    "vocab_size is 99, the target's 40": ("eagle3", {"config": {"vocab_size": 99}}),
    "its embedding is not the target's": ("eagle3", {"embed_tokens.weight": torch.randn(V, 16)}),
    "target_hidden_size is 64": ("eagle3", {"config": {"target_hidden_size": 64}}),
    "hidden_act is gelu": ("eagle without", {"config": {"hidden_act": "gelu"}}),
    "layer.input_layernorm.weight has no place": (
        "eagle without",
        {"layers.0.input_layernorm.weight": torch.ones(16)},
    ),
    "layer.qkv_proj.bias has no place": (
        "eagle without",
        {f"layers.0.self_attn.{x}_proj.bias": torch.ones(8) for x in "qkv"},
    ),
    "q_norm.weight has no place": ("eagle3", {"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
    "norm.weight is missing": ("eagle3", {"norm.weight": None}),
    "d2t, which tells them, is missing": ("eagle3", {"d2t": None}),
    "d2t is no list of offsets": ("eagle3", {"d2t": torch.arange(12) * 3}),
    "no EAGLE": ("eagle without", {"fc.weight": None}),
    "taps layers": ("eagle3", {"config": {IDS: [2, 9, 40]}}),
    "last hidden state alone": ("eagle3", {"config": {"eagle_config": {"use_aux_hidden_state": False}}}),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_another_drafters_files_are_refused_in_one_line(made, message, tmp_path):
    case, more = FOREIGN[message]
    target, drafter = made(case)
    folder = public(written(drafter, target, "vllm"), tmp_path / "x", pickled=False, **more)
    with pytest.raises(UserError, match=message) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": 3},
        {"architectures": []},
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"num_hidden_layers": [1]},
        {"rope_parameters": "spiral"},
        {"rope_parameters": {"rope_type": "yarn", "factor": "much"}},
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_theta": "far"}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": -1}},
        {"eagle_config": [1]},
        {IDS: 7},
        {IDS: ["last"]},
        {"hidden_size": None},
        {"intermediate_size": 10**15},
        {"rms_norm_eps": "small"},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["eagle without", "eagle3"])
def test_a_hostile_config_is_one_line(made, case, config, tmp_path):
    target, drafter = made(case)
    layout = written(drafter, target, "vllm")
    layout = layout._replace(config=layout.config | config)
    folder = folder_of(layout, tmp_path / "x")
    if case == "eagle without" and config.keys() & {"eagle_config", IDS}:
        hub.load(folder, target)  # nothing that EAGLE-1 has
        return
    with pytest.raises(UserError) as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)


class Loud:
    """Says that it was made."""

    made = False

    def __setstate__(self, state):
        Loud.made = True


@pytest.mark.parametrize("content", [{"fc.weight": Loud()}, [torch.ones(2)], {"fc.weight": 3}, b"junk"])
def test_a_pickled_file_gives_tensors_or_nothing(made, content, tmp_path):
    target, drafter = made("eagle without")
    folder = public(written(drafter, target, "vllm"), tmp_path / "x")
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model|damaged") as error:
        hub.load(folder, target)
    assert "\n" not in str(error.value)
    assert not Loud.made
