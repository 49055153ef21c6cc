"""Save and load drafters: safetensors and a config.json, no executable content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from decode.errors import UserError
from decode.model.identity.fingerprint import check_current, module_fingerprint
from decode.model.load import load_tokenizer
from decode.model.target import Target
from drafters import optional
from drafters.base import Drafter, Origin
from drafters.checkpoint import validate
from drafters.checkpoint.folder import (
    DAMAGE_ERRORS,
    FORMAT,
    ORIGIN_KEYS,
    config_origin,
    first_line,
    is_native,
    read_config,
    read_saved,
)
from drafters.checkpoint.published import published
from drafters.export import formats, layout, weight_files
from drafters.export.layout import Saved
from drafters.hf import lora_files
from drafters.hub import NOTES, download
from drafters.hub.untrusted_files import is_hub_id, shape_of
from drafters.optional import AdoptsWeights, ConvertsWeights, SavesSeparately
from drafters.registry import drafter_class, short_name

FILES = (*layout.FILES, *lora_files.FILES, *weight_files.PATTERNS)


def origin_of(drafter: Drafter, target: Target, name: str = "", fingerprint: str = "") -> Origin:
    """Origin of a drafter of this target.

    Args:
        drafter: of the target.
        target: that it drafts for.
        name: instead of the path that the target was loaded from.
        fingerprint: of the target, if already computed.
    """
    where, revision = target.model.name_or_path or "", getattr(target.model.config, "_commit_hash", None)
    exports = tuple(formats.accepting(short_name(drafter), drafter.settings, target))
    tokenizer = tokenizer_hash(where, revision)
    known = published(target)
    return Origin(
        name or where,
        revision,
        fingerprint or target.fingerprint(),
        tokenizer,
        exports=exports,
        published=known.name,
        licence=known.licence,
    )


@lru_cache(maxsize=8)
def tokenizer_hash(name: str, revision: str | None, fetch: bool = False) -> str:
    """Hash of a model's vocabulary; "" if no tokenizer can be read."""
    try:
        words = load_tokenizer(name, revision, fetch=fetch).get_vocab() if name else {}
    except UserError:
        words = {}
    text = json.dumps(sorted(words.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if words else ""


def save(
    drafter: Drafter,
    target: Target | Origin,
    folder: Path,
    target_name: str = "",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    Frozen weights of other models are omitted; adapters are written in PEFT's format.

    Args:
        drafter: to save.
        target: the drafter's target, or its origin.
        folder: to write into.
        target_name: name of the target in config.json.
        weights: unsharded weights of a sharded drafter; None: the drafter's own.
    """
    weights = weights or drafter.state_dict()
    unsaved = optional.unsaved_names(drafter) | _tied(drafter).keys()
    saved = {k: v.detach().cpu().contiguous() for k, v in weights.items() if k not in unsaved}
    if isinstance(drafter, SavesSeparately):
        saved = drafter.save_separately(saved, folder)
    save_file(saved, folder / "model.safetensors")
    made_for = target if isinstance(target, Origin) else origin_of(drafter, target, target_name)
    drafter.origin = drafter.origin or made_for
    config = {
        "format": FORMAT,
        "drafter": short_name(drafter),
        "settings": drafter.settings,
        "confidence": drafter.confidence is not None,
        "taps": list(drafter.taps),
        "taps_mean": "the value entering decoder layer i; 'last' is the head's input",
        "target": {name: getattr(made_for, name) for name in ORIGIN_KEYS},
        "exports": list(made_for.exports),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def load(folder: str | Path, target: Target, same_weights: bool = True) -> Drafter:
    """Load a drafter saved by `save`, or in another format of `export.formats`.

    It is frozen, in the target's dtype and on its device.

    Args:
        folder: of the checkpoint.
        target: that it drafts for.
        same_weights: refuse a drafter that was made for a target with other weights. Its output would be
            correct, but few of its tokens accepted.

    Raises:
        UserError: a missing, damaged or outdated checkpoint, or one for another target; the base model of
            adapters is missing or has changed.
    """
    folder = Path(folder)
    config = read_config(folder)
    origin = config_origin(config)
    fingerprint = target.fingerprint()
    if same_weights and is_native(config):
        check_current(origin.fingerprint, f"{folder}")
        if origin.fingerprint != fingerprint:
            raise UserError(
                f"{folder}: this drafter was made for target {origin.name or '(unnamed)'!r} "
                "with other weights or another vocabulary; give that one as target="
            )
    saved = read_saved(folder, config, target)
    kind = drafter_class(saved.drafter)
    try:
        validate.check_target(saved.settings, target)
        if not is_native(config):  # native ones are validated in `read_saved`
            validate.check_settings(kind, saved.settings)
            validate.check_bounds(saved.settings, target)
            shapes = {name: shape_of(value) for name, value in saved.weights.items()}
            validate.check_shapes(kind, saved.settings, saved.confidence, shapes)
        drafter = kind.restore(dict(saved.settings), target)
        if saved.confidence:
            drafter.add_confidence()
        drafter.load_state_dict(_with_tied(drafter, saved.weights))
        validate.check_values(drafter, target.vocab_size)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except DAMAGE_ERRORS as error:
        raise UserError(f"{folder}: damaged checkpoint ({first_line(error)})") from None
    drafter = drafter.to(target.device, target.dtype).eval().requires_grad_(False)
    current = origin_of(drafter, target, fingerprint=fingerprint)
    drafter.origin = Origin(
        origin.name or current.name,
        origin.revision or current.revision,
        current.fingerprint,
        origin.tokenizer or current.tokenizer,
        folder,
        module_fingerprint(drafter),
        current.exports,
        origin.published or current.published,
        origin.licence or current.licence,
    )
    return drafter


def load_as_saved(folder: Path, target: Target) -> Drafter:
    """`load`, with weights in their dtype on file, for a part of a drafter that will be saved."""
    drafter = load(folder, target)
    if weights := weights_on_file(folder, drafter, target):
        drafter.load_state_dict(_with_tied(drafter, weights), assign=True)
    return drafter


def as_saved(drafter: Drafter) -> Saved:
    """Settings and weights of a drafter, for export."""
    unsaved = optional.unsaved_names(drafter)
    weights = {k: v.detach() for k, v in drafter.state_dict().items() if k not in unsaved}
    return Saved(short_name(drafter), drafter.settings, weights, drafter.confidence is not None)


def weights_on_file(folder: Path, drafter: Drafter, target: Target) -> dict[str, Tensor] | None:
    """Weights of a checkpoint in their dtype on file; None if their names differ from the drafter's."""
    saved = read_saved(folder, read_config(folder), target).weights
    names = drafter.state_dict().keys() - optional.unsaved_names(drafter) - _tied(drafter).keys()
    return saved if saved.keys() == names else None


def fetch(source: str, revision: str | None = None) -> Path:
    """The local folder of a drafter: `source` itself, or a download of the hub repository.

    Downloads only `FILES`, the scorecard and the recipe; weights after config.json is validated.

    Raises:
        UserError: neither a folder nor an accessible repository.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(source):
        raise UserError(
            f"checkpoint={source}: no config.json there; give a checkpoints/<step> folder, or a hub id "
            "(owner/name)"
        )
    small = [FILES[0], *NOTES]
    read_config(download.snapshot(source, revision, small))
    return download.snapshot(source, revision, [*FILES, *NOTES])


def warm_start(drafter: Drafter, folder: Path, target: Target) -> list[str]:
    """Copy weights and buffers of another drafter if names and shapes agree.

    The other drafter may have another target.

    Args:
        drafter: new; changed in place.
        folder: of a drafter of the same class, or of the class in `AdoptsWeights`; see `load`.
        target: of the new drafter.

    Returns:
        Tensors that were not copied: "name (shape here, there)", "name (not there)", "name (not here)".

    Raises:
        UserError: no checkpoint there, a damaged one, another class, or no tensor that fits.
    """
    config, kind = read_config(folder), short_name(drafter)
    saved = read_saved(folder, config, target)
    adopts = isinstance(drafter, AdoptsWeights) and saved.drafter == drafter.warm_starts_from
    if saved.drafter != kind and not adopts:
        raise UserError(f"drafter.init_from={folder}: drafter {saved.drafter!r}, not {kind!r}")
    tensors = _with_tied(drafter, saved.weights)
    if isinstance(drafter, AdoptsWeights) and saved.drafter != kind:
        tensors = drafter.adopt_weights(tensors)
    elif isinstance(drafter, ConvertsWeights):
        try:
            tensors = drafter.convert_weights(tensors, saved.settings)
        except UserError as error:
            raise UserError(f"drafter.init_from={folder}: {error}") from None
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder}: damaged checkpoint ({first_line(error)})") from None
    for name, module in drafter.named_modules():
        saved_ids = tensors.get(f"{name}.d2t".removeprefix("."))
        if isinstance(module, Drafter) and module.sizes_vocabulary and saved_ids is not None:
            module.resize_vocabulary(len(saved_ids))  # the weights depend on the tokens
    unsaved = optional.unsaved_names(drafter)
    state = {name: value for name, value in drafter.state_dict().items() if name not in unsaved}
    matching = {
        name: tensors[name]
        for name, value in state.items()
        if name in tensors and tensors[name].shape == value.shape
    }
    if not matching:
        raise UserError(f"drafter.init_from={folder}: none of its {len(tensors)} tensors fits this drafter")
    drafter.load_state_dict(matching, strict=False)
    not_copied = [
        f"{name} ({tuple(value.shape)} here, {tuple(tensors[name].shape)} there)"
        if name in tensors
        else f"{name} (not there)"
        for name, value in state.items()
        if name not in matching
    ]
    return not_copied + [f"{name} (not here)" for name in tensors if name not in state]


def _with_tied(drafter: Drafter, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add tied tensors under their second names."""
    return weights | {name: weights[first] for name, first in _tied(drafter).items() if first in weights}


def _tied(drafter: Drafter) -> dict[str, str]:
    """Second name of each tied tensor -> first name; safetensors stores a tensor once."""
    first: dict[int, str] = {}
    aliases = {}
    for name, value in drafter.state_dict(keep_vars=True).items():
        if first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
    return aliases


def count_parameters(drafter: torch.nn.Module) -> int:
    """Number of weights."""
    return sum(p.numel() for p in drafter.parameters())
