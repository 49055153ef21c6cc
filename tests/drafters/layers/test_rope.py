"""A drafter's rotary positions are the target's, as transformers computes them."""

from typing import Any

import contract
import pytest
import torch
from drafter_checks import K, both, random_texts, unrolled
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from decode.errors import UserError
from drafters.checkpoint import io as checkpoint_io
from drafters.layers.decoder_layer import Rotary
from drafters.layers.fused_backward import rotate
from drafters.layers.rope import rope_settings

HEAD = 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {
    "default": {"rope_theta": 5e5},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn, its options": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5},
}


def config_of(kind: str, **more) -> LlamaConfig:
    rope = {"rope_type": kind.split(",")[0], "rope_theta": 1e4} | KINDS[kind]
    return LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=HEAD, rope_parameters=rope, **more)


def turned(config, theirs) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors at positions far apart, turned by us and by transformers."""
    places = torch.tensor([0, 1, 2, 31, 33, 100, 257])
    x = torch.randn(len(places), 3, HEAD)
    ours = Rotary(HEAD, *rope_settings(config))
    one = rotate(x, ours.table(300, x)[places])
    cosine, sine = theirs(x, places[None])
    n = cosine.shape[-1]
    q = x.transpose(0, 1)[None, ..., :n]  # (1, 3, positions, n)
    other, _ = apply_rotary_pos_emb(q, q, cosine, sine)
    return one, torch.cat([other[0].transpose(0, 1), x[..., n:]], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_transformers_own(kind):
    config = config_of(kind)
    assert (rope_settings(config)[1] is None) == (kind == "default")
    one, other = turned(config, LlamaRotaryEmbedding(config))
    assert (one - other).abs().max() < 5e-5  # theirs are angles in fp32


def test_part_of_a_head_may_turn():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = PhiConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    one, other = turned(config, PhiRotaryEmbedding(config))
    assert (one - other).abs().max() < 5e-5
    assert rope_settings(config)[1] == {"rope_type": "default", "partial_rotary_factor": 0.5}


SLIDING = {"rope_type": "default", "rope_theta": 1e4}
FULL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        # As transformers 4 wrote it.
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}}, 1e6, FULL),
        ({"rope_parameters": {"sliding_attention": SLIDING, "full_attention": FULL}}, 1e6, FULL),
        ({}, 1e4, None),
    ],
)
def test_positions_are_read_from_files_of_any_version(config, theta, scaling):
    want = scaling and {name: value for name, value in scaling.items() if name != "rope_theta"}
    assert rope_settings(config) == (theta, want)


def test_a_scaling_that_follows_the_length_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="dynamic"):
        found = rope_settings({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e5, "factor": 4.0}})
    assert found == (1e5, None)


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="'spiral' is not known"):
        Rotary(HEAD, 1e4, {"rope_type": "spiral"})


@pytest.mark.parametrize("name", ["eagle", "eagle3", "lyanna", "diffusion"])
def test_a_drafter_has_the_targets_positions(name, tiny_target, make_drafter, tmp_path):
    """They decide what it drafts, training = decoding, and a checkpoint carries them."""
    target, plain = both(tiny_target, make_drafter, name)
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    target.config.rope_parameters = rope | {"original_max_position_embeddings": 8}
    drafter = make_drafter(name, target, depth=K)
    drafter.load_state_dict(plain.state_dict())
    assert drafter.settings["rope"]["factor"] == 4.0
    texts = random_texts()
    before, after = (unrolled(one, target, texts) for one in (plain, drafter))
    assert max((before[place] - probs).abs().max() for place, probs in after.items()) > 1e-3
    contract.test_decoding_computes_the_probs_of_training((target, drafter))
    checkpoint_io.save(drafter, target, tmp_path)
    loaded: Any = checkpoint_io.load(tmp_path, target)
    assert loaded.rotary.table(8, texts.float()).equal(drafter.rotary.table(8, texts.float()))
