"""Account of a model's tensors: tensors in the files that became weights, and the others by kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from decode.model.files.account import Account
from decode.model.files.folder import ModelFiles
from decode.model.files.stored import Stored, same_values, stored_tensors, unindexed

DEQUANTISED = ("fp8", "mxfp4", "compressed-tensors")  # methods that transformers dequantises while loading
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# Parts of a layer for multi-token prediction (DeepSeek-V3, section 2.2, and its successors).
DRAFTING = re.compile(r"(?:^|\.)(?:eh_proj|enorm|hnorm|shared_head)\.")
DRAFTING_NAME = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
SENSES = re.compile(
    r"^(?:model\.)?(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|embed_vision|embed_audio)\."
)
OTHER_TASKS = re.compile(
    r"^(?:v_head|value_head|score|classifier|qa_outputs|cls\.seq_relationship|(?:\w+\.)?pooler)\."
)
ENGINE_SCALES = re.compile(r"\.(?:[qkv]_scale|[qkv]_zero_point|input_scale|output_scale)$")
SCALE = re.compile(r"(?:\.weight)?[._]scales?(?:_\w+)?$")  # suffix of the scaled weight's name
CLOSE = 1e-2  # relative: old files store angles in half precision
MASKED = -1e3  # old classes stored lower values for masked scores


def add_tensors(
    account: Account, model: Any, info: Mapping[str, Any], files: ModelFiles, method: str = ""
) -> None:
    """Add the tensors of a model's files to the account of its weights.

    Args:
        account: from `stored.account_of_files`.
        model: as `from_pretrained` returned it.
        info: its loading info.
        files: files that it was loaded from.
        method: of quantisation, from config.json; "" if none.

    Raises:
        UserError: a file is damaged.
    """
    found, twice = stored_tensors(files)
    state = model.state_dict()
    places, whole = _places(model, found, state)
    ignored = _ignored(model)
    unread = {
        name: place
        for name, place in places.items()
        if place not in state and (place in info["unexpected_keys"] or ignored(place))
    }
    account.count("tensors", len(found) - len(unread))
    kinds = _Kinds(model, found, bool(method))
    for name, place in unread.items():
        kinds.add(account, name, place)
    # Names that transformers reports as unexpected but that were not found here.
    _refuse(account, model, sorted(set(info["unexpected_keys"]) - set(places.values())))
    account.refuse("named by the index, and no file has them", unindexed(files, found))
    for one, other in [*twice, *((found[a], found[b]) for a, b in _same_place(whole, state))]:
        label = one.name if one.name == other.name else f"{one.name} and {other.name}"
        if same_values(one, other):
            account.ignore("stored twice, with the same values", [label])
        else:
            account.refuse("two tensors for one weight, with different values", [label])
    _check_tied(account, model, found, places)
    if method in DEQUANTISED:
        left = [name for name, place in places.items() if place in state and _is_small(state[place])]
        account.refuse("in 8 bits, without their scales", dict.fromkeys([*left, *_without_scales(found)]))
    if not method:
        account.refuse(
            "stored as integers or in 8 bits, and config.json has no quantization_config with their scales",
            [
                name
                for name, place in places.items()
                if place in state
                and state[place].is_floating_point()
                and found[name].dtype[:2] not in _FLOATS
            ],
        )


def _without_scales(found: Mapping[str, Stored]) -> list[str]:
    """8-bit weights without a scale in the files; some versions of transformers read them unscaled."""
    scaled = {SCALE.sub("", name) for name in found if SCALE.search(name)}
    return [
        name
        for name, stored in found.items()
        if stored.dtype in ("F8_E4M3", "F8_E5M2") and name.removesuffix(".weight") not in scaled
    ]


def add_outer_names(
    account: Account, model: Any, names: Mapping[str, str], locate: Callable[[str], Path | None]
) -> None:
    """Add the tensors outside the layers, for a model with layers that run in an engine.

    Args:
        account: from `stored.account_of_files`.
        model: with the embedding, the final norm and the head.
        names: tensor -> file.
        locate: path of a file.
    """
    outer = [name for name in names if _layer(name) is None]
    state = model.state_dict()
    places, _ = _places(model, outer, state)
    kinds = _Kinds(model, {}, bool(getattr(model.config, "quantization_config", None)))
    tails = {_tail(name) for name in state}  # other programs write other prefixes
    for name, place in places.items():
        if place not in state and _tail(name) not in tails:
            kinds.add(account, name, place)
    found = {name: Stored(path, name, "") for name in outer if (path := locate(names[name])) is not None}
    _check_tied(account, model, found, {name: places[name] for name in found})


_FLOATS = ("BF", "F1", "F3", "F6")  # BF16, F16, F32, F64


def _places(
    model: Any, found: Iterable[str], state: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """The model's name for each name in the files, by transformers' renaming rules.

    Returns:
        Model name by file name; and the subset for tensors that are a whole weight.
    """
    known = get_model_conversion_mapping(model, None, getattr(model, "hf_quantizer", None))
    renamings: Any = [entry for entry in known if isinstance(entry, WeightRenaming)]
    converters: Any = [entry for entry in known if isinstance(entry, WeightConverter)]
    prefix, expected = model.base_model_prefix, dict(state)
    places: dict[str, str] = {}
    whole: dict[str, str] = {}
    for name in found:
        place, part = rename_source_key(name, renamings, converters, prefix, expected)
        if place not in state and name in state:
            place, part = name, None
        places[name] = place
        if part is None:
            whole[name] = place
    return places, whole


def _ignored(model: Any) -> Any:
    """Predicate: transformers silently drops this unexpected name."""
    # private API: the only list of silently dropped names
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"position_ids$"]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)).search


def _same_place(whole: Mapping[str, str], state: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of file names that map to the same whole weight."""
    first: dict[str, str] = {}
    pairs = []
    for name, place in whole.items():
        if place in state:
            if place in first:
                pairs.append((first[place], name))
            first.setdefault(place, name)
    return pairs


def _refuse(account: Account, model: Any, names: Iterable[str]) -> None:
    account.refuse(
        f"{type(model).__name__} has no place for them under this config.json, and without them it is "
        "another model; correct config.json, or give the folder that the weights were saved with",
        names,
    )


class _Kinds:
    """Classifies unread tensors.

    Args:
        model: model that did not read them.
        found: tensors of the files.
        quantised: whether config.json says that they are quantised.
    """

    def __init__(self, model: Any, found: Mapping[str, Stored], quantised: bool) -> None:
        self.model, self.found, self.quantised = model, found, quantised
        self.buffers = dict(model.named_buffers())
        config = model.config.get_text_config()
        self.layers = config.num_hidden_layers
        drafting = (layer for name in found if DRAFTING.search(name) and (layer := _layer(name)) is not None)
        self.drafting = {layer for layer in drafting if layer >= self.layers}

    def add(self, account: Account, name: str, place: str) -> None:
        """Add one tensor to the account."""
        if _layer(name) in self.drafting or DRAFTING_NAME.search(name):
            account.remark("layers for multi-token prediction, which the class omits", [name])
        elif SENSES.search(name):
            account.remark("for images or sound; only text is read here", [name])
        elif OTHER_TASKS.search(name):
            account.ignore("of another task; the head for tokens does not read it", [name])
        elif self.quantised and ENGINE_SCALES.search(name):
            account.remark(
                "scales of activations or of an engine's cache, which are not applied here", [name]
            )
        elif self._computed(name, place):
            account.ignore("computed again by the class, with the same values", [name])
        else:
            _refuse(account, self.model, [name])

    def _computed(self, name: str, place: str) -> bool:
        """Whether it is a buffer that the class computes itself, with equal values."""
        last = name.split(".")[-1]
        if last not in ("inv_freq", "position_ids", "bias", "masked_bias") and place not in self.buffers:
            return False
        if name not in self.found:  # its values are not on this machine
            return last in ("inv_freq", "position_ids")
        stored = self.found[name].read()
        if last == "masked_bias":
            return stored.numel() == 1 and float(stored) <= MASKED
        if place in self.buffers:
            return _close(stored, self.buffers[place])
        if last == "inv_freq":
            same = (value for key, value in self.buffers.items() if key.split(".")[-1] == last)
            return any(_close(stored, value) for value in (*same, *_plain_angles(self.model, stored)))
        if last == "position_ids":
            return bool((stored.flatten() == torch.arange(stored.numel())).all())
        square = stored.dim() == 4 and stored.shape[-1] == stored.shape[-2]  # a causal mask
        return square and bool((stored.bool() == torch.ones_like(stored, dtype=torch.bool).tril()).all())


def _tail(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _is_small(weight: Tensor) -> bool:
    return weight.dtype.itemsize < 2


def _layer(name: str) -> int | None:
    match = LAYER.search(name)
    return int(match[1]) if match else None


def _close(stored: Tensor, value: Tensor) -> bool:
    same = stored.shape == value.shape and not value.is_meta
    return same and torch.allclose(stored.double(), value.double().cpu(), rtol=CLOSE, atol=0)


def _plain_angles(model: Any, stored: Tensor) -> list[Tensor]:
    """Rotary angles before scaling, as in old files."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    theta, size = rope.get("rope_theta"), stored.numel()
    return [theta ** -(torch.arange(size, dtype=torch.float64) / size)] if theta else []


def _check_tied(account: Account, model: Any, found: Mapping[str, Stored], places: Mapping[str, str]) -> None:
    """Refuse a stored head that differs from the embedding tied to it in config.json."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    configs = (model.config, model.config.get_text_config())
    if head is None or not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return
    modules = {module: name for name, module in model.named_modules()}
    if head not in modules or embedding not in modules:
        return
    wanted = [f"{modules[module]}.weight" for module in (head, embedding)]
    names = [next((name for name, place in places.items() if place == want), None) for want in wanted]
    if None in names:
        return
    one, other = (found[str(name)] for name in names)
    if same_values(one, other):
        account.ignore("tied to the embedding, with the same values", [one.name])
    else:
        account.refuse(
            f"differs from {other.name}, to which tie_word_embeddings of config.json ties it; set it to "
            "false if the stored head is meant, else remove the tensor",
            [one.name],
        )
