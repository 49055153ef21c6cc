"""A GGUF file gives the positions of the model that it was made from."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from ggufs import F32, converter_factors, tiny_llama, words, write_gguf
from torch import Tensor

from decode.errors import UserError
from decode.model.load import load_config, load_model

pytestmark = pytest.mark.usefixtures("own_cache")
SHAPE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
SHAPE |= {"max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SAID_YARN = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64}
SCALE = 1 + 0.1 * math.log(4)  # of attention, by yarn
BOTH = {"scaling__attn_factor": 1.5, "scaling__yarn_beta_fast": 32.0, "scaling__yarn_attn_factor": SCALE}


def logits(model: Any) -> Tensor:
    torch.manual_seed(0)
    ids = torch.randint(3, len(words()), (2, 300))
    with torch.no_grad():
        return model.eval()(ids).logits


def original(parameters: dict[str, Any] | None, **shape: Any) -> Any:
    """A random model whose positions are these, with the same weights each time."""
    model = tiny_llama(**(SHAPE | shape))
    if parameters:
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_theta": 10000.0} | parameters
        state, model = model.state_dict(), type(model)(config)
        model.load_state_dict(state)
    return model


def keys(**said: Any) -> dict[str, Any]:
    return {f"llama.rope.{name.replace('__', '.')}": value for name, value in said.items()}


@pytest.mark.parametrize(
    ("said", "parameters"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, LINEAR),
        ({"scaling__factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"freq_base": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        ({"freq_base": None, "dimension_count": None}, None),
        (SAID_YARN, YARN),
        (SAID_YARN | BOTH, YARN | {"attention_factor": 1.5 * SCALE}),
    ],
    ids=str,
)
def test_scaled_positions_are_those_of_the_original(tmp_path, said, parameters):
    model = original(parameters)
    loaded = load_model(str(write_gguf(tmp_path / "m.gguf", model, F32, keys=keys(**said))))
    assert loaded.dtype == torch.float32
    expected = logits(model)
    assert (logits(loaded) - expected).abs().max() < 1e-4
    if parameters:  # such a file without its keys is another model
        assert (logits(original(None)) - expected).abs().max() > 1


@pytest.mark.parametrize(
    ("factor", "low", "high", "length", "base", "size"),
    [
        (8.0, 1.0, 4.0, 8192, 500000.0, 128),  # Llama 3.1
        (32.0, 1.0, 4.0, 8192, 500000.0, 64),  # Llama 3.2
        (8.0, 1.0, 4.0, 128, 10000.0, 64),
        (4.0, 1.0, 2.0, 2048, 10000.0, 32),
        (16.0, 1.0, 4.0, 256, 10000.0, 8),  # too few of them to solve for
        (8.0, 2.0, 8.0, 16384, 500000.0, 128),  # the same factors as of 1, 4 and 8192
    ],
)
def test_llama3_factors_give_back_their_angles(tmp_path, factor, low, high, length, base, size):
    parameters = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": low}
    parameters |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    model = original(parameters, head_dim=size)
    factors = {"rope_freqs.weight": converter_factors(factor, low, high, length, base, size)}
    path = write_gguf(tmp_path / "m.gguf", model, F32, keys=keys(freq_base=base), tensors=factors)
    loaded = load_model(str(path))
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert torch.equal(logits(loaded), logits(model))
    if size >= 32:  # others make the same factors with fewer
        same = {"low_freq_factor": 1.0, "high_freq_factor": high / low}
        same["original_max_position_embeddings"] = round(length / low)
        assert loaded.config.rope_parameters == parameters | same


@pytest.mark.parametrize(
    ("said", "factors", "reason"),
    [
        ({}, [1.0, 2.0] * 16, "rope_freqs.weight are not of Llama 3's scaling"),
        ({}, [1.0, -2.0] * 16, "rope_freqs.weight does not have 32 factors above 0"),
        ({}, [1.0] * 8, "rope_freqs.weight does not have 32 factors"),
        ({"scaling__type": "longrope", "scaling__factor": 4.0}, None, "of type 'longrope' is not read"),
        ({"scaling__factor": 4.0}, [8.0] * 32, "at once"),
        ({"scaling__attn_factor": 1.5}, None, "attn_factor with scaling of type 'linear'"),
        ({"dimension_count": 32}, None, "rotates positions differently"),
        ({"dimension_count": 1 << 31}, None, "dimension_count is 2147483648, of 64 dimensions"),
        ({"freq_base": float("nan")}, None, "freq_base is nan"),
        ({"freq_base_swa": 1e4}, None, "positions of layers with windows"),
        ({"dimension_sections": [4, 4, 4, 0]}, None, "rope.dimension_sections: settings of positions"),
        ({"scaling__alpha": 1000.0}, None, "rope.scaling.alpha: settings of positions"),
        (SAID_YARN | {"scaling__yarn_beta_fast": 16.0}, None, "yarn_beta_fast is 16, and programs differ"),
        (SAID_YARN | {"scaling__yarn_attn_factor": 1.0}, None, "yarn_attn_factor is 1, and programs differ"),
        (SAID_YARN | {"scaling__yarn_ext_factor": 0.5}, None, "yarn_ext_factor: settings of positions"),
    ],
)
def test_other_positions_are_refused(tmp_path, said, factors, reason):
    tensors = {"rope_freqs.weight": np.array(factors)} if factors else {}
    path = write_gguf(tmp_path / "m.gguf", original(None), F32, keys=keys(**said), tensors=tensors)
    with pytest.raises(UserError, match=reason) as error:
        load_config(str(path))
    assert str(error.value).startswith(f"target={path}: ")
    assert "\n" not in str(error.value)
