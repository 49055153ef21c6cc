"""Convert layer sizes, taps and draft vocabularies between our settings and other programs' configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.model.target import LAST, Tap, Target
from drafters.export.layout import Refusal, Saved
from drafters.export.llama_config import check_target, config_of, sizes


def layer_config(saved: Saved, target: Target, kind: str) -> dict[str, Any]:
    """The transformers config of a drafter's decoder layers, for a `model_type`."""
    settings = saved.settings
    dtype = next(weight.dtype for weight in saved.weights.values() if weight.is_floating_point())
    return config_of(settings, settings["layers"], target, dtype) | {"model_type": kind}


def layer_settings(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Target,
    kinds: Sequence[str],
    biases: bool = False,
) -> dict[str, Any]:
    """The inverse of `layer_config`: arguments of our constructors.

    Args:
        config: transformers config of the layers.
        tensors: by their names on file.
        target: of the drafter.
        kinds: supported values of `model_type`.
        biases: whether attention may have biases, which the caller reads.

    Raises:
        UserError: another target's sizes, or unsupported layers.
    """
    check_target(config, {}, target)
    kind = config.get("model_type", "llama")
    if kind not in kinds:
        raise UserError(f"its layers are of model_type {kind!r}; supported are {' and '.join(kinds)}")
    for name in ("mlp_bias",) if biases else ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UserError(f"its layers have biases ({name}), and ours have none")
    more = {"vocab_size": target.vocab_size, "layers": config["num_hidden_layers"]}
    return sizes(config, tensors, "layers.0.") | more


def sort_taps(saved: Saved) -> tuple[Saved, list[int]]:
    """Sort the taps and reorder the weights that read them, since engines collect taps in layer order."""
    settings, weights = saved.settings, dict(saved.weights)
    ids, size = [int(tap) for tap in settings["taps"]], settings["hidden_size"]
    order = sorted(range(len(ids)), key=lambda i: ids[i])
    weights["fc.weight"] = weights["fc.weight"].unflatten(1, (-1, size))[:, order].flatten(1)
    if "input_norm.weight" in weights:
        weights["input_norm.weight"] = weights["input_norm.weight"].view(-1, size)[order].flatten()
    for new, old in enumerate(order):
        if (name := f"fc_norm.{old}.weight") in saved.weights:
            weights[f"fc_norm.{new}.weight"] = saved.weights[name]
    return saved._replace(weights=weights), [ids[i] for i in order]


def check_taps(
    taps: Sequence[Tap], target: Target, lowest: int = 0, least: int = 1, exactly: int | None = None
) -> Iterator[Refusal]:
    """Check that a program can collect the taps; engines collect inputs of different layers.

    Args:
        taps: of the drafter.
        target: of the drafter.
        lowest: lowest layer id that the program can tap.
        least: minimum number of taps.
        exactly: required number of taps; None: any from `least` on.
    """
    reasons = []
    if LAST in taps:
        reasons.append("engines pass drafters no value from after the final norm (last)")
    if len(set(taps)) < len(taps):
        reasons.append("one is listed twice, and engines collect it once")
    if any(tap != LAST and int(tap) < lowest for tap in taps):
        reasons.append("the program numbers outputs of layers, and tap 0 is the embedding")
    if len(taps) < least:
        reasons.append("the program skips fc for a single tap, which is as wide as a fed-back feature")
    if exactly and len(taps) != exactly:
        reasons.append(f"the program reads exactly {exactly} layers")
    if reasons:
        least = exactly or least
        nearest = _nearest_taps(taps, len(target.layers), lowest, least)
        if exactly and len(nearest) > exactly:  # the lowest and the highest among them
            nearest = [nearest[i * (len(nearest) - 1) // (exactly - 1)] for i in range(exactly)]
        train = {"taps": nearest} if len(nearest) >= least else {}
        yield Refusal(f"drafter.taps={list(taps)}: {'; '.join(reasons)}", train)


def _nearest_taps(taps: Sequence[Tap], n: int, lowest: int, least: int) -> list[int]:
    """The configured taps that a program can collect, with more if they are too few."""
    layers = range(lowest, n)
    kept = {tap for tap in taps if tap in layers} | ({n - 1} if LAST in taps else set())
    for tap in (n - 1, n // 2, *layers):
        if len(kept) < max(1, least) and tap in layers:
            kept.add(tap)
    return sorted(int(tap) for tap in kept if tap in layers)


def taps_of(ids: Sequence[int], target: Target) -> list[int]:
    """Check layer ids and return them as taps.

    Raises:
        UserError: a layer that the target does not have.
    """
    n = len(target.layers)
    if not ids or not all(0 <= i < n for i in ids):
        raise UserError(
            f"it reads the values entering layers {list(ids)}, and the target has layers 0 to {n - 1}"
        )
    return list(ids)


def check_path(target: Target) -> Iterator[Refusal]:
    """Refuse a target without path or hub id, for files that name it."""
    if not target.model.name_or_path:
        yield Refusal("the files name the target, and this one was built in memory, without a path or hub id")


def target_path(target: Target) -> str:
    """Path or hub id for other programs to load the target."""
    name = target.model.name_or_path
    assert name  # see `check_path`
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """Name of the weights' dtype in transformers."""
    return str(next(t.dtype for t in tensors.values() if t.is_floating_point())).removeprefix("torch.")


def embedding_of(target: Target) -> Tensor:
    """(V, D) embedding table of the target."""
    weight = target.embed.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def same_rows(theirs: Tensor, ours: Tensor, except_row: int | None = None) -> bool:
    """Whether two (V, D) tables are equal up to rounding, except in row `except_row`."""
    narrow = min(theirs.dtype, ours.dtype, key=lambda dtype: dtype.itemsize)
    equal = (theirs.to(narrow) == ours.to(theirs.device, narrow)).all(-1)
    if except_row is not None:
        equal[except_row] = True
    return theirs.shape == ours.shape and bool(equal.all())


def default_taps(n: int) -> list[int]:
    """The engines' default taps of EAGLE-3 for a target with n layers."""
    return [2, n // 2, n - 3]


def vocab_maps(ids: Tensor | None, size: int) -> dict[str, Tensor]:
    """Tensors `d2t` and `t2d` of a reduced draft vocabulary; none for a full vocabulary.

    Engines have these parameters only for a reduced vocabulary, and vLLM 0.32 refuses unknown tensors.

    Args:
        ids: (V',) target id of each draft id, ascending; None: all.
        size: V of the target.

    Returns:
        `d2t` (V',) offsets to add to draft ids, `t2d` (V,) whether a target id has a draft id.

    Raises:
        UserError: the vocabulary is not fitted yet.
    """
    if ids is None or len(ids) == size:
        return {}
    if (ids < 0).any():
        raise UserError("its draft vocabulary has not been counted; export a trained checkpoint")
    in_draft = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": in_draft}


def read_vocab_maps(tensors: Mapping[str, Tensor], weights: dict[str, Tensor], size: int) -> None:
    """The inverse of `vocab_maps`: sort the head by ids, and add the ids of a reduced one to `weights`.

    Raises:
        UserError: a reduced vocabulary with missing or invalid maps.
    """
    found = draft_ids(tensors, len(weights["lm_head.weight"]), size)
    if found is None:
        return
    ids, order = found
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    if len(ids) < size:
        weights["d2t"] = ids


def draft_ids(tensors: Mapping[str, Tensor], count: int, size: int) -> tuple[Tensor, Tensor] | None:
    """Target ids of a draft vocabulary, ascending, and the row of each in the files, (V',) both.

    Args:
        tensors: with `vocab_maps`, or without for the whole vocabulary.
        count: V', number of rows of the head.
        size: V of the target.

    Returns:
        None: there are no maps.

    Raises:
        UserError: a reduced vocabulary with missing or invalid maps.
    """
    if "d2t" not in tensors:
        if count < size:
            raise UserError(f"its head has {count} of {size} tokens, and d2t, which maps them, is missing")
        return None
    if len(tensors["d2t"]) != count:
        raise UserError(f"d2t has {len(tensors['d2t'])} tokens, and its head {count}")
    ids, order = (tensors["d2t"].long() + torch.arange(count)).sort()
    consistent = "t2d" not in tensors or tensors["t2d"].nonzero()[:, 0].equal(ids)
    if ids[0] < 0 or ids[-1] >= size or not bool((ids.diff() > 0).all()) or not consistent:
        raise UserError("d2t does not hold offsets from draft ids to target ids, or contradicts t2d")
    return ids, order
