"""A target of which embedding, final norm and head are here, and whose layers are not."""

import pytest
import torch
from families import WORKS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from workbench import make_target

from decode.errors import UserError
from decode.model.head_target import HeadTarget
from decode.model.load import load_target, stop_tokens
from decode.model.target import Target
from drafters.models.eagle import Eagle

TEXT = torch.tensor([[5, 9, 2, 7, 3, 11, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    "name", ["llama tied, biased", "gemma2, soft caps, eager", "gemma3, window 6", "phi3"]
)
def test_norm_and_head_make_rows_of_the_last_layers_output(name, tmp_path):
    kind, settings, *_ = WORKS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(tmp_path)
    whole = Target(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    part = HeadTarget.load(str(tmp_path), "float32")
    out: list[torch.Tensor] = []
    whole.layers[-1].register_forward_hook(lambda m, a, o: out.append(o if torch.is_tensor(o) else o[0]))
    last = whole.read(TEXT).last
    torch.testing.assert_close(part.head(part.norm(out[0])), whole.head(last), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(part.embed(TEXT), whole.embed(TEXT), atol=0, rtol=0)
    assert part.fingerprint() == whole.fingerprint()


def test_head_target_is_the_target_without_its_layers(folder):
    whole, part = load_target(str(folder), "bfloat16"), HeadTarget.load(str(folder), "bfloat16")
    for name in ("vocab_size", "hidden_size", "dtype", "max_positions"):
        assert getattr(part, name) == getattr(whole, name)
    assert (len(part.layers), stop_tokens(part)) == (len(whole.layers), stop_tokens(whole))
    assert part.bytes < whole.bytes
    assert part.model.name_or_path == whole.model.name_or_path
    options = {"depth": 1, "feature_noise": 0.0, "feature_weight": 1.0}
    assert Eagle.for_target(part, **options).settings == Eagle.for_target(whole, **options).settings
    for ask in (lambda: part.read(TEXT), lambda: part.start(1, 8), lambda: part.weights(part.layers[0])):
        with pytest.raises(UserError, match="layers are only in the engine"):
            ask()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is not in its files"),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}), "quantised"),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:-1].clone()}), "lm_head.weight is not"),
    ],
)
def test_weights_that_make_no_row_are_refused(tmp_path, change, said):
    folder = make_target(tmp_path)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=said):
        HeadTarget.load(str(folder))


def test_layers_may_be_missing_quantised_or_under_another_prefix(tmp_path):
    folder = make_target(tmp_path)
    whole = load_target(str(folder), "float32")
    weights = load_file(folder / "model.safetensors")
    some = {f"language_model.{k}": w for k, w in weights.items() if ".layers." not in k}
    some["language_model.model.layers.0.input_layernorm.norm.weight"] = torch.zeros(32)
    save_file(some, folder / "model.safetensors", {"format": "pt"})
    part = HeadTarget.load(str(folder), "float32")
    torch.testing.assert_close(part.head.weight, whole.head.weight, atol=0, rtol=0)
    assert torch.equal(part.norm.weight, whole.base.norm.weight)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="only safetensors"):
        HeadTarget.load(str(folder))
