"""Export to the format of vLLM's `speculators`. It names the target, so `vllm serve <drafter>` serves both.

Follows speculators 0.9.0 (`models/*/config.py`, `models/*/core.py`) and vLLM's reader
(`transformers_utils/configs/speculators`). SGLang silently skips its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import Target
from drafters.export.layout import (
    Format,
    Layout,
    Refusal,
    Saved,
    engine_biases,
    split_projections,
    trained_depth,
    without_confidence,
)
from drafters.export.llama_config import check_embedding, check_head, check_qwen3_bias, check_window
from drafters.export.shapes import (
    check_path,
    check_taps,
    dtype_of,
    embedding_of,
    layer_config,
    sort_taps,
    target_path,
    vocab_maps,
)
from drafters.vocabulary import unused_token

STEPS = 200  # limit for Newton's method
CLOSE = 1e-9  # tolerance of mean squares

VERSION = "0.9.0"  # of the format
SERVE = "vllm serve {drafter}"
VLLM_TAPS = 3  # default number of taps of vLLM's EAGLE-3
MASKS = ("mask_token", "mask_hidden")  # of P-EAGLE
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")
MARKOV = {
    "markov_head.markov_w1.weight": "info.emb.weight",
    "markov_head.markov_w2.weight": "info.out.weight",
}


def _check(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from check_path(target)
    yield from check_embedding(target)
    yield from check_taps(settings["taps"], target)
    yield from check_window(settings, target)
    yield from check_qwen3_bias(settings)


def _check_p_eagle(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check(settings, target)
    yield from check_masks(settings)


def check_masks(settings: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse a P-EAGLE whose masks no input of `fc` can produce."""
    norms = [name for name in ("norm_before_fc", "fc_norm") if settings[name]]
    if norms and len(settings["taps"]) == 1:
        yield Refusal(f"{norms[0]} of a single tap cannot produce the masks", dict.fromkeys(norms, False))


def _check_dflash(settings: Mapping[str, Any], target: Target) -> Iterator[Refusal]:
    yield from _check(settings, target)
    yield from check_head(target)
    if settings.get("causal") and settings.get("window") is None:
        yield Refusal("speculators' blocks without a window are bidirectional", {"causal": False})


def _eagle3(saved: Saved, target: Target) -> Layout:
    """EAGLE-3: `Eagle3DraftModel`.

    Includes the target's embedding: vLLM shares it in any case, but speculators 0.9.0 uses zeros if it is
    missing (`load_verifier_weights` looks for NaN, which transformers 5 does not leave).
    """
    saved, ids = sort_taps(saved)
    tensors = _eagle3_tensors(saved) | {"embed_tokens.weight": _table(saved, target)}
    config = _eagle3_config(saved, ids, target) | {"norm_output": saved.settings["norm_output"]}
    return _layout("eagle3", "Eagle3DraftModel", config, tensors, saved, target)


def _p_eagle(saved: Saved, target: Target) -> Layout:
    """P-EAGLE: `PEagleDraftModel`."""
    saved, ids = sort_taps(saved)
    token, masks, rest = split_masks(saved, target, "speculators")
    tensors = _eagle3_tensors(rest) | masks
    config = _eagle3_config(saved, ids, target) | {"norm_output": False, "mask_token_id": token}
    config["embed_requires_grad"] = True
    # vLLM's reader reads this key from the layers' config only.
    config["transformer_layer_config"] |= {"fc_norm": saved.settings["fc_norm"]}
    return _layout("peagle", "PEagleDraftModel", config, tensors, saved, target)


def split_masks(saved: Saved, target: Target, to: str) -> tuple[int, dict[str, Tensor], Saved]:
    """Masks of a P-EAGLE as files store them; the inverse of `read_masks`.

    The mask for tokens is the row of an unused token in a copy of the target's embedding. The mask for
    features is an input of `fc`, found by `invert_fusion`.

    Args:
        saved: the drafter.
        target: of the drafter.
        to: the program, for messages.

    Returns:
        The unused token, the tensors, and the drafter without masks.

    Raises:
        UserError: no input of `fc` gives the mask.
    """
    settings, weights = saved.settings, saved.weights
    token = unused_token(target)
    table = _table(saved, target)
    table[token] = weights["mask_token"]
    if settings["norm_before_fc"]:
        norms = [weights["input_norm.weight"]]
    else:
        norms = [weights[f"fc_norm.{i}.weight"] for i in range(len(settings["taps"]) * settings["fc_norm"])]
    mask_taps = invert_fusion(weights["mask_hidden"], weights["fc.weight"], norms, settings["eps"])
    if mask_taps is None:
        norm = "norm_before_fc" if settings["norm_before_fc"] else "fc_norm"
        raise UserError(
            f"to={to}: no input of fc and its norms produces this checkpoint's masks; train with "
            f"drafter.{norm}=false, or set to=native"
        )
    masks = {"embed_tokens.weight": table, "mask_hidden": mask_taps.to(table.dtype)[None, None]}
    return token, masks, saved._replace(weights={k: v for k, v in weights.items() if k not in MASKS})


def _dflash(saved: Saved, target: Target) -> Layout:
    """DFlash: `DFlashDraftModel`, without embedding; for a reduced draft vocabulary as `_dspark`."""
    saved, ids = sort_taps(saved)
    settings = saved.settings
    tensors = with_rows_as_head(block_tensors(saved), target)
    config = {
        "aux_hidden_state_layer_ids": ids,
        "block_size": settings["depth"] + 1,
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else target.vocab_size,
        "mask_token_id": settings["mask_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": not settings.get("causal", False),  # vLLM also reads it without a window
        "transformer_layer_config": block_config(saved, target),
    }
    return _layout("dflash", "DFlashDraftModel", config, tensors, saved, target)


def _dspark(saved: Saved, target: Target) -> Layout:
    """DSpark: `DSparkDraftModel`; for a reduced draft vocabulary with the target's rows as head."""
    saved, ids = sort_taps(saved)
    config = {
        "aux_hidden_state_layer_ids": ids,
        "mask_token_id": saved.settings["mask_id"],
        "sliding_window_non_causal": True,
        "transformer_layer_config": block_config(saved, target),
    }
    full_config = config | dspark_config(saved, target)
    return _layout("dspark", "DSparkDraftModel", full_config, dspark_tensors(saved, target), saved, target)


def block_config(saved: Saved, target: Target) -> dict[str, Any]:
    """Config of DFlash's decoder layers."""
    kinds = ["full_attention"] * saved.settings["layers"]
    return {"layer_types": kinds, "use_sliding_window": False} | layer_config(saved, target, "qwen3")


def block_tensors(saved: Saved) -> dict[str, Tensor]:
    """DFlash's tensors by the names that all programs use."""
    tensors = split_projections(without_confidence(saved), saved.settings)
    tensors["hidden_norm.weight"] = tensors.pop("context_norm.weight")
    return tensors


def dspark_config(saved: Saved, target: Target) -> dict[str, Any]:
    """Config keys that DSpark adds to DFlash's in all programs."""
    settings = saved.settings
    return {
        "block_size": settings["depth"] + (not settings["sample_from_anchor"]),
        "confidence_head_with_markov": saved.confidence,
        "draft_vocab_size": settings["draft_vocab_size"] or target.vocab_size,
        "enable_confidence_head": saved.confidence,
        "markov_head_type": "vanilla",
        "markov_rank": settings["markov_rank"],
        "num_anchors": settings["anchors"],
        "sample_from_anchor": settings["sample_from_anchor"],
    }


def dspark_tensors(saved: Saved, target: Target) -> dict[str, Tensor]:
    """DSpark's tensors by the names that all programs use."""
    tensors = block_tensors(saved)
    for name, part in MARKOV.items():
        tensors[name] = tensors.pop(part)
    if saved.confidence:
        tensors["confidence_head.proj.weight"] = saved.weights["confidence.weight"][None]
        tensors["confidence_head.proj.bias"] = saved.weights["confidence.bias"]
    return with_rows_as_head(tensors, target)


def with_rows_as_head(tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Tensors with the maps of a reduced draft vocabulary `d2t`, if there is one, and the target's rows."""
    ids = tensors.pop("d2t", None)
    if ids is not None and (maps := vocab_maps(ids, target.vocab_size)):
        head = target.head.weight.detach()[ids.to(target.head.weight.device)]
        tensors |= maps | {"lm_head.weight": head.to(tensors["fc.weight"])}
    return tensors


def _table(saved: Saved, target: Target) -> Tensor:
    """Copy of the target's (V, D) embedding."""
    return embedding_of(target).to("cpu", saved.weights["fc.weight"].dtype, copy=True)


def _eagle3_tensors(saved: Saved) -> dict[str, Tensor]:
    tensors = engine_biases(split_projections(without_confidence(saved), saved.settings), saved.settings)
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
    ids = tensors.pop("d2t", None)
    return tensors | vocab_maps(ids, saved.settings["vocab_size"])


def _eagle3_config(saved: Saved, ids: list[int], target: Target) -> dict[str, Any]:
    settings = saved.settings
    layers = layer_config(saved, target, "qwen3" if settings.get("qk_norm") else "llama")
    if len(ids) != VLLM_TAPS:  # vLLM's reader assumes three
        layers["num_aux_hidden_states"] = len(ids)
    return {name: settings[name] for name in NORMS} | {
        "draft_vocab_size": settings["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": ids,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "transformer_layer_config": layers,
    }


def _layout(
    kind: str,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    saved: Saved,
    target: Target,
) -> Layout:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": saved.settings["depth"],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": target_path(target),
        "architectures": list(
            getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
        ),
    }
    # No `model_type`: with one, vLLM would load the folder as a model.
    full_config = config | {
        "architectures": [architecture],
        "dtype": dtype_of(tensors),
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "tie_word_embeddings": False,
    }
    return Layout(full_config, tensors, SERVE)


def invert_fusion(feature: Tensor, fc: Tensor, norms: list[Tensor], eps: float) -> Tensor | None:
    """Find a vector m with fc(norms(m)) = feature.

    With u = norms(m) / weights this is a linear system, and each norm's part of u lies on a sphere. Solved
    by Newton's method on the radii, within the solutions of the system.

    Args:
        feature: (D,).
        fc: (D, L * D).
        norms: weights of the RMS norms, which split the L * D inputs; empty without norms.
        eps: of the norms.

    Returns:
        (L * D,) in fp64; None if there is no solution or no convergence.
    """
    feature = feature.double()
    system = fc.double() * (torch.cat(norms).double() if norms else 1.0)
    gram, info = torch.linalg.cholesky_ex(system @ system.T)
    if info:
        return None

    def least(x: Tensor) -> Tensor:
        """(D, n) -> (L * D, n) minimum-norm solution of the system."""
        return system.T @ torch.cholesky_solve(x, gram)

    def free(x: Tensor) -> Tensor:
        """Projection of (L * D, n) onto the null space of the system."""
        return x - least(system @ x)

    base = least(feature[:, None])
    if not norms:
        return base[:, 0]
    generator = torch.Generator().manual_seed(0)
    u = base + free(torch.randn(len(base), 1, generator=generator, dtype=torch.float64))
    radius = 1 / (1 + eps)  # mean square of an RMS norm's output, for an input with mean square 1
    for _ in range(STEPS):
        parts = u[:, 0].split([len(norm) for norm in norms])
        deviation = torch.stack([part.square().mean() - radius for part in parts])  # (norms,)
        if deviation.abs().max() < CLOSE:
            return u[:, 0] * (1 + eps) ** 0.5
        slopes = free(torch.block_diag(*[2 * part[:, None] / len(part) for part in parts]))  # (L * D, norms)
        step = slopes @ torch.linalg.lstsq(slopes.T @ slopes, deviation[:, None]).solution
        u = u - step * min(1.0, float(u.norm() / (2 * step.norm() + 1e-30)))
    return None


EAGLE3 = Format(_eagle3, _check, trained_depth)
P_EAGLE = Format(_p_eagle, _check_p_eagle, trained_depth)
DFLASH = Format(_dflash, _check_dflash, trained_depth)
DSPARK = Format(_dspark, _check_dflash, trained_depth)
