"""DSpark: checkpoints of others, exports, its block next to DFlash's, a reduced vocabulary."""

from __future__ import annotations

import json

import pytest
import torch
from faces import V, assert_faces_agree, batch_of, both, random_texts, unrolled
from safetensors.torch import save_file
from served_speculators import confidence, load

from decode.errors import UserError
from drafters.checkpoint import io as checkpoint_io
from drafters.export import formats

K, MASK = 3, 7


@pytest.fixture
def target(tiny_target):
    made = tiny_target(vocab=V, layers=8, hidden=16, dtype=torch.float32)
    made.config.pad_token_id = MASK
    made.model.config._name_or_path = made.model.name_or_path = "some/target"
    return made


@pytest.fixture
def drafter(target, make_drafter):
    """With a confidence head of random weights, frozen as a loaded one is."""
    drafter = make_drafter("dspark", target, depth=K, taps=[2, 4], markov_rank=5)
    drafter.add_confidence()
    dice = torch.Generator().manual_seed(1)
    for weight in drafter.confidence.parameters():
        weight.data = torch.randn(weight.shape, generator=dice)
    return drafter.requires_grad_(False)


# -- checkpoints of others -------------------------------------------------------------------------


def renamed(drafter, target) -> dict[str, torch.Tensor]:
    """Tensors by the names that all of them have, cut apart by hand."""
    shape, state = drafter.shape, drafter.state_dict()
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = {
        "fc.weight": state["fc.weight"],
        "hidden_norm.weight": state["context_norm.weight"],
        "norm.weight": state["norm.weight"],
        "markov_head.markov_w1.weight": state["info.emb.weight"],
        "markov_head.markov_w2.weight": state["info.out.weight"],
        "confidence_head.proj.weight": state["confidence.weight"][None],
        "confidence_head.proj.bias": state["confidence.bias"],
        "embed_tokens.weight": target.embed.weight,
        "lm_head.weight": target.head.weight,
    }
    for i in range(len(drafter.stack)):
        stem = f"layers.{i}."
        joint, gate_up = state[f"{stem}qkv_proj.weight"], state[f"{stem}gate_up_proj.weight"]
        for letter, rows in zip("qkv", joint.split([q, k, k]), strict=True):
            found[f"{stem}self_attn.{letter}_proj.weight"] = rows
        for name, rows in zip(("gate", "up"), gate_up.chunk(2), strict=True):
            found[f"{stem}mlp.{name}_proj.weight"] = rows
        for name in ("o_proj", "q_norm", "k_norm"):
            found[f"{stem}self_attn.{name}.weight"] = state[f"{stem}{name}.weight"]
        found[f"{stem}mlp.down_proj.weight"] = state[f"{stem}down_proj.weight"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}{name}.weight"] = state[f"{stem}{name}.weight"]
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def layers(drafter) -> dict:
    shape = drafter.shape
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": len(drafter.stack),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "vocab_size": V,
        "layer_types": ["full_attention"] * len(drafter.stack),
    }


HEADS = {
    "block_size": K,
    "markov_rank": 5,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def deepspec(drafter) -> dict:
    more = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 3], "mask_token_id": MASK}
    return layers(drafter) | HEADS | more


def specforge(drafter) -> dict:
    nested = {"projector_type": "dspark", "target_layer_ids": [1, 3], "mask_token_id": MASK}
    more = {"architectures": ["DSparkDraftModel"], "model_type": "dspark", "dflash_config": nested}
    return layers(drafter) | HEADS | more


def speculators(drafter) -> dict:
    return HEADS | {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        "draft_vocab_size": V,
        "sample_from_anchor": True,
        "transformer_layer_config": layers(drafter),
        "speculators_config": {"verifier": {"name_or_path": "some/target"}},
    }


VENDORS = {"deepspec": deepspec, "specforge": specforge, "speculators": speculators}


def written(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@torch.no_grad()
def computed(drafter, target):
    """Logits and confidences of every anchor and depth."""
    steps = drafter.unroll(batch_of(target, random_texts()), target)
    return [(step.head(step.hidden), drafter.confidence(step.hidden)) for step in steps]


@pytest.mark.parametrize("vendor", VENDORS)
def test_checkpoints_of_others_have_the_same_logits(drafter, target, tmp_path, vendor):
    written(tmp_path, VENDORS[vendor](drafter), renamed(drafter, target))
    loaded = checkpoint_io.load(tmp_path, target)
    assert loaded.settings == drafter.settings | {"anchors": 0}
    assert loaded.taps == (2, 4)
    for one, other in zip(computed(drafter, target), computed(loaded, target), strict=True):
        assert all(map(torch.equal, one, other))


def test_confidence_head_without_the_bias_or_switched_off(drafter, target, tmp_path):
    tensors = renamed(drafter, target)
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :16].contiguous()
    loaded = checkpoint_io.load(written(tmp_path, deepspec(drafter), tensors), target)
    assert loaded.confidence.weight.tolist() == [*drafter.confidence.weight[:16].tolist(), *[0.0] * 5]
    config = deepspec(drafter) | {"enable_confidence_head": False}
    assert checkpoint_io.load(written(tmp_path, config, tensors), target).confidence is None


REFUSED = {
    "a gated bias": (lambda c, t: c.update(markov_head_type="gated"), "markov_head_type is 'gated'"),
    "no bias": (lambda c, t: c.update(markov_rank=0), "its markov_rank is 0; a DSpark needs"),
    "a head of its own": (lambda c, t: t["lm_head.weight"].add_(1), "it has its own lm_head.weight"),
    "half of the bias": (lambda c, t: t.pop("markov_head.markov_w1.weight"), "damaged checkpoint"),
    "another rank": (lambda c, t: c.update(markov_rank=4), "info.emb.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_checkpoint_that_is_no_dspark_is_refused(drafter, target, tmp_path, what):
    change, said = REFUSED[what]
    config, tensors = deepspec(drafter), renamed(drafter, target)
    change(config, tensors)
    with pytest.raises(UserError, match=said) as caught:
        checkpoint_io.load(written(tmp_path, config, tensors), target)
    assert "\n" not in str(caught.value)


# -- what engines are given ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_engine_computes_the_drafters_confidence(drafter, target, to):
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, to)
    assert layout.config["enable_confidence_head"]
    assert layout.config["confidence_head_with_markov"]
    served, texts = load(layout.config, layout.tensors), random_texts()
    for step in drafter.unroll(batch_of(target, texts), target):
        before = texts.flatten()[step.anchor + step.depth]
        theirs = confidence(served, step.hidden[:, :16], before)
        torch.testing.assert_close(theirs, drafter.confidence(step.hidden).sigmoid())


def test_export_to_sglang_has_embedding_head_and_command(drafter, target):
    layout = formats.write_layout(checkpoint_io.as_saved(drafter), target, "sglang")
    assert layout.tensors["embed_tokens.weight"].equal(target.embed.weight)
    assert layout.tensors["lm_head.weight"].equal(target.head.weight)
    assert layout.tensors.keys() == renamed(drafter, target).keys()
    command = layout.command("T", "D")
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path D" in command
    assert f"--speculative-num-draft-tokens {K + 1}" in command


# -- the drafter -----------------------------------------------------------------------------------


def test_without_bias_and_with_masks_it_is_dflash(tiny_target, make_drafter):
    target, drafter = both(tiny_target, make_drafter, "dspark", sample_from_anchor=False)
    plain = make_drafter("dflash", target)
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("info.")})
    drafter.info.out.weight.data.zero_()
    probs, same = (unrolled(one, target, random_texts()) for one in (drafter, plain))
    assert probs.keys() == same.keys()
    assert all(torch.equal(p, same[place]) for place, p in probs.items())


@pytest.mark.parametrize("anchor", [True, False])
def test_block_is_shorter_where_the_root_predicts(tiny_target, make_drafter, anchor):
    target, drafter = both(tiny_target, make_drafter, "dspark", sample_from_anchor=anchor)
    root = torch.zeros(2, target.hidden_size)
    assert drafter.inputs(root, root).shape == (2, K + (not anchor), target.hidden_size)
    assert_faces_agree(drafter, target, random_texts())


def test_block_of_the_root_only(target, make_drafter):
    drafter = make_drafter("dspark", target, depth=1)
    assert drafter.masks == 0
    (step,) = drafter.unroll(batch_of(target, random_texts()), target)
    assert step.depth == 1
