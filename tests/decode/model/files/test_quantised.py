"""Checkpoints of each method of quantisation: read, or refused in one line."""

import importlib.util
import json

import pytest
import torch
from elsewhere import make_fp8
from families import BASE, save
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from decode.model.load import load_model, load_target

SMALL = BASE | {"num_hidden_layers": 1}
WEIGHTS = "model.safetensors"
# Method: its settings, the package that reads it, and how it stores a matrix (out, in) of 4 bits.
METHODS = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "gptqmodel",
        lambda out, size: {
            "qweight": torch.zeros(size // 8, out, dtype=torch.int32),
            "qzeros": torch.zeros(size // 32, out // 8, dtype=torch.int32),
            "scales": torch.ones(size // 32, out, dtype=torch.float16),
            "g_idx": torch.zeros(size, dtype=torch.int32),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        "gptqmodel",
        lambda out, size: {
            "qweight": torch.zeros(size, out // 8, dtype=torch.int32),
            "qzeros": torch.zeros(size // 32, out // 8, dtype=torch.int32),
            "scales": torch.ones(size // 32, out, dtype=torch.float16),
        },
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes",
        lambda out, size: {
            "weight": torch.zeros(out * size // 2, 1, dtype=torch.uint8),
            "weight.absmax": torch.ones(out * size // 64),
            "weight.quant_map": torch.zeros(16),
            "weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
        },
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
            },
            "ignore": ["lm_head"],
        },
        "compressed_tensors",
        lambda out, size: {
            "weight": torch.zeros(out, size, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.ones(out, 1),
        },
    ),
}


def quantised(folder, settings, stored):
    """The layers' matrices as a method stores them."""
    weights = load_file(folder / WEIGHTS)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        base = name.removesuffix("weight")
        out, size = weights.pop(name).shape
        weights |= {base + part: value for part, value in stored(out, size).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    change(folder, quantization_config=settings)
    return folder


def change(folder, **values):
    path = folder / "config.json"
    kept = {k: v for k, v in (json.loads(path.read_text()) | values).items() if v is not None}
    path.write_text(json.dumps(kept))


def one_line(folder, match):
    for load in (lambda: load_target(str(folder), decodes=False), lambda: load_model(str(folder))):
        with pytest.raises(UserError, match=match) as caught:
            load()
        assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_its_package_is_one_line(method, tmp_path):
    settings, package, stored = METHODS[method]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is here")
    folder = quantised(save(tmp_path / "model", "llama", SMALL), settings, stored)
    one_line(folder, f"quantised with {method}")


@pytest.mark.parametrize("method", METHODS)
def test_without_settings_its_tensors_are_refused(method, tmp_path):
    """A config.json that was copied from the model before quantisation."""
    settings, _, stored = METHODS[method]
    folder = quantised(save(tmp_path / "model", "llama", SMALL), settings, stored)
    change(folder, quantization_config=None)
    one_line(folder, r"do not fit config\.json|has no place|stored as integers or in 8 bits")


def test_an_unknown_or_unnamed_method_is_one_line(tmp_path):
    folder = save(tmp_path / "model", "llama", SMALL)
    for settings in ({"quant_method": "frobnicated"}, {"bits": 4}, "gptq", [4]):
        change(folder, quantization_config=settings)
        one_line(folder, r"quantised with|config\.json")


def test_fp8_settings_with_plain_weights_are_one_line_or_the_same_weights(tmp_path):
    """A config.json that was left as it was when the weights were dequantised."""
    folder = save(tmp_path / "model", "llama", SMALL)
    plain = load_model(str(folder)).state_dict()
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change(folder, quantization_config=block)
    target = load_target(str(folder), decodes=False)
    assert all(torch.equal(value, plain[name]) for name, value in target.model.state_dict().items())


def test_an_fp8_weight_without_its_scale_is_refused(tmp_path):
    folder = make_fp8(tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=r"up_proj\.weight: in 8 bits, without their scales") as caught:
        load_target(str(folder), decodes=False)
    assert "\n" not in str(caught.value)


def test_scales_of_an_engines_cache_are_named(tmp_path):
    folder = make_fp8(tmp_path / "model")
    weights = load_file(folder / WEIGHTS) | {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    target = load_target(str(folder), decodes=False)
    assert target.model.accounts[0].remarks() == [
        "weights: model.layers.0.self_attn.k_scale: scales of activations or of an engine's cache, which "
        "are not applied here"
    ]
