"""EAGLE read from the files of engines and of its authors, or refused in one line."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from eagles import CASES, SERVED, build, written
from faces import K, V, random_texts
from served_eagle import IDS
from workbench import same

from decode.errors import UserError
from decode.evaluation.replay import replay
from decode.evaluation.teacher_forced import Rollout
from decode.plan import Plan
from decode.sampling import Sampler
from drafters.checkpoint import io as checkpoint_io
from drafters.export.layout import Layout


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target and a drafter of a case."""
    return partial(build, tiny_target, make_drafter)


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
def test_an_export_that_is_read_back_scores_the_same(made, case, engine, tmp_path):
    target, drafter = made(case)
    back = checkpoint_io.load(folder_of(written(drafter, target, engine), tmp_path / "served"), target)
    assert type(back) is type(drafter)
    ours, theirs = drafter.state_dict(), back.state_dict()
    if theirs.keys() != ours.keys():  # an EAGLE without a bias, which SGLang's has
        assert engine == "sglang"
        assert not theirs.pop("fc.bias").any()
    assert theirs.keys() == ours.keys()
    assert written(back, target, engine).config.keys() == written(drafter, target, engine).config.keys()
    if list(drafter.taps) == list(back.taps):
        assert all(value.equal(ours[name]) for name, value in theirs.items())
        return
    assert sorted(drafter.taps) == list(back.taps)
    plans, rollouts = [Plan(depth=K), Plan(depth=K, width=3, nodes=8)], answers(target)
    taus = []
    for one in (drafter, back):
        target.tap(one.taps)
        taus.append([found.counts.tau for found in replay(target, one, rollouts, plans, Sampler(0.0))])
    assert taus[0] == pytest.approx(taus[1], abs=1e-9)


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
    back = checkpoint_io.load(folder, target)
    assert same(back.state_dict(), drafter.state_dict())
    options = CASES[case][1] | ({"taps": None} if case.startswith("eagle3") else {})
    fresh = make_drafter(CASES[case][0], target, seed=3, **options)
    assert checkpoint_io.warm_start(fresh, folder, target) == []
    assert same(fresh.state_dict(), drafter.state_dict())


def comes_back(layout, folder, drafter, target, **changed) -> bool:
    back = checkpoint_io.load(public(layout, folder, pickled=False, **changed), target)
    return same(back.state_dict(), drafter.state_dict())


def test_names_of_layers_and_prefixes_differ(made, tmp_path):
    target, drafter = made("eagle3")
    layout = written(drafter, target, "vllm")
    renamed = {f"model.{k.replace('midlayer.', 'layers.0.')}": v for k, v in layout.tensors.items()}
    renamed = {k.replace("model.lm_", "lm_").replace("model.d2", "d2"): v for k, v in renamed.items()}
    renamed.pop("model.t2d")
    assert comes_back(layout._replace(tensors=renamed), tmp_path / "x", drafter, target)


def test_a_head_that_is_not_there_is_the_targets(made, tmp_path):
    target, drafter = made("eagle3, every token")
    layout = written(drafter, target, "vllm")
    drafter.lm_head.weight.data.copy_(target.head.weight)
    none = dict.fromkeys(["lm_head.weight", "d2t", "t2d"])
    assert comes_back(layout, tmp_path / "x", drafter, target, **none)


def test_draft_ids_in_any_order_are_sorted_with_the_head(made, tmp_path):
    target, drafter = made("eagle3")
    layout = written(drafter, target, "vllm")
    order = torch.randperm(12)
    ids = (layout.tensors["d2t"] + torch.arange(12))[order]
    mixed = {"d2t": ids - torch.arange(12), "lm_head.weight": layout.tensors["lm_head.weight"][order]}
    assert comes_back(layout, tmp_path / "x", drafter, target, **mixed)


ONES = torch.ones(8)
BIASES = {f"layers.0.self_attn.{x}_proj.bias": torch.ones(8) for x in "qkv"}
FOREIGN = {
    "hidden_size is 32, the target's 16": ("eagle without", {"config": {"hidden_size": 32}}),
    "vocab_size is 99, the target's 40": ("eagle3", {"config": {"vocab_size": 99}}),
    "its embedding is not the target's": ("eagle3", {"embed_tokens.weight": torch.randn(V, 16)}),
    "target_hidden_size is 64": ("eagle3", {"config": {"target_hidden_size": 64}}),
    "hidden_act is gelu": ("eagle without", {"config": {"hidden_act": "gelu"}}),
    "no place .* layer.input_layernorm": (
        "eagle without",
        {"layers.0.input_layernorm.weight": torch.ones(16)},
    ),
    "no place .* layer.qkv_proj.bias": ("eagle without", BIASES),
    "no place .* layers.0.q_norm": ("eagle3", {"midlayer.self_attn.q_norm.weight": ONES}),
    "1 tensors are missing, norm.weight first": ("eagle3", {"norm.weight": None}),
    "d2t, which maps them, is missing": ("eagle3", {"d2t": None}),
    "d2t does not hold offsets": ("eagle3", {"d2t": torch.arange(12) * 3}),
    r"positions are scaled \(dynamic\)": ("eagle3", {"config": {"rope_scaling": {"type": "dynamic"}}}),
    "no EAGLE": ("eagle without", {"fc.weight": None}),
    "values entering layers": ("eagle3", {"config": {IDS: [2, 9, 40]}}),
    "last hidden state": ("eagle3", {"config": {"eagle_config": {"use_aux_hidden_state": False}}}),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_another_drafters_files_are_refused_in_one_line(made, message, tmp_path):
    case, more = FOREIGN[message]
    target, drafter = made(case)
    folder = public(written(drafter, target, "vllm"), tmp_path / "x", pickled=False, **more)
    with pytest.raises(UserError, match=message) as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)


HOSTILE = [
    *({"architectures": value} for value in (3, [])),
    *({"num_attention_heads": value} for value in (0, "four")),
    *({"num_hidden_layers": value} for value in ([1], 10**12)),
    {"rope_parameters": "spiral"},
    {"rope_parameters": {"rope_type": "yarn", "factor": "much"}},
    {"rope_parameters": {"rope_type": "llama3"}},
    {"rope_parameters": {"rope_theta": "far"}},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": -1}},
    {"eagle_config": [1]},
    *({IDS: value} for value in (7, ["last"])),
    {"hidden_size": None},
    {"intermediate_size": 10**15},
    {"rms_norm_eps": "small"},
]


@pytest.mark.parametrize("config", HOSTILE, ids=str)
@pytest.mark.parametrize("case", ["eagle without", "eagle3"])
def test_a_hostile_config_is_one_line(made, case, config, tmp_path):
    target, drafter = made(case)
    layout = written(drafter, target, "vllm")
    layout = layout._replace(config=layout.config | config)
    folder = folder_of(layout, tmp_path / "x")
    if case == "eagle without" and config.keys() & {"eagle_config", IDS}:
        checkpoint_io.load(folder, target)  # nothing that EAGLE-1 has
        return
    with pytest.raises(UserError) as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)


class Loud:
    """Tells whether it was unpickled."""

    made = False

    def __setstate__(self, state):
        Loud.made = True


PICKLED = {
    "code": {"fc.weight": Loud()},
    "a list": [torch.ones(2)],
    "a number": {"fc.weight": 3},
    "a number many times": {"fc.weight": torch.ones(1).expand(2**40)},
    "a shape": {"fc.weight": torch.ones(2, device="meta")},
    "junk": b"junk",
}


@pytest.mark.parametrize("content", PICKLED.values(), ids=PICKLED)
def test_a_pickled_file_gives_tensors_or_nothing(made, content, tmp_path):
    target, drafter = made("eagle without")
    folder = public(written(drafter, target, "vllm"), tmp_path / "x")
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: not a .*convert it to safetensors") as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)
    assert not Loud.made


NAMES = [3, "..", "", "../config.json", "a\0b", "config.json"]


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": ["model.safetensors"]}, *({"weight_map": {"fc.weight": name}} for name in NAMES)],
    ids=str,
)
def test_an_index_names_files_of_its_folder(made, index, tmp_path):
    target, drafter = made("eagle without")
    folder = public(written(drafter, target, "vllm"), tmp_path / "x", pickled=False)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"damaged|no file of this folder") as error:
        checkpoint_io.load(folder, target)
    assert "\n" not in str(error.value)
