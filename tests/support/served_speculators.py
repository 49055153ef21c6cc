"""What vLLM and speculators make of speculators' layout, or of a DFlash or DSpark: their rules, restated.

From vLLM's `transformers_utils/configs/speculators/{base,algos}.py`, `models/llama_eagle3.py` and
`models/qwen3_{dflash,dspark}.py`, and speculators' `models/{eagle3,peagle,dflash}/core.py`, with plain
tensors and nothing of ours: what is compared with it was computed by other code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ARCHITECTURES = {"eagle3": "Eagle3LlamaForCausalLM", "peagle": "PeagleLlamaForCausalLM"}
ARCHITECTURES |= {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
DSPARK = ("draft_vocab_size", "markov_rank", "block_size")
DSPARK = (*DSPARK, "enable_confidence_head", "confidence_head_with_markov")
EAGLE3 = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "eagle_aux_hidden_state_layer_ids")


class BrokenError(Exception):
    """A folder that would not be loaded, or not whole."""


class Served(NamedTuple):
    """A drafter as vLLM would hold it."""

    config: dict[str, Any]  # what its model reads
    weights: dict[str, Tensor]  # by its own names
    tokens: int  # drafted a round


def vllm_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """What vLLM's reader passes on, and how many tokens are drafted."""
    if "model_type" in config:
        raise BrokenError("a model_type of its own: not taken for speculators' layout")
    try:
        whole = config["speculators_config"]
        tokens = whole["proposal_methods"][0]["speculative_tokens"]
        whole["verifier"]["name_or_path"]
        kind, passed = config["speculators_model_type"], dict(config["transformer_layer_config"])
    except (KeyError, IndexError) as error:
        raise BrokenError(f"no {error}") from None
    passed["architectures"] = [ARCHITECTURES[kind]]
    if kind == "dflash":
        ids = config["aux_hidden_state_layer_ids"]
        passed |= {"draft_vocab_size": config["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": ids}
        passed["dflash_config"] = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in ids],
            "causal": not config.get("sliding_window_non_causal", True),
        }
        return passed, tokens
    if kind == "dspark":
        ids = config["aux_hidden_state_layer_ids"]
        passed |= {name: config[name] for name in DSPARK} | {"eagle_aux_hidden_state_layer_ids": ids}
        anchor = config.get("sample_from_anchor", False)
        passed["dflash_config"] = _places(config, [i - 1 for i in ids], anchor)
        return passed, tokens
    if passed["model_type"] not in ("llama", "qwen3"):
        raise BrokenError(f"model_type {passed['model_type']}")
    passed |= {name: config[name] for name in EAGLE3}
    if kind == "eagle3":
        passed |= {name: config.get(name, False) for name in ("fc_norm", "norm_output")}
    else:
        passed["pard_token"] = config["mask_token_id"]
    return passed, tokens


def _places(config: Mapping[str, Any], ids: list[int], anchor: bool) -> dict[str, Any]:
    """What a DSpark has instead of a `dflash_config`; `anchor`: whether the root predicts."""
    return {"mask_token_id": config["mask_token_id"], "target_layer_ids": ids, "anchor": anchor}


def parallel_config(config: Mapping[str, Any], command: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Of a P-EAGLE for `parallel_drafting`, whose command says how many tokens are drafted."""
    if command.get("method") != "eagle3" or command.get("parallel_drafting") is not True:
        raise BrokenError("its mask_hidden is passed over")
    kind = {"LlamaForCausalLMEagle3": "llama", "Eagle3Qwen3ForCausalLM": "qwen3"}
    if kind.get(config["architectures"][0]) != config["model_type"]:
        raise BrokenError(f"{config['architectures']} of {config['model_type']}")
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    token = next(config[name] for name in names if config.get(name) is not None)
    return dict(config) | {"pard_token": token}, command["num_speculative_tokens"]


def flat_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Of a DFlash or DSpark as their authors write it, whose layer ids are of outputs, and its tokens."""
    size, passed = config["block_size"], dict(config)
    if config["architectures"] == [ARCHITECTURES["dspark"]]:
        anchor = config.get("sample_from_anchor", True)
        passed["dflash_config"] = _places(config, config["target_layer_ids"], anchor)
        tokens = size if anchor else size - 1
    else:
        passed["draft_vocab_size"], tokens = config["vocab_size"], size - 1
    ids = [i + 1 for i in passed["dflash_config"]["target_layer_ids"]]
    return passed | {"eagle_aux_hidden_state_layer_ids": ids}, tokens


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all parameters of the model that a configuration builds; q, k, v and gate, up still apart."""
    size, dflash = config["hidden_size"], "dflash_config" in config
    taps = len(config["dflash_config"]["target_layer_ids"]) if dflash else _taps(config)
    found: dict[str, tuple[int, ...]] = {"model.fc.weight": (size, taps * size), "model.norm.weight": (size,)}
    for i in range(config["num_hidden_layers"]):
        found |= _layer_shapes(config, f"model.layers.{i}.", size if dflash or i else 2 * size)
    if dflash:
        found["model.hidden_norm.weight"] = (size,)
    else:
        found["model.layers.0.hidden_norm.weight"] = (size,)
        # vLLM would share the target's; speculators would be left with zeros.
        found["model.embed_tokens.weight"] = (config["vocab_size"], size)
        found["lm_head.weight"] = (config["draft_vocab_size"], size)
        if config.get("norm_before_fc"):
            found["model.input_norm.weight"] = (taps * size,)
        if config.get("fc_norm"):
            found |= {f"model.fc_norm.{i}.weight": (size,) for i in range(taps)}
    if config["draft_vocab_size"] != config["vocab_size"]:
        found["draft_id_to_target_id"] = (config["draft_vocab_size"],)
    if "pard_token" in config:
        found["mask_hidden"] = (1, 1, taps * size)
    if dflash and config["draft_vocab_size"] < config["vocab_size"]:  # otherwise the target's is shared
        found["lm_head.weight"] = (config["draft_vocab_size"], size)
    if "markov_rank" in config:
        found |= _dspark_shapes(config)
    return found


def _dspark_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, rank, drafted = config["hidden_size"], config["markov_rank"], config["draft_vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.markov_head.markov_w1.weight": (config["vocab_size"], rank),
        "model.markov_head.markov_w2.weight": (drafted, rank),
    }
    if config["enable_confidence_head"]:
        wide = size + rank * config["confidence_head_with_markov"]
        found |= {"model.confidence_head.proj.weight": (1, wide), "model.confidence_head.proj.bias": (1,)}
    return found


def _taps(config: Mapping[str, Any]) -> int:
    return config.get("num_aux_hidden_states") or 3


def _layer_shapes(config: Mapping[str, Any], stem: str, wide: int) -> dict[str, tuple[int, ...]]:
    """Of one layer whose attention reads so many numbers."""
    size, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    groups, inner = config["num_key_value_heads"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {}
    for letter, count in (("q", heads), ("k", groups), ("v", groups)):
        found[f"{stem}self_attn.{letter}_proj.weight"] = (count * dim, wide)
        if config["attention_bias"]:
            found[f"{stem}self_attn.{letter}_proj.bias"] = (count * dim,)
    found[f"{stem}self_attn.o_proj.weight"] = (size, heads * dim)
    if config["attention_bias"] and config["model_type"] == "llama":  # vLLM's Qwen3 has none
        found[f"{stem}self_attn.o_proj.bias"] = (size,)
    for name in ("gate", "up"):
        found[f"{stem}mlp.{name}_proj.weight"] = (inner, size)
    found[f"{stem}mlp.down_proj.weight"] = (size, inner)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{stem}{name}.weight"] = (size,)
    if config["model_type"] == "qwen3":
        found |= {f"{stem}self_attn.{letter}_norm.weight": (dim,) for letter in "qk"}
    return found


def load(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], command: Mapping[str, Any] | None = None
) -> Served:
    """By vLLM's rules; and nothing may be missing, which it does not look for.

    `command`: its `--speculative-config`, which a P-EAGLE needs.
    """
    kind = config.get("speculators_model_type")
    if "mask_hidden" in tensors and not kind:
        passed, tokens = parallel_config(config, command or {})
    else:
        passed, tokens = vllm_config(config) if kind else flat_config(config)
    weights = {}
    for file_name, value in tensors.items():
        name = file_name.replace("midlayer.", "layers.0.")
        if "t2d" in name:
            continue
        if "d2t" in name:
            weights["draft_id_to_target_id"] = value
        elif "mask_hidden" in name:
            weights[name] = value
        else:
            weights[name if "lm_head" in name else f"model.{name}"] = value
    wanted = shapes(passed)
    for what, names in (("missing", wanted.keys() - weights), ("unexpected", weights.keys() - wanted)):
        if names:
            raise BrokenError(f"{what}: {', '.join(sorted(names))}")
    if wrong := [name for name, shape in wanted.items() if weights[name].shape != shape]:
        raise BrokenError(f"another shape: {', '.join(wrong)}")
    if kind:
        own_rules(config, tensors)
    return Served(passed, weights, tokens)


def own_rules(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """What speculators itself asks for beyond vLLM: `load_vocab_mappings` and its configuration's types."""
    whole = config["speculators_config"]
    default = whole["default_proposal_method"]
    if default not in [method["proposal_type"] for method in whole["proposal_methods"]]:
        raise BrokenError(f"default_proposal_method {default}")
    size, count = config["transformer_layer_config"]["vocab_size"], config["draft_vocab_size"]
    if count == size:
        if "t2d" in tensors or "d2t" in tensors:
            raise BrokenError("a vocabulary of its own, as large as the target's")
        return
    known, moved = tensors["t2d"], tensors["d2t"]
    if known.dtype != torch.bool or known.shape != (size,) or int(known.sum()) != count:
        raise BrokenError("t2d")
    if moved.dtype != torch.int64 or not known[moved + torch.arange(count)].all():
        raise BrokenError("d2t")


# -- forward passes ------------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotated(x: Tensor, places: Tensor, base: float) -> Tensor:
    """(heads, n, dim) at (n,) positions."""
    half = x.shape[-1] // 2
    angle = places[:, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class _Model:
    """Its layers, read one after the other."""

    def __init__(self, served: Served) -> None:
        self.config, self.weights = served.config, served.weights
        self.eps, self.base = self.config["rms_norm_eps"], self.config["rope_parameters"]["rope_theta"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, self.weights[f"model.{name}.weight"], self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def layer(
        self, i: int, residual: Tensor, y: Tensor, places: Tensor, seen: Tensor, context: Tensor | None = None
    ) -> Tensor:
        """(n, D) residual and (n, D') input of the attention -> (n, D); `seen` (n, m) bool of m keys."""
        stem, dim, given = f"model.layers.{i}.", self.config["head_dim"], y
        if context is not None:
            given = torch.cat([context, y])
        parts = []
        for letter, x in (("q", y), ("k", given), ("v", given)):
            part = self.linear(x, f"{stem}self_attn.{letter}_proj")
            part = part.unflatten(-1, (-1, dim)).transpose(0, 1)  # (heads, n, dim)
            if f"{stem}self_attn.{letter}_norm.weight" in self.weights:
                part = _norm(part, self.weights[f"{stem}self_attn.{letter}_norm.weight"], self.eps)
            parts.append(part)
        q, k, v = parts
        q, k = _rotated(q, places[len(places) - len(y) :], self.base), _rotated(k, places, self.base)
        k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
        scores = (q @ k.mT / dim**0.5).masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = residual + self.linear(mixed, f"{stem}self_attn.o_proj")
        y = self.norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (F.linear(y, self.weights[f"{stem}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self.weights[f"{stem}mlp.down_proj.weight"])

    def near(self, i: int, places: Tensor) -> Tensor:
        """(n, n) bool: places that a layer's window holds, on either side (`_resolve_layer_attention`)."""
        apart = (places[:, None] - places).abs()
        sliding = (self.config.get("layer_types") or {i: ""})[i] == "sliding_attention"
        return apart < (self.config["sliding_window"] if sliding else len(places))

    def fuse(self, taps: Tensor) -> Tensor:
        """(n, L * D) side by side -> (n, D)."""
        if self.config.get("norm_before_fc"):
            taps = self.norm(taps, "input_norm")
        if self.config.get("fc_norm"):
            parts = taps.chunk(_taps(self.config), -1)
            taps = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return F.linear(taps, self.weights["model.fc.weight"])

    def eagle(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) pairs in a row -> (n, D) what the head reads, and what is fed back."""
        normed = self.norm(feature, "layers.0.hidden_norm")
        x = normed if self.config["norm_before_residual"] else feature
        y = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], -1)
        places = torch.arange(len(x))
        for i in range(self.config["num_hidden_layers"]):
            if i:
                y = self.norm(x, f"layers.{i}.input_layernorm")
            x = self.layer(i, x, y, places, (places[:, None] >= places) & self.near(i, places))
        read = self.norm(x, "norm")
        return read, read if self.config.get("norm_output") else x

    def logits(self, read: Tensor, head: Tensor, before: Tensor | None = None) -> Tensor:
        """(n, V), after (n,) previous tokens, which a DSpark reads; what it does not draft is -inf."""
        found = F.linear(read, self.weights.get("lm_head.weight", head))
        if (embedding := self.weights.get("model.markov_head.markov_w1.weight")) is not None:
            found = found + F.linear(embedding[before], self.weights["model.markov_head.markov_w2.weight"])
        if "draft_id_to_target_id" not in self.weights:
            return found
        ids = torch.arange(found.shape[-1]) + self.weights["draft_id_to_target_id"]
        return found.new_full((len(found), len(head)), -torch.inf).index_copy(1, ids, found)


@torch.no_grad()
def draft(served: Served, model: Any, states: Sequence[Tensor], text: Tensor, anchor: int) -> Tensor:
    """(K, V) logits of the tokens behind the root x_{anchor + 1}; an autoregressive one is told the text.

    `states` are the target's `hidden_states` of the text: number i enters layer i.
    """
    here, config = _Model(served), served.config
    ids = sorted(config["eagle_aux_hidden_state_layer_ids"])  # gathered as the layers run
    taps = torch.cat([states[i][0, : anchor + 1] for i in ids], -1)
    table = served.weights.get("model.embed_tokens.weight", model.get_input_embeddings().weight)
    head = model.get_output_embeddings().weight
    if "dflash_config" in config:
        read = _block(here, table, taps, text[anchor + 1], served.tokens)
        return here.logits(read, head, text[anchor + 1 : anchor + 1 + len(read)])
    feature, tokens = here.fuse(taps), text[1 : anchor + 2]
    if "pard_token" in config:
        masks = served.tokens - 1
        feature = torch.cat([feature, here.fuse(served.weights["mask_hidden"][0]).expand(masks, -1)])
        tokens = torch.cat([tokens, torch.full((masks,), config["pard_token"])])
        read, _ = here.eagle(table[tokens], feature)
        return here.logits(read[anchor:], head)
    rows = []
    for depth in range(1, served.tokens + 1):
        read, back = here.eagle(table[text[1 : anchor + depth + 1]], feature)
        rows.append(read[-1:])
        feature = torch.cat([feature, back[-1:]])
    return here.logits(torch.cat(rows), head)


def _block(here: _Model, table: Tensor, taps: Tensor, root: Tensor, tokens: int) -> Tensor:
    """(K, D) states of DFlash's masks, or of a root that predicts and the masks."""
    more = here.config["dflash_config"]
    masks = tokens - more.get("anchor", False)
    context = here.norm(here.fuse(taps), "hidden_norm")
    x = torch.cat([table[root][None], table[more["mask_token_id"]].expand(masks, -1)])
    width, places = len(x), torch.arange(len(context) + len(x))
    seen = torch.ones(width, len(places), dtype=torch.bool)
    kinds = here.config.get("layer_types") or ["full_attention"]
    ways = here.config.get("is_causal"), more.get("causal"), kinds[0] == "sliding_attention"
    if next(way for way in ways if way is not None):
        seen = seen.tril(len(context))
    for i in range(here.config["num_hidden_layers"]):
        near = seen & here.near(i, places)[len(context) :]
        x = here.layer(i, x, here.norm(x, f"layers.{i}.input_layernorm"), places, near, context)
    return here.norm(x, "norm")[width - tokens :]


@torch.no_grad()
def confidence(served: Served, states: Tensor, before: Tensor) -> Tensor:
    """(n,) chances of a DSpark, of (n, D) states after (n,) previous tokens."""
    features = torch.cat([states, served.weights["model.markov_head.markov_w1.weight"][before]], -1)
    weight, bias = (served.weights[f"model.confidence_head.proj.{part}"] for part in ("weight", "bias"))
    return F.linear(features[:, : weight.shape[1]], weight, bias)[:, 0].sigmoid()
