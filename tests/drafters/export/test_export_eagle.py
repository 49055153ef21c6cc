"""EAGLE in the files of vLLM, SGLang and its authors: loaded by their rules, and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from drafter_checks import K, V, random_texts
from eagles import CASES, EAGLE3, SERVED, build, difference, written
from served_authors import Authored
from served_eagle import IDS, Loaded
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from workbench import same

from decode.errors import UserError
from decode.evaluation.replay import replay
from decode.evaluation.teacher_forced import Rollout
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from drafters import vocabulary
from drafters.base import Text
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats
from drafters.export.layout import Layout

YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 4}


@pytest.fixture
def made(tiny_target, make_drafter):
    """Makes a target and a drafter of a case."""
    return partial(build, tiny_target, make_drafter)


def loaded_by(layout: Layout, engine: str, target) -> Loaded:
    return Loaded(layout, engine, target.embed.weight, target.head.weight)


@pytest.mark.parametrize(("case", "engine"), SERVED)
def test_an_engine_computes_the_drafters_logits(made, case, engine):
    target, drafter = made(case)
    layout = written(drafter, target, engine)
    assert difference(target, drafter, loaded_by(layout, engine, target)) < 1e-5
    # vLLM 0.32 has no parameter for a map of the whole vocabulary and refuses to load one.
    smaller = layout.config.get("draft_vocab_size", V) < V
    maps = {"d2t", "t2d"} if smaller else set()
    assert {"d2t", "t2d", "embed_tokens.weight"} & layout.tensors.keys() == maps
    assert layout.config["max_position_embeddings"] >= target.config.max_position_embeddings
    assert layout.config["torch_dtype"] == "float32"
    served = layout.command("T", "D")
    assert "T" in served.split()
    assert '"model": "D"' in served if engine == "vllm" else "D --speculative-num-steps" in served


def test_scaled_positions_are_there_for_readers_of_any_version(made, tiny_target, make_drafter):
    target, _ = made("eagle3")
    target.config.rope_parameters = dict(YARN)
    drafter = make_drafter("eagle3", target, taps=None, **EAGLE3).requires_grad_(False)
    layout = written(drafter, target, "vllm")
    assert difference(target, drafter, loaded_by(layout, "vllm", target), texts=5) < 1e-5
    old = {k: v for k, v in layout.config.items() if k != "rope_parameters"}
    new = {k: v for k, v in layout.config.items() if k not in ("rope_scaling", "rope_theta")}
    one, other = (LlamaRotaryEmbedding(LlamaConfig(**config)) for config in (old, new))
    assert one.inv_freq.equal(other.inv_freq)
    assert one.attention_scaling == other.attention_scaling != 1.0
    plain = layout.config | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    assert (
        difference(target, drafter, loaded_by(layout._replace(config=plain), "vllm", target), texts=5) > 1e-3
    )


def test_the_targets_head_is_shared_as_far_as_it_goes(made):
    target, drafter = made("eagle without")
    target.head = replace(target.head, scale=0.5, softcap=30.0)
    config = written(drafter, target, "sglang").config
    assert (config["logit_scale"], config["final_logit_softcapping"]) == (0.5, 30.0)


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


@pytest.mark.parametrize("name", ["eagle", "medusa", "dflash"])
def test_tokens_that_are_not_drafted_here_are_by_vllm(tiny_target, make_drafter, name):
    """All were trained: the file is that of the same drafter without a draft vocabulary."""
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafters = [make_drafter(name, target, depth=K, draft_vocab_size=size) for size in (None, 7)]
    layouts = [written(drafter, target, "vllm") for drafter in drafters]
    whole, reduced = (layout.tensors for layout in layouts)
    assert layouts[0].config == layouts[1].config
    assert whole.keys() == reduced.keys()
    assert all(value.equal(reduced[key]) for key, value in whole.items())


def test_a_vocabulary_whose_size_was_chosen_is_written_as_any_other(tiny_target, make_drafter, monkeypatch):
    for name, value in {"MIN_TOKENS": 1, "STEP": 1, "MAX_COVERAGE_LOSS": 0.3}.items():
        monkeypatch.setattr(vocabulary, name, value)
    target = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    drafter = make_drafter("eagle3", target, depth=K, draft_vocab_size=V // 4)
    drafter.sizes_vocabulary = True
    drafter.fit([Text([1, 2, 2, 3], [1, 1, 1, 1])] * 20, target)
    size = len(drafter.d2t)
    assert size == drafter.settings["draft_vocab_size"] < V // 4
    layout = written(drafter, target, "vllm")
    loaded_by(layout, "vllm", target)
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


# -- its authors' files ----------------------------------------------------------------------------


NAME = "some/target"
EAGLES = ["eagle with a bias", "eagle without", "eagle of Qwen2's layers", "hass"]
EAGLES += ["eagle3", "eagle3, every token"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def folder_of(layout, path):
    path.mkdir()
    layout.write(path)
    return path


def assert_read_back(drafter, back):
    """Bit for bit, and of the same settings but for the depth and those of training."""
    assert same(back.state_dict(), drafter.state_dict())
    of_training = {"anchors", "depth_weight", "rate", "feature_noise", "feature_weight", "detach"}
    told = drafter.settings.keys() - of_training - {"depth"}
    assert {k: back.settings.get(k) for k in told} == {k: drafter.settings[k] for k in told}


@pytest.mark.parametrize("case", EAGLES)
def test_the_authors_eagle_computes_the_drafters_logits(made, case, tmp_path):
    target, drafter = made(case)
    layout = written(drafter, target, "authors")
    assert difference(target, drafter, Authored(layout, target.head.weight)) < 1e-5
    assert f"use_eagle3={case.startswith('eagle3')}" in layout.note
    assert ("model.safetensors.index.json" in layout.note) is not case.startswith("eagle3")
    folder = folder_of(layout, tmp_path / "theirs")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_read_back(drafter, checkpoint_io.load(folder, target))


@pytest.mark.parametrize("case", ["eagle without", "eagle3"])
def test_positions_that_are_scaled_linearly_are_written_as_they_are_read(made, make_drafter, case):
    target, _ = made(case)
    target.config.rope_parameters = dict(LINEAR)
    options = {"taps": None, **EAGLE3} if case == "eagle3" else {}
    drafter = make_drafter(case.split()[0], target, depth=K, **options).requires_grad_(False)
    layout = written(drafter, target, "authors")
    assert layout.config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert difference(target, drafter, Authored(layout, target.head.weight), texts=5) < 1e-5
    plain = layout._replace(config=layout.config | {"rope_scaling": None})
    assert difference(target, drafter, Authored(plain, target.head.weight), texts=5) > 1e-3


def test_classes_of_targets_that_the_authors_code_has_not_are_refused(tiny_target, make_drafter):
    """EAGLE has no Mistral, and its EAGLE-3 no Qwen2 or Mixtral; Medusa has no Qwen3."""
    mistral = tiny_target(vocab=V, layers=8, hidden=16, window=32, dtype=torch.float32)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 8}
    qwen3 = Target(Qwen3ForCausalLM(Qwen3Config(vocab_size=V, **shape)).float().eval())
    for target in (mistral, qwen3):
        target.model.config._name_or_path = target.model.name_or_path = NAME
    options = {"eagle": {}, "eagle3": {"taps": None, **EAGLE3}, "medusa": {}}
    taken = {
        (name, type(target.model).__name__)
        for name, more in options.items()
        for target in (mistral, qwen3)
        if "authors" in formats.accepting(name, make_drafter(name, target, **more).settings, target)
    }
    assert taken == {
        ("eagle", "Qwen3ForCausalLM"),
        ("eagle3", "Qwen3ForCausalLM"),
        ("medusa", "MistralForCausalLM"),
    }


def test_heads_that_do_not_fill_the_hidden_size_are_refused(made):
    target, drafter = made("eagle without")
    with pytest.raises(UserError, match="2 heads of 4 are not 16 together"):
        formats.check("eagle", drafter.settings | {"head_dim": 4}, target, "authors")


# -- files that are read ---------------------------------------------------------------------------


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
    assert written(back, target, engine).config.keys() == written(drafter, target, engine).config.keys()
    if list(drafter.taps) == list(back.taps):  # SGLang's files have a bias of zeros where there is none
        assert same(back.state_dict(), drafter.state_dict())
        return
    assert back.state_dict().keys() == drafter.state_dict().keys()
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


def test_sglangs_eagle_of_qwen2_is_read(made, tmp_path):
    """It has biases of queries, keys and values without a word in its config, and none of the output."""
    target, drafter = made("eagle of Qwen2's layers")
    layout = written(drafter, target, "sglang")
    config = layout.config | {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
    del config["attention_bias"], layout.tensors["layers.0.self_attn.o_proj.bias"]
    back = checkpoint_io.load(folder_of(layout._replace(config=config), tmp_path / "x"), target)
    assert_read_back(drafter, back)


def test_draft_ids_in_any_order_are_sorted_with_the_head(made, tmp_path):
    target, drafter = made("eagle3")
    layout = written(drafter, target, "vllm")
    order = torch.randperm(12)
    ids = (layout.tensors["d2t"] + torch.arange(12))[order]
    mixed = {"d2t": ids - torch.arange(12), "lm_head.weight": layout.tensors["lm_head.weight"][order]}
    assert comes_back(layout, tmp_path / "x", drafter, target, **mixed)


ONES = torch.ones(8)
BIASES = {f"midlayer.self_attn.{x}_proj.bias": torch.ones(8) for x in "qkv"}
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
    "no place .* layer.down_proj.bias": ("eagle without", {"layers.0.mlp.down_proj.bias": torch.ones(16)}),
    "tensors are missing, layers.1.qkv_proj.bias": ("eagle3, Qwen3", BIASES),
    "attention_bias, and its tensors have no": ("eagle3", {"config": {"attention_bias": True}}),
    "tensors are missing, layers.0.k_norm": ("eagle3", {"midlayer.self_attn.q_norm.weight": ONES}),
    "no place .* layers.0.self_attn.v_norm": ("eagle3", {"midlayer.self_attn.v_norm.weight": ONES}),
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
