"""Every tensor and every file of weights is read, known to be harmless, named, or refused."""

import json

import pytest
import torch
from families import BASE, SMALL_GPT, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from decode.errors import UserError
from decode.model.files.account import say_once
from decode.model.head_target import HeadTarget
from decode.model.load import load_model, load_target

SMALL = BASE | {"num_hidden_layers": 2}
GLM = SMALL | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path):
    say_once.cache_clear()
    return save(tmp_path / "model", "llama", SMALL)


def add(folder, **tensors):
    """Add tensors to a folder's file, or drop those that are None; dots are written as __."""
    path = folder / WEIGHTS
    named = {name.replace("__", "."): value for name, value in tensors.items()}
    everything = {k: v for k, v in (load_file(path) | named).items() if v is not None}
    save_file(everything, path, {"format": "pt"})
    return folder


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def refused(folder, reason, **options):
    with pytest.raises(UserError, match=reason) as caught:
        load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{options.get('what', 'target')}={folder}: ")


def account(folder, **options):
    return load_model(str(folder), **options).accounts[0]


def test_biases_without_a_place_are_refused_with_the_first_and_how_many(llama):
    biases = {f"model__layers__{i}__self_attn__{p}_proj__bias": torch.ones(32) for i in (0, 1) for p in "qo"}
    add(llama, **biases)
    refused(llama, r"model\.layers\.0\.self_attn\.o_proj\.bias and 3 more: LlamaForCausalLM has no place")
    refused(llama, "no place for them", what="drafter.path")
    change(llama, attention_bias=True)
    refused(llama, r"do not fit config\.json")  # k and v have none


def test_a_layer_more_than_the_configuration_is_refused(llama):
    refused(change(llama, num_hidden_layers=1), r"model\.layers\.1\.\S+ and 8 more: LlamaForCausalLM")


def test_layers_for_drafting_are_named_in_one_line(llama, capsys):
    add(llama, model__layers__2__eh_proj__weight=torch.ones(2), model__layers__2__mlp__x=torch.ones(2))
    add(llama, mtp__fc__weight=torch.ones(2))
    found = account(llama)
    assert found.remarks() == [
        "weights: model.layers.2.eh_proj.weight and 2 more: layers for multi-token prediction, which the "
        "class leaves out"
    ]
    load_model(str(llama))
    lines = [line for line in capsys.readouterr().err.splitlines() if "multi-token" in line]
    assert lines == [f"target={llama}: {found.remarks()[0]}"]  # said once


@pytest.mark.parametrize("drafting", [True, False])
def test_a_name_that_transformers_drops_in_silence_is_accounted_for(drafting, tmp_path):
    """Glm4Moe drops all of layer 46; another layer makes another model, a drafting layer does not."""
    folder = save(tmp_path / "model", "glm4_moe", GLM)
    part = "eh_proj" if drafting else "mlp"
    add(folder, **{f"model__layers__46__{part}__weight": torch.ones(2)})
    if drafting:
        assert "multi-token" in account(folder).remarks()[0]
    else:
        refused(folder, r"model\.layers\.46\.mlp\.weight: Glm4MoeForCausalLM")


def test_angles_of_positions_are_compared(llama):
    angles = 10_000.0 ** -(torch.arange(4) / 4)
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    add(llama, **{name: angles.half()})
    found = account(llama)
    assert found.harmless == {"computed again by the class, with the same values": [name.replace("__", ".")]}
    add(llama, **{name: 500_000.0 ** -(torch.arange(4) / 4)})
    refused(llama, r"inv_freq: LlamaForCausalLM has no place")


def test_angles_before_scaling_are_those_of_old_files(llama):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    add(change(llama, rope_parameters=rope), x__rotary_emb__inv_freq=10_000.0 ** -(torch.arange(4) / 4))
    assert account(llama).harmless


@pytest.mark.parametrize("size", [64, 7])
def test_a_causal_mask_of_gpt2_is_compared(size, tmp_path):
    folder = save(tmp_path / "model", "gpt2", SMALL_GPT | {"n_positions": 64})
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
    add(folder, h__0__attn__bias=mask, h__0__attn__masked_bias=torch.tensor(-1e4))
    assert len(account(folder).harmless["computed again by the class, with the same values"]) == 2
    add(folder, h__0__attn__bias=mask.float().triu(-3))  # a window
    refused(folder, r"h\.0\.attn\.bias")


def test_parts_for_images_and_of_other_tasks_are_named(llama):
    add(llama, vision_tower__x__weight=torch.ones(2), v_head__summary__weight=torch.ones(2))
    found = account(llama)
    assert found.remarks() == ["weights: vision_tower.x.weight: for images or sound; only text is read here"]
    assert list(found.harmless.values()) == [["v_head.summary.weight"]]


def test_a_masked_lm_goes_through_the_same_account(tmp_path):
    folder = save(tmp_path / "model", "bert", SMALL, auto=AutoModelForMaskedLM)
    add(folder, bert__pooler__dense__bias=torch.ones(32), cls__seq_relationship__bias=torch.ones(2))
    found = account(folder, masked=True)
    assert list(found.harmless) == ["of another task; the head for tokens does not read it"]
    add(folder, bert__encoder__layer__0__attention__self__extra__bias=torch.ones(2))
    refused(folder, r"extra\.bias", masked=True)


# -- tied heads, doubles, dtypes ---------------------------------------------------------------


def test_a_tied_head_is_compared_with_the_embedding(tmp_path):
    folder = save(tmp_path / "model", "llama", SMALL | {"tie_word_embeddings": True})
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    add(folder, lm_head__weight=embedding.clone())
    assert account(folder).harmless == {"tied to the embedding, with the same values": ["lm_head.weight"]}
    other = embedding.clone()
    other[-1, -1] += 1
    add(folder, lm_head__weight=other)
    refused(folder, r"lm_head\.weight: differs from model\.embed_tokens\.weight")
    assert load_target(str(change(folder, tie_word_embeddings=False))).head.weight[-1, -1] == other[-1, -1]


def test_two_tensors_for_one_weight(llama):
    norm = load_file(llama / WEIGHTS)["model.norm.weight"]
    add(llama, norm__weight=norm.clone())
    assert list(account(llama).harmless.values()) == [["model.norm.weight and norm.weight"]]
    add(llama, norm__weight=norm + 1)
    refused(llama, r"model\.norm\.weight and norm\.weight: two tensors for one weight")


def test_integers_without_scales_are_refused(llama):
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_file(llama / WEIGHTS)[name]
    for dtype in (torch.int8, torch.float8_e4m3fn):
        add(llama, **{name.replace(".", "__"): weight.to(dtype)})
        refused(llama, "up_proj.weight: stored as integers or in 8 bits")


# -- files -------------------------------------------------------------------------------------


def shard(folder, **moved):
    """Split a folder's file in two, with an index; `moved` is added to the second."""
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    (folder / WEIGHTS).unlink()
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, part in files.items():
        more = moved if part is second else {}
        save_file({name: weights[name] for name in part} | more, folder / file, {"format": "pt"})
    places = {name: file for file, part in files.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder, first[0], weights[first[0]]


def test_shards_are_read_whole(llama):
    expected = load_model(str(llama)).state_dict()
    folder, *_ = shard(llama)
    model = load_model(str(folder))
    assert model.accounts[0].lines() == ["weights: 2 files, 21 tensors read"]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_tensor_in_two_shards_is_compared(llama):
    folder, name, value = shard(llama)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {name: value.clone()}, second, {"format": "pt"})
    assert account(folder).harmless == {"stored twice, with the same values": [name]}
    save_file(load_file(second) | {name: value + 1}, second, {"format": "pt"})
    refused(folder, f"{name}: two tensors for one weight")


def index(folder, **values):
    path = folder / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_an_index_that_does_not_fit_its_files_is_refused(llama):
    folder, *_ = shard(llama)
    whole = json.loads((folder / INDEX).read_text())["weight_map"]
    for extra, reason in (
        ({"x": "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors: .* not in the folder"),
        ({"x": "../model.safetensors"}, "no file of the folder"),
        ({"x": ".."}, "no file of the folder"),
        ({"x": ""}, "no file of the folder"),
        ({"x": 3}, "no file of the folder"),
        ({"x.weight": "model-00001-of-00002.safetensors"}, r"x\.weight: named by the index"),
    ):
        refused(index(folder, weight_map=whole | extra), reason)
    for values in ({"weight_map": []}, {"weight_map": whole, "metadata": 3}):
        refused(index(folder, **values), "it needs weight_map and metadata")
    (folder / INDEX).write_text("{")
    refused(folder, "not a valid JSON")


def test_one_file_and_an_index_are_refused_unless_they_are_the_same(llama):
    weights = load_file(llama / WEIGHTS)
    (llama / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}))
    assert account(llama).lines() == ["weights: 1 file, 21 tensors read"]
    (llama / INDEX).unlink()
    shard(llama)
    save_file(weights, llama / WEIGHTS, {"format": "pt"})
    refused(llama, f"{WEIGHTS} and {INDEX}: in the folder")


def test_other_files_with_weights_are_named(llama):
    for name in ("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors"):
        (llama / name).write_bytes(b"x")
    found = account(llama)
    assert sorted(name for names in found.harmless.values() for name in names) == [
        "consolidated.00.pth",
        "consolidated.safetensors",
        "pytorch_model.bin",
    ]
    save_file({"x": torch.ones(1)}, llama / "model.fp16.safetensors")
    refused(llama, r"model\.fp16\.safetensors: not read, while engines read")
    (llama / "model.fp16.safetensors").unlink()
    shard(llama)
    save_file({"x": torch.ones(1)}, llama / "old.safetensors")
    assert account(llama).remarks() == [
        f"weights: old.safetensors: safetensors files that {INDEX} does not name"
    ]


# -- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_left_with_the_weights_is_refused(file, llama):
    (llama / file).write_text('{"base_model_name_or_path": "a/b", "peft_type": "LORA"}')
    refused(llama, "weights and an adapter .*remove the adapter's files; else merge it")
    with pytest.raises(UserError, match="weights and an adapter"):
        load_target(str(llama), decodes=False)


def test_an_adapter_without_its_model_says_how_to_merge(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    refused(tmp_path, "an adapter without its model; merge it into owner/base")


# -- a target whose layers run elsewhere -------------------------------------------------------


def test_a_head_alone_goes_through_the_same_account(tmp_path):
    folder = save(tmp_path / "model", "llama", SMALL | {"tie_word_embeddings": True})
    HeadTarget.load(str(folder))
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    for name, value in (("lm_head__bias", torch.ones(61)), ("lm_head__weight", embedding + 1)):
        add(folder, **{name: value})
        with pytest.raises(UserError, match=name.replace("__", r"\.")):
            HeadTarget.load(str(folder))
        add(folder, **{name: None})
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="weights and an adapter"):
        HeadTarget.load(str(folder))
