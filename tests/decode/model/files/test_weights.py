"""Every tensor and every file of weights is read, known to be harmless, named, or refused in one line."""

import importlib.util
import json
import re

import pytest
import torch
from elsewhere import make_fp8
from families import BASE, SMALL_GPT, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from decode.errors import UserError
from decode.model.files.account import Account, say_once
from decode.model.head_target import HeadTarget
from decode.model.load import load_model, load_target

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = BASE | {"num_hidden_layers": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8}
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
MODELS = {
    "llama": ("llama", SMALL),
    "llama, tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "llama, biased": ("llama", SMALL | {"attention_bias": True}),
    "llama, scaled": ("llama", SMALL | {"rope_parameters": SCALED}),
    "gpt2": ("gpt2", SMALL_GPT | {"n_positions": 64}),
    "glm4": ("glm4_moe", SMALL | EXPERTS | GROUPS),  # drops all of layer 46 in silence
}


@pytest.fixture
def make(tmp_path):
    say_once.cache_clear()
    return lambda name="llama", **options: save(tmp_path / "model", *MODELS[name], **options)


@pytest.fixture
def llama(make):
    return make()


def change(folder, file="config.json", **values):
    """Change values of a JSON file, or drop those that are None."""
    path = folder / file
    kept = {k: v for k, v in (json.loads(path.read_text()) | values).items() if v is not None}
    path.write_text(json.dumps(kept))
    return folder


def add(folder, tensors, file=WEIGHTS):
    """Add tensors, or drop those that are None; see `_tensor`."""
    stored = load_file(folder / file)
    new = {name: _tensor(stored, name, value) for name, value in tensors.items()}
    save_file({k: v for k, v in (stored | new).items() if v is not None}, folder / file, {"format": "pt"})
    return folder


def _tensor(stored, name, value):
    """A value, the stored one in a dtype, or another stored one whose last element differs by a number."""
    if isinstance(value, torch.dtype):
        return stored[name].to(value)
    if isinstance(value, tuple):
        copy = stored[value[0]].clone()
        copy.view(-1)[-1] += value[1]
        return copy
    return value


def check(folder, said, **options):
    """Search the account of the weights, or the line that refuses them."""
    try:
        found = "\n".join(load_model(str(folder), **options).accounts[0].lines())
    except UserError as error:
        found = f"refused: {error}"
    assert re.search(said, found), found
    if found.startswith("refused"):
        assert found.startswith(f"refused: {options.get('what', 'target')}={folder}: ")
        assert "\n" not in found


def angles(theta):
    return theta ** -(torch.arange(4) / 4)


def mask(size, diagonal=-1000):
    return torch.ones(1, 1, size, size).tril().triu(diagonal)


NO_PLACE = r"LlamaForCausalLM has no place for them under this config\.json"
SAME = "computed again by the class, with the same values"
ATTENTION, UP = "model.layers.0.self_attn", "model.layers.0.mlp.up_proj.weight"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
OTHER = (EMBEDDING, 1)
PACKED = {UP: None, UP.replace("weight", "qweight"): torch.zeros(4, 48, dtype=torch.int32)}
ONES = torch.ones(2)
BIASES = {f"model.layers.{i}.self_attn.{p}_proj.bias": torch.ones(32) for i in (0, 1) for p in "qo"}
DRAFTED = ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.x", "mtp.fc.weight")
DRAFTING = {name: torch.ones(2) for name in DRAFTED}
TENSORS = [
    ("llama", {}, "^weights: 1 file, 21 tensors read$"),
    ("llama", BIASES, rf"refused: .*: model\.layers\.0\.self_attn\.o_proj\.bias and 3 more: {NO_PLACE}"),
    ("llama, biased", {f"{ATTENTION}.k_proj.bias": None}, r"refused: .* do not fit config\.json"),
    ("llama", DRAFTING, r"not read: model\.layers\.2\.eh_proj\.weight and 2 more: layers for multi-token"),
    ("glm4", {"model.layers.46.eh_proj.weight": ONES}, "not read: .*: layers for multi-token"),
    ("glm4", {"model.layers.46.mlp.weight": ONES}, r"refused: .*layers\.46\.mlp\.weight: Glm4MoeForCausalLM"),
    ("llama", {f"{ATTENTION}.rotary_emb.inv_freq": angles(1e4).half()}, f"harmless: .*inv_freq: {SAME}"),
    ("llama", {f"{ATTENTION}.rotary_emb.inv_freq": angles(5e5)}, f"refused: .*inv_freq: {NO_PLACE}"),
    ("llama, scaled", {"x.rotary_emb.inv_freq": angles(1e4)}, f"harmless: .*inv_freq: {SAME}"),
    ("gpt2", {"h.0.attn.bias": mask(64).bool()}, f"harmless: h.0.attn.bias: {SAME}"),
    ("gpt2", {"h.0.attn.bias": mask(7)}, f"harmless: h.0.attn.bias: {SAME}"),
    ("gpt2", {"h.0.attn.bias": mask(64, -3)}, r"refused: .*h\.0\.attn\.bias"),  # a window
    ("gpt2", {"h.0.attn.masked_bias": torch.tensor(-1e4)}, f"harmless: h.0.attn.masked_bias: {SAME}"),
    ("llama", {"vision_tower.x.weight": ONES}, "not read: vision_tower.x.weight: for images or sound"),
    ("llama", {"v_head.summary.weight": ONES}, "harmless: v_head.summary.weight: of another task"),
    ("llama, tied", {"lm_head.weight": (EMBEDDING, 0)}, "harmless: lm_head.weight: tied to the embedding"),
    ("llama, tied", {"lm_head.weight": OTHER}, rf"refused: .* lm_head\.weight: differs from {EMBEDDING}"),
    ("llama", {"norm.weight": (NORM, 0)}, "harmless: model.norm.weight and norm.weight: stored twice"),
    ("llama", {"norm.weight": (NORM, 1)}, "refused: .* norm.weight: two tensors for one weight"),
    ("llama", PACKED, r"refused: .* do not fit config\.json"),  # GPTQ's, without its settings
    ("llama", {UP: torch.int8}, "refused: .*up_proj.weight: stored as integers or in 8 bits"),
    ("llama", {UP: torch.float8_e4m3fn}, "refused: .*up_proj.weight: stored as integers or in 8 bits"),
]


@pytest.mark.parametrize(("model", "tensors", "said"), TENSORS, ids=lambda value: str(value)[:40])
def test_tensor_is_read_harmless_named_or_refused(model, tensors, said, make):
    check(add(make(model), tensors), said)


def test_refusal_names_the_option(llama):
    check(add(llama, BIASES), "refused: drafter.path=", what="drafter.path")


def test_layer_more_than_the_configuration_is_refused(llama):
    check(change(llama, num_hidden_layers=1), rf"refused: .*model\.layers\.1\.\S+ and 8 more: {NO_PLACE}")


def test_unread_tensors_are_said_once(llama, capsys):
    add(llama, DRAFTING)
    load_model(str(llama))
    load_model(str(llama))
    assert capsys.readouterr().err.count(f"target={llama}: weights: model.layers.2.eh_proj.weight and 2") == 1


def test_masked_lm_goes_through_the_same_account(tmp_path):
    folder = save(tmp_path / "model", "bert", SMALL, auto=AutoModelForMaskedLM)
    add(folder, {"bert.pooler.dense.bias": torch.ones(32), "cls.seq_relationship.bias": ONES})
    check(folder, r"harmless: bert.pooler.dense.bias and 1 more: of another task", masked=True)
    check(add(folder, {"bert.encoder.layer.0.attention.x.bias": ONES}), r"refused: .*x\.bias", masked=True)


def test_names_of_strangers_are_shown_in_one_line():
    account = Account("weights")
    account.refuse("no place", [f"q\n{i}" for i in range(3)])
    with pytest.raises(UserError, match=r"^target=x: weights: q\?0 and 2 more: no place$"):
        account.check("target=x")


# -- quantised weights -------------------------------------------------------------------------

LINEARS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
METHODS = {  # settings of each, and the package that reads it
    "gptq": ({"bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "gptqmodel"),
    "awq": ({"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, "gptqmodel"),
    "bitsandbytes": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
    "compressed-tensors": ({"format": "float-quantized", "config_groups": LINEARS}, "compressed_tensors"),
}


def check_quantised(folder, said):
    check(folder, f"refused: .*({said})")
    with pytest.raises(UserError, match=said) as caught:
        load_target(str(folder), decodes=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_quantised_weights_without_their_package_are_refused(method, llama):
    settings, package = METHODS[method]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is here")
    change(llama, quantization_config=settings | {"quant_method": method})
    check_quantised(llama, f"quantised with {method}")


@pytest.mark.parametrize("settings", [{"quant_method": "frobnicated"}, {"bits": 4}, "gptq", [4]], ids=str)
def test_unknown_or_unnamed_method_is_refused(settings, llama):
    check_quantised(change(llama, quantization_config=settings), r"quantised with|config\.json")


def test_fp8_settings_with_plain_weights_are_the_same_weights(llama):
    """As in a config.json that was left as it was when the weights were dequantised."""
    plain = load_model(str(llama)).state_dict()
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    target = load_target(str(change(llama, quantization_config=block)), decodes=False)
    assert all(torch.equal(value, plain[name]) for name, value in target.model.state_dict().items())


def test_fp8_weight_without_its_scale_is_refused(tmp_path):
    folder = add(make_fp8(tmp_path / "model"), {f"{UP}_scale_inv": None})
    with pytest.raises(UserError, match=r"up_proj\.weight: in 8 bits, without their scales"):
        load_target(str(folder), decodes=False)


def test_scales_of_an_engines_cache_are_named(tmp_path):
    folder = add(make_fp8(tmp_path / "model"), {f"{ATTENTION}.k_scale": torch.ones(1)})
    (line,) = load_target(str(folder), decodes=False).model.accounts[0].remarks()
    assert "k_scale: scales of activations or of an engine's cache" in line


# -- files -------------------------------------------------------------------------------------


def shard(folder):
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    (folder / WEIGHTS).unlink()
    for number, file in enumerate(SHARDS):
        save_file({name: weights[name] for name in names[number::2]}, folder / file, {"format": "pt"})
    places = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_shards_are_read_whole_and_compared(llama):
    expected = load_model(str(llama)).state_dict()
    model = load_model(str(shard(llama)))
    assert model.accounts[0].lines() == ["weights: 2 files, 21 tensors read"]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    name = next(iter(load_file(llama / SHARDS[0])))
    for more, said in ((0, "harmless: .*: stored twice"), (1, "refused: .*: two tensors for one weight")):
        check(add(llama, {name: expected[name] + more}, SHARDS[1]), said)


def test_index_that_does_not_fit_its_files_is_refused(llama):
    whole = json.loads((shard(llama) / INDEX).read_text())["weight_map"]
    for extra, said in (
        ({"x": "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors: .* not in the folder"),
        *(({"x": file}, "no file of the folder") for file in ("../model.safetensors", "..", "", 3)),
        ({"x.weight": SHARDS[0]}, r"x\.weight: named by the index"),
    ):
        check(change(llama, INDEX, weight_map=whole | extra), f"refused: .*{said}")
    for values in ({"weight_map": []}, {"weight_map": whole, "metadata": 3}):
        check(change(llama, INDEX, **values), "refused: .*it needs weight_map and metadata")
    (llama / INDEX).write_text("{")
    check(llama, "refused: .*not a valid JSON")


def test_one_file_and_an_index_are_refused_unless_they_are_the_same(llama):
    weights = load_file(llama / WEIGHTS)
    (llama / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}))
    check(llama, "^weights: 1 file, 21 tensors read$")
    save_file(weights, shard(llama) / WEIGHTS, {"format": "pt"})
    check(llama, f"refused: .*{WEIGHTS} and {INDEX}: in the folder")


def test_other_files_with_weights_are_named(llama):
    others = {"pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors"}
    for name in others:
        (llama / name).write_bytes(b"x")
    harmless = load_model(str(llama)).accounts[0].harmless
    assert {name for names in harmless.values() for name in names} == others
    save_file({"x": ONES}, llama / "model.fp16.safetensors")
    check(llama, r"refused: .*model\.fp16\.safetensors: not read, while engines read")
    (llama / "model.fp16.safetensors").rename(llama / "old.safetensors")
    check(shard(llama), f"not read: old.safetensors: safetensors files that {INDEX} does not name")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_adapter_left_with_the_weights_is_refused(file, llama):
    (llama / file).write_text('{"base_model_name_or_path": "a/b", "peft_type": "LORA"}')
    for load in (load_model, load_target, HeadTarget.load):
        with pytest.raises(UserError, match=r"weights and an adapter .*remove the adapter's files"):
            load(str(llama))


def test_adapter_without_its_model_says_how_to_merge(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    check(tmp_path, "refused: .*an adapter without its model; merge it into owner/base")


@pytest.mark.parametrize(("name", "value"), [("lm_head.bias", torch.ones(61)), ("lm_head.weight", OTHER)])
def test_head_without_layers_goes_through_the_same_account(name, value, make):
    folder = make("llama, tied")
    HeadTarget.load(str(folder))
    with pytest.raises(UserError, match=re.escape(name)):
        HeadTarget.load(str(add(folder, {name: value})))


def check_refused(folder, said):
    with pytest.raises(UserError, match=rf"^target={folder}: {said}") as caught:
        load_target(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["model.pt"], ["consolidated.00.pth", "model.pt"]])
def test_weights_that_can_hold_code_are_refused_with_what_to_do(names, llama):
    weights = load_file(llama / WEIGHTS)
    (llama / WEIGHTS).unlink()
    torch.save({}, llama / "training_args.bin")  # none of the weights
    check_refused(llama, rf".*no file named {WEIGHTS}")
    for name in names:
        torch.save(weights, llama / name)
    check_refused(
        llama, rf"weights: {names[0]}.*: only safetensors are read; convert .*code.*save_pretrained"
    )


def test_repository_without_safetensors_is_refused_with_what_to_do(llama, fake_hub):
    """Before transformers looks for a conversion by others, another revision; nothing large is read."""
    files = {path.name: path.read_bytes() for path in llama.iterdir() if path.name != WEIGHTS}
    fake_hub.give("me/pickled", files | {"pytorch_model.bin": b"x"})
    check_refused("me/pickled", rf"weights: {WEIGHTS}: not in the repository.*convert.*save_pretrained")
    asked = {where for _, where in fake_hub.asked}
    assert not [where for where in asked if where.endswith(".bin") or "discussions" in where], asked
