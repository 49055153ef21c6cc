"""vLLM's loaders of Medusa and the MLP speculator in plain PyTorch; what they pass over is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class MisfitError(Exception):
    """What the loader would have passed over."""


def loaded(tensors: Tensors, shapes: Shapes) -> Tensors:
    missing, strange = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
    wrong = {n for n in shapes.keys() & tensors.keys() if tuple(tensors[n].shape) != shapes[n]}
    if missing or strange or wrong:
        raise MisfitError(
            f"missing {sorted(missing)}, unexpected {sorted(strange)}, mis-shaped {sorted(wrong)}"
        )
    return tensors


# -- Medusa: transformers_utils/configs/medusa.py, model_executor/models/medusa.py -------------------


def medusa(config: Config, tensors: Tensors, tokens: int) -> Callable[[Tensor], list[Tensor]]:
    """(B, D) features -> each head's (B, V) logits; there are as many heads as tokens to speculate."""
    config = _read(config)
    assert tokens <= config["num_heads"], "heads beyond those of the checkpoint would be random"
    config["num_heads"] = tokens
    shared = config.get("original_lm_head", False)
    found: Tensors = {}
    for name, weight in tensors.items():
        name = name.replace("medusa_heads.", "")
        found["lm_head.weight" if shared and name == "lm_heads.0.weight" else name] = weight
    found = loaded(found, _shapes(config))

    def run(feature: Tensor) -> list[Tensor]:
        rows = []
        for i in range(config["num_heads"]):
            x = feature
            for j in range(config["num_hidden_layers"]):
                inner = x @ found[f"blocks.{i}.layers.{j}.weight"].T
                inner = inner + found.get(f"blocks.{i}.layers.{j}.bias", torch.zeros(()))
                x = x + inner * inner.sigmoid()
            head = found["lm_head.weight" if shared else f"lm_heads.{i}.weight"]
            rows.append(x @ head.T * config.get("logit_scale", 1.0))
        return rows

    return run


def _read(config: Config) -> dict[str, Any]:
    """MedusaConfig.from_pretrained: any key is taken that has the right words in it."""
    found = {}
    for name, value in config.items():
        counts = "num" in name
        found["num_heads" if counts and "heads" in name else name] = value
        if counts and "layers" in name:
            found["num_hidden_layers"] = found.pop(name)
    assert found["model_type"] == "medusa"
    assert found["architectures"] == ["MedusaModel"]
    assert found["truncated_vocab_size"] == found["vocab_size"], "or there is a token_map"
    return found


def _shapes(config: Config) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if config.get("medusa_fc_bias", False):
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        own = not config.get("original_lm_head", False)
        shapes[f"lm_heads.{i}.weight" if own else "lm_head.weight"] = (vocab, hidden)
    return shapes


# -- MLP speculator: configs/mlp_speculator.py, models/mlp_speculator.py ------------------------------


def mlp(config: Config, tensors: Tensors, tokens: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """(B, D) features and (B, K) tokens that are read -> (B, V) logits of each depth."""
    depth, hidden, vocab = config["n_predict"], config["emb_dim"], config["vocab_size"]
    assert config["model_type"] == "mlp_speculator"
    assert config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert len(config["top_k_tokens_per_head"]) == depth
    assert tokens == depth, "it makes as many depths as the command says"
    inner, tied = config["inner_dim"] or hidden, config["tie_weights"]
    assert not tied or depth > 1
    shapes: Shapes = {}
    for i in range(1 if tied else depth):
        shapes |= {f"emb.{i}.weight": (vocab, inner), f"head.{i}.weight": (vocab, inner)}
        shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    for i in range(2 if tied else depth):
        shapes[f"proj.{i}.weight"] = (inner, inner if i else hidden)
    found = loaded({name.replace("speculator.", ""): w for name, w in tensors.items()}, shapes)
    state_weight = 0.5 ** (0.5 / depth)
    token_weight = math.sqrt((1 - state_weight**2) * (inner / 2))

    def unit(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def run(feature: Tensor, read: Tensor) -> list[Tensor]:
        state, rows = unit(feature) / 2**0.5 if config["scale_input"] else feature, []
        for depth_index in range(depth):
            i, p = (0, min(depth_index, 1)) if tied else (depth_index, depth_index)
            state = state @ found[f"proj.{p}.weight"].T
            state = state + found[f"emb.{i}.weight"][read[:, depth_index]] * token_weight / state_weight
            state = unit(state) * found[f"ln.{i}.weight"] + found[f"ln.{i}.bias"]
            state = state * 0.5 * (1 + torch.erf(state / 2**0.5))
            rows.append(state @ found[f"head.{i}.weight"].T)
        return rows

    return run
