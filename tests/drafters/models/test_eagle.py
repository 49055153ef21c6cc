"""EAGLE that starts with the maps of one of the target's layers (drafter.start)."""

from __future__ import annotations

import pytest
import torch
from faces import TREE, V, batch_of, random_texts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from decode.errors import UserError
from decode.generation.generate import generate
from decode.model.target import LAST, Target
from decode.sampling import Sampler
from drafters.models.eagle import Eagle
from drafters.models.prism import Prism

OPTIONS = {"depth": 2, "feature_noise": 0.1, "feature_weight": 1.0, "bias": False}
LAYERS = {"first": 0, "last": 2}


@pytest.fixture
def target(tiny_target):
    """With norms that scale, in fp32 as drafters are made."""
    target = tiny_target(vocab=V, layers=3, hidden=16, dtype=torch.float32)
    dice = torch.Generator().manual_seed(3)
    for module in target.model.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.copy_(0.5 + torch.rand(module.weight.shape, generator=dice))
    return target


def made(target, start, cls=Eagle, **options):
    torch.manual_seed(5)
    return cls.for_target(target, start=start, **OPTIONS | options).eval()


@pytest.mark.parametrize("start", LAYERS)
def test_maps_are_the_targets_with_the_norm_folded_in(target, start):
    """The drafter's maps of an input are the target's maps of what its norm makes of an input of size 1."""
    layer, own = target.layers[LAYERS[start]], made(target, start).layer
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    x = x * x.square().mean(-1, keepdim=True).rsqrt()
    normed = layer.input_layernorm(x)
    want = torch.cat([getattr(layer.self_attn, f"{name}_proj")(normed) for name in "qkv"], -1)
    torch.testing.assert_close(own.qkv_proj(x), want, rtol=0, atol=1e-5)
    normed, read = layer.post_attention_layernorm(x), own.post_attention_layernorm(x)
    want = torch.cat([layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed)], -1)
    torch.testing.assert_close(own.gate_up_proj(read), want, rtol=0, atol=1e-5)
    assert torch.equal(own.gate_up_proj.weight[:32], layer.mlp.gate_proj.weight)


@pytest.mark.parametrize("start", LAYERS)
def test_fresh_drafter_has_the_outputs_of_the_default(target, start):
    default, copied = made(target, "default"), made(target, start)
    batch = batch_of(target, random_texts())
    for one, other in zip(default.unroll(batch, target), copied.unroll(batch, target), strict=True):
        assert torch.equal(one.hidden, other.hidden)
    options = {"max_new_tokens": 12, "sampler": Sampler(0.0), "plan": TREE}
    runs = [generate(target, drafter, [[5, 9, 2], [4]], **options).outputs for drafter in (default, copied)]
    assert [o.emitted for o in runs[0]] == [o.emitted for o in runs[1]]
    grown = dict(copied.named_parameters())
    unlike = {name for name, weight in default.named_parameters() if not torch.equal(weight, grown[name])}
    names = ("qkv_proj", "gate_up_proj", "post_attention_layernorm")
    assert unlike == {f"layer.{name}.weight" for name in names}


def test_every_module_of_prism_starts_from_the_layer(target):
    prism = made(target, "first", Prism, modules=[0, 1])
    assert torch.equal(prism.later[0].layer.qkv_proj.weight, made(target, "first").layer.qkv_proj.weight)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"intermediate_size": 24}, "intermediate_size"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"heads": 4, "kv_heads": 2, "head_dim": 4}, "head_dim, heads, kv_heads"),
    ],
    ids=str,
)
def test_layer_of_another_shape_is_refused(target, sizes, said):
    with pytest.raises(UserError, match=rf"drafter\.start=first: .*differ in {said}; set it to default"):
        made(target, "first", **sizes)


SHAPE = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)), r"self_attn\.k_proj\.bias, .*v_proj\.bias"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")), "hidden_act"),
    ],
    ids=["biases", "activation"],
)
def test_layer_of_another_kind_is_refused(model, said):
    with pytest.raises(UserError, match=rf"drafter\.start=first: .*differ in {said}; set it to default"):
        made(Target(model(), [LAST]), "first")
