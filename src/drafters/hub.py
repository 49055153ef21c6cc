"""Saving and loading drafters: safetensors and a config.json, nothing that is ever executed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from decode.target import Target
from drafters import adapters
from drafters.base import Drafter
from drafters.export import layout, table
from drafters.export.layout import Layout, Saved
from drafters.export.pickled import PICKLED, weights_of

FILES = (*layout.FILES, PICKLED, *adapters.FILES)
FORMAT = 1
# A closed table: what a downloaded config names is looked up here and nowhere else.
CLASSES = {
    "bigram": "drafters.bigram:Bigram",
    "dflash": "drafters.dflash:DFlash",
    "diffusion": "drafters.diffusion:Diffusion",
    "eagle": "drafters.eagle:Eagle",
    "eagle3": "drafters.eagle3:Eagle3",
    "hf_dllm": "drafters.dllm:Dllm",
    "hydra": "drafters.hydra:Hydra",
    "lm": "drafters.lm:DraftLM",
    "lyanna": "drafters.lyanna:Lyanna",
    "lstm": "drafters.mlp:Lstm",
    "medusa": "drafters.medusa:Medusa",
    "medusa2": "drafters.medusa:Medusa2",
    "mlp": "drafters.mlp:Mlp",
    "ngram": "drafters.ngram:Ngram",
    "p_eagle": "drafters.p_eagle:PEagle",
    "prism": "drafters.prism:Prism",
    "suffix": "drafters.suffix:Suffix",
}


def drafter_class(name: str) -> type[Drafter]:
    """The class behind a short name.

    Raises:
        UserError: a name that is not in the table.
    """
    if name not in CLASSES:
        raise UserError(f"drafter {name!r} is not known; known are {', '.join(sorted(CLASSES))}")
    module, _, attribute = CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def short_name(drafter: Drafter) -> str:
    """The inverse of `drafter_class`."""
    where = f"{type(drafter).__module__}:{type(drafter).__qualname__}"
    return next(name for name, entry in CLASSES.items() if entry == where)


def save(
    drafter: Drafter,
    target: Target,
    folder: Path,
    target_name: str = "",
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `config.json`, and in `model.safetensors` what is not another model's, into an existing folder.

    Adapters lie beside it as PEFT has them.

    Args:
        drafter: what is saved.
        target: that it was made for.
        folder: to write into.
        target_name: written down beside the target's fingerprint.
        weights: whole, of a drafter whose own are cut up among processes; None: its own.
    """
    left_out, weights = drafter.borrowed | _tied(drafter).keys(), weights or drafter.state_dict()
    whole = {k: v.detach().cpu().contiguous() for k, v in weights.items() if k not in left_out}
    save_file(drafter.put_aside(whole, folder), folder / "model.safetensors")
    config = {
        "format": FORMAT,
        "drafter": short_name(drafter),
        "settings": drafter.settings,
        "confidence": drafter.confidence is not None,
        "taps": list(drafter.taps),
        "taps_mean": "the value entering decoder layer i; 'last' is the head's input",
        "target": {"name": target_name, "fingerprint": target.fingerprint()},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def load(folder: str | Path, target: Target) -> Drafter:
    """Read a drafter saved by `save`, or by a program that `export.table` knows.

    It is frozen, in the target's dtype and on its device.

    Raises:
        UserError: no checkpoint there, a damaged one, or one made for another target; adapters
            whose base is gone or is another model by now.
    """
    folder = Path(folder)
    config = _config(folder)
    other = config["target"] if _ours(config) else {}
    if other and other.get("fingerprint") != target.fingerprint():
        raise UserError(
            f"{folder}: this drafter was made for target {other.get('name') or '(unnamed)'!r} "
            "with other weights or another vocabulary; score it with that target"
        )
    saved = _saved(folder, config, target)
    try:
        drafter = drafter_class(saved.drafter).restore(dict(saved.settings), target)
        if saved.confidence:
            drafter.add_confidence()
        drafter.load_state_dict(_named_twice(drafter, saved.weights))
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except (RuntimeError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: damaged checkpoint ({_first(error)})") from None
    return drafter.to(target.device, target.dtype).eval().requires_grad_(False)


def opened(drafter: Drafter) -> Saved:
    """A drafter without its code."""
    weights = {k: v.detach() for k, v in drafter.state_dict().items() if k not in drafter.borrowed}
    return Saved(short_name(drafter), drafter.settings, weights, drafter.confidence is not None)


def made_for(folder: Path) -> str:
    """Path or hub id of the target that a checkpoint was made for.

    Raises:
        UserError: no checkpoint there, or it does not say.
    """
    config = _config(folder)
    name = config["target"].get("name") if _ours(config) else None
    if not name:
        raise UserError(
            f"{folder}: it does not say for which target it was made; give target=<path or hub id>"
        )
    return name


def fetch(source: str) -> Path:
    """The local folder of a drafter: `source` itself, or the hub repository of that name, fetched.

    Only `FILES` are ever downloaded.

    Raises:
        UserError: neither a folder nor a repository that can be had.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{source}: no such folder, and not to be had from the hub ({_first(error)})"
        ) from None


def warm_start(drafter: Drafter, folder: Path, target: Target) -> list[str]:
    """Begin with another drafter's weights and buffers where names and shapes agree.

    It may have been made for another target: that is what one warm-starts for.

    Args:
        drafter: fresh; changed in place.
        folder: of a drafter of the same class or of the one that it `continues`; see `load`.
        target: that the fresh one is for.

    Returns:
        What stays as it was: "name (its shape here, there)", "name (not there)" or "name (not here)".

    Raises:
        UserError: no checkpoint there, a damaged one, another class, or nothing that fits.
    """
    config, kind = _config(folder), short_name(drafter)
    saved = _saved(folder, config, target)
    if saved.drafter not in (kind, drafter.continues):
        raise UserError(f"drafter.init_from={folder}: drafter {saved.drafter!r}, not {kind!r}")
    found = _named_twice(drafter, saved.weights)
    if saved.drafter != kind:
        found = drafter.adopt(found)
    else:
        try:
            found = drafter.translate(found, saved.settings)
        except UserError as error:
            raise UserError(f"drafter.init_from={folder}: {error}") from None
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder}: damaged checkpoint ({_first(error)})") from None
    own = {name: value for name, value in drafter.state_dict().items() if name not in drafter.borrowed}
    fits = {
        name: found[name] for name, value in own.items() if name in found and found[name].shape == value.shape
    }
    if not fits:
        raise UserError(f"drafter.init_from={folder}: none of its {len(found)} tensors fits this drafter")
    drafter.load_state_dict(fits, strict=False)
    left = [
        f"{name} ({tuple(value.shape)} here, {tuple(found[name].shape)} there)"
        if name in found
        else f"{name} (not there)"
        for name, value in own.items()
        if name not in fits
    ]
    return left + [f"{name} (not here)" for name in found if name not in own]


def _ours(config: Mapping[str, Any]) -> bool:
    return "format" in config


def _saved(folder: Path, config: dict[str, Any], target: Target) -> Saved:
    """What a folder holds, whoever wrote it."""
    known = None if _ours(config) else table.reader(config)
    try:
        if known is not None:
            return known.read(Layout(config, weights_of(folder)), target)
        weights = load_file(folder / layout.FILES[1]) | adapters.read(folder)
        return Saved(config["drafter"], config["settings"], weights, config.get("confidence", False))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except (OSError, SafetensorError, RuntimeError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: damaged checkpoint ({_first(error)})") from None


def _named_twice(drafter: Drafter, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With what the drafter has under a second name."""
    return weights | {name: weights[first] for name, first in _tied(drafter).items() if first in weights}


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _tied(drafter: Drafter) -> dict[str, str]:
    """Tensors that are others under a second name, which safetensors would not keep apart."""
    first: dict[int, str] = {}
    found = {}
    for name, value in drafter.state_dict(keep_vars=True).items():
        if first.setdefault(id(value), name) != name:
            found[name] = first[id(value)]
    return found


def _config(folder: Path) -> dict[str, Any]:
    path = folder / layout.FILES[0]
    if not path.is_file():
        raise UserError(f"checkpoint={folder}: no config.json there; give a checkpoints/<step> folder")
    config: Any = None
    try:
        config = json.loads(path.read_text())
        kinds = {"format": int, "drafter": str, "settings": dict, "target": dict}
        broken = [key for key, kind in kinds.items() if not isinstance(config[key], kind)]
    except (ValueError, KeyError, TypeError):
        broken = ["its keys"]
    if isinstance(config, dict) and not _ours(config) and table.reader(config):
        return config
    if broken:
        raise UserError(f"{path}: not a drafter's config ({', '.join(broken)})")
    if config["format"] != FORMAT:
        raise UserError(f"{path}: format {config['format']}, this version reads {FORMAT}")
    return config


def parameters(drafter: torch.nn.Module) -> int:
    """Number of weights."""
    return sum(p.numel() for p in drafter.parameters())
