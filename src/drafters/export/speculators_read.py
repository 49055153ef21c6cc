"""Import checkpoints of vLLM's `speculators`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import Layout, Reader, Saved, join_projections, split_biases
from drafters.export.llama_config import check_size, check_target, check_tensor_names, window_of
from drafters.export.mtp import sizes_of
from drafters.export.shapes import (
    default_taps,
    draft_ids,
    embedding_of,
    layer_settings,
    read_vocab_maps,
    same_rows,
    taps_of,
)
from drafters.hf.mtp_weights import Arrangement, final_norm, read

MTP = "mtp_layers."  # prefix of MTP layers
TRAINED_MTP = Arrangement(hidden_first=False, before_norm=True, norm_output=True)  # as speculators trains it
# model_type of an MTP layer -> whether its norms are zero-centred, and transformers' default of the share of
# a head that is rotated.
MTP_LAYERS = {"qwen3": (False, 1.0), "qwen3_next": (True, 0.25), "qwen3_5_text": (True, 0.25)}
SHARED = ("embed_tokens.weight", "d2t", "t2d")
Read = Callable[[Layout, Target], Saved]


def eagle3(layout: Layout, target: Target) -> Saved:
    """Convert an `Eagle3DraftModel`."""
    settings, weights = _eagle3(layout, target)
    if not _shares_embedding(layout.tensors, target):
        raise UserError("it has its own embedding; ours shares the target's")
    settings["norm_output"] = layout.config.get("norm_output", False)
    return Saved("eagle3", settings, weights)


def p_eagle(layout: Layout, target: Target) -> Saved:
    """Convert a `PEagleDraftModel`."""
    settings, weights = _eagle3(layout, target)
    weights |= read_masks(layout.tensors, weights, settings, layout.config["mask_token_id"], target)
    return Saved("p_eagle", settings, weights)


def read_masks(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    token: int,
    target: Target,
) -> dict[str, Tensor]:
    """P-EAGLE's masks by our names: an embedding, and what `fc` and its norms make of `mask_hidden`.

    Args:
        tensors: on file.
        weights: by our names.
        settings: of the drafter.
        token: whose embedding is the mask's.
        target: of the drafter.

    Raises:
        UserError: no token of the target, or an embedding that was trained.
    """
    check_mask_token(token, target)
    table = tensors.get("embed_tokens.weight", embedding_of(target))
    if not _shares_embedding(tensors, target, token):
        raise UserError("its embedding was trained; ours shares the target's, except for the mask's row")
    taps = tensors["mask_hidden"].flatten().unflatten(0, (len(settings["taps"]), -1)).float()  # (L, D)
    eps, fc = settings["eps"], weights["fc.weight"].float()
    if settings["fc_norm"]:
        rows = [weights[f"fc_norm.{i}.weight"].float() for i in range(len(taps))]
        taps = F.rms_norm(taps, taps.shape[1:], eps=eps) * torch.stack(rows)
    flat = taps.flatten()
    if settings["norm_before_fc"]:
        flat = F.rms_norm(flat, flat.shape, weights["input_norm.weight"].float(), eps)
    return {"mask_token": table[token].detach().clone(), "mask_hidden": fc @ flat}


def check_mask_token(token: int, target: Target) -> None:
    """Check that a mask is a token of the target.

    Raises:
        UserError: it is none.
    """
    if not 0 <= token < target.vocab_size:
        raise UserError(f"its mask is token {token}, and the target has ids 0 to {target.vocab_size - 1}")


def dflash(layout: Layout, target: Target) -> Saved:
    """Convert a `DFlashDraftModel`."""
    config = layout.config
    if config.get("sample_from_anchor"):
        raise UserError("its root predicts a token (sample_from_anchor), and ours does not")
    ids, layers = config["aux_hidden_state_layer_ids"], config["transformer_layer_config"]
    # By default, blocks are bidirectional in vLLM; in speculators, blocks with a window are causal.
    windowed = window_of(layers) is not None
    causal = windowed and not config.get("sliding_window_non_causal", False)
    return dflash_block(layout, target, layers, ids, config["mask_token_id"], causal)


def dspark(layout: Layout, target: Target) -> Saved:
    """Convert a `DSparkDraftModel`."""
    config = layout.config
    taps, layers = config["aux_hidden_state_layer_ids"], config["transformer_layer_config"]
    anchor = config.get("sample_from_anchor", False)  # default as in vLLM and llama.cpp
    return dspark_block(layout, target, layers, taps, config["mask_token_id"], anchor)


def dspark_block(
    layout: Layout, target: Target, layers: Mapping[str, Any], taps: list[int], token: int, anchor: bool
) -> Saved:
    """Convert DSpark's tensors; see `dflash_block`.

    Args:
        layout: files on disk.
        target: of the drafter.
        layers: config of its decoder layers.
        taps: as layer ids.
        token: id of the mask token.
        anchor: whether the root predicts the first token.
    """
    config, tensors = layout.config, dict(layout.tensors)
    if (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
        raise UserError(f"its markov_head_type is {kind!r}; only 'vanilla' is read, as in vLLM and llama.cpp")
    if (rank := config["markov_rank"]) < 1:
        raise UserError(f"its markov_rank is {rank}; a DSpark needs at least 1")
    bias = tensors.pop("markov_head.markov_w2.weight")
    found = draft_ids(tensors, len(bias), target.vocab_size)
    weights = {
        "info.emb.weight": tensors.pop("markov_head.markov_w1.weight"),
        "info.out.weight": bias if found is None else bias[found[1]],
    }
    weight, bias = (tensors.pop(f"confidence_head.proj.{part}", None) for part in ("weight", "bias"))
    has_confidence = bool(config.get("enable_confidence_head")) and weight is not None
    if has_confidence and weight is not None:
        # A head that reads only the hidden state gets weights of 0 for the token's row.
        weights["confidence.weight"] = F.pad(weight[0], (0, target.hidden_size + rank - weight.shape[1]))
        weights["confidence.bias"] = weight.new_zeros(1) if bias is None else bias
    plain = Layout({**config, "draft_vocab_size": len(weights["info.out.weight"])}, tensors)
    _, settings, block = dflash_block(plain, target, layers, taps, token, causal=False)[:3]
    settings = dict(settings)
    if settings["window"] is not None:
        raise UserError("its layers have a window; a DSpark here sees the whole text")
    del settings["causal"]  # only DFlash has it
    more = {
        "depth": config["block_size"] - (not anchor),
        "markov_rank": rank,
        "sample_from_anchor": anchor,
    }
    return Saved("dspark", {**settings, **more}, block | weights, has_confidence)


def dflash_block(
    layout: Layout,
    target: Target,
    layers: Mapping[str, Any],
    taps: list[int],
    token: int,
    causal: bool,
) -> Saved:
    """Convert DFlash's tensors, given the parts of its config.

    Args:
        layout: files on disk.
        target: of the drafter.
        layers: config of its decoder layers.
        taps: as layer ids.
        token: id of the mask token.
        causal: whether a position of a block sees none after it.
    """
    config, tensors = layout.config, dict(layout.tensors)
    sizes = layer_settings(layers, tensors, target, ("qwen3",))
    count = config.get("draft_vocab_size") or target.vocab_size
    found = draft_ids(tensors, count, target.vocab_size)
    head = target.head.weight
    if found is not None and "lm_head.weight" in tensors:
        ids, order = found
        head, tensors["lm_head.weight"] = head[ids.to(head.device)], tensors["lm_head.weight"][order]
    _drop_tables(tensors, target, head)
    check_mask_token(token, target)
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    weights = join_projections(tensors)
    weights["context_norm.weight"] = weights.pop("hidden_norm.weight")
    settings = sizes | {"taps": taps_of(taps, target), "depth": config["block_size"] - 1, "anchors": 0}
    settings["draft_vocab_size"] = None
    if found is not None and count < target.vocab_size:
        settings["draft_vocab_size"], weights["d2t"] = count, found[0]
    return Saved("dflash", settings | {"mask_id": token, "causal": causal}, weights)


def mtp(layout: Layout, target: Target) -> Saved:
    """Convert an `MTPDraftModel`: MiMo's names, with the arrangement in which speculators trains.

    It reads the state before the target's final norm, where vLLM passes the one after it to a head that
    `stitch-mtp` has put into the target's files.
    """
    config, tensors = layout.config["transformer_layer_config"], dict(layout.tensors)
    check_target(config, {}, target)
    if (kind := config["model_type"]) not in MTP_LAYERS:
        known = ", ".join(MTP_LAYERS)
        raise UserError(f"its MTP layer is of model_type {kind!r}; supported are {known}, without experts")
    _drop_tables(tensors, target, target.head.weight)
    own = {f"model.{name}": value for name, value in tensors.items() if name.startswith(MTP)}
    check_tensor_names({name for name in tensors if f"model.{name}" not in own}, ())
    if (head := read(own, target)) is None:
        raise UserError(f"no MTP head among its tensors ({MTP}*)")
    if (norm := final_norm(target)) is None:
        raise UserError("it reads the state before the target's final norm, which is no RMS norm here")
    centred, rotated = MTP_LAYERS[kind]
    settings = sizes_of({"partial_rotary_factor": rotated, **config}, head.settings) | TRAINED_MTP._asdict()
    settings |= {"family": "qwen", "zero_centred": centred, "depth": _depth(layout.config)}
    weights = head.weights | {"target_scale": norm.scale.to(head.weights["fc.weight"])}
    return Saved("mtp", settings, weights)


KINDS: Mapping[str, Read] = {
    "eagle3": eagle3,
    "peagle": p_eagle,
    "dflash": dflash,
    "dspark": dspark,
    "mtp": mtp,
}


def _read(layout: Layout, target: Target) -> Saved:
    kind = layout.config["speculators_model_type"]
    if kind not in KINDS:
        raise UserError(f"speculators_model_type {kind!r} has no drafter here; known are {', '.join(KINDS)}")
    return KINDS[kind](layout, target)


READER = Reader("speculators", lambda config: "speculators_model_type" in config, _read)


def _eagle3(layout: Layout, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights that EAGLE-3 and P-EAGLE share."""
    config, tensors = layout.config, dict(layout.tensors)
    layers = config["transformer_layer_config"]
    sizes = layer_settings(layers, tensors, target, ("llama", "qwen3"), biases=True)
    if (size := config.get("target_hidden_size")) is not None:
        check_size("hidden size", target.hidden_size, size)
    taps = config.get("eagle_aux_hidden_state_layer_ids") or default_taps(len(target.layers))
    own = {name: value for name, value in tensors.items() if name not in SHARED}
    own, biases = split_biases(own, layers)
    weights = join_projections(own)
    weights["hidden_norm.weight"] = weights.pop("layers.0.hidden_norm.weight")
    read_vocab_maps(tensors, weights, target.vocab_size)
    settings = {
        **sizes,
        **biases,
        "taps": taps_of(taps, target),
        "depth": _depth(config),
        "draft_vocab_size": config["draft_vocab_size"],
        # Defaults as in vLLM.
        "norm_before_residual": config.get("norm_before_residual", "mask_token_id" not in config),
        "norm_before_fc": config.get("norm_before_fc", False),
        "fc_norm": config.get("fc_norm", False),
        "qk_norm": layers.get("model_type") == "qwen3",
    }
    return settings, weights


def _depth(config: Mapping[str, Any]) -> int:
    """Draft length that a config names first."""
    return config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]


def _drop_tables(tensors: dict[str, Tensor], target: Target, head: Tensor) -> None:
    """Remove copies of the target's embedding and (rows of its) head.

    Raises:
        UserError: they are others.
    """
    tables = {"embed_tokens.weight": embedding_of(target), "lm_head.weight": head}
    for name, table in tables.items():
        if name in tensors and not same_rows(tensors.pop(name), table):
            raise UserError(f"it has its own {name}; ours shares the target's")


def _shares_embedding(tensors: Mapping[str, Tensor], target: Target, except_row: int | None = None) -> bool:
    table = tensors.get("embed_tokens.weight")
    return table is None or same_rows(table, embedding_of(target), except_row)
