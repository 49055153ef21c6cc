"""Read and validate the config and weights of a drafter folder, in our format or another program's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from decode.errors import UserError
from decode.model.target import Target
from drafters.base import Origin
from drafters.checkpoint import unread, validate
from drafters.export import formats, layout, weight_files
from drafters.export.layout import Layout, Saved
from drafters.hf import lora_files
from drafters.hub.untrusted_files import Shape, header, read_json
from drafters.registry import drafter_class

FORMAT = 1
# Exceptions that reading a damaged file may raise.
DAMAGE_ERRORS = (OSError, SafetensorError, RuntimeError, TypeError, AttributeError, ValueError, LookupError)
DAMAGE_ERRORS += (ArithmeticError,)
ORIGIN_KEYS = (
    "name",
    "revision",
    "fingerprint",
    "tokenizer",
    "published",
    "licence",
)  # under `target` in config.json


def target_name(folder: Path) -> str:
    """Path or hub id of a checkpoint's target.

    Raises:
        UserError: no checkpoint there, or it does not name a target.
    """
    name = target_origin(folder).name
    if not name:
        raise UserError(f"{folder}: it does not name its target; give target=<path or hub id>")
    return name


def drafter_kind(folder: Path) -> str:
    """Short name of the drafter in a folder; "" in another program's format.

    Raises:
        UserError: no checkpoint there.
    """
    config = read_config(folder)
    return config["drafter"] if is_native(config) else ""


def target_origin(folder: Path) -> Origin:
    """The target of a checkpoint; unknown fields are "" or None.

    Raises:
        UserError: no checkpoint there.
    """
    return config_origin(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Read a drafter's config.json, in our format or one of `export.formats`.

    Raises:
        UserError: no such file, an unknown format, or an unknown drafter.
    """
    path = folder / layout.FILES[0]
    if not path.is_file():
        raise UserError(f"checkpoint={folder}: {_instead(folder)}")
    config: Any = None
    try:
        config = read_json(path)
        kinds = {"format": int, "drafter": str, "settings": dict, "target": dict}
        broken = [key for key, kind in kinds.items() if not isinstance(config[key], kind)]
        broken += ["confidence"] * (not isinstance(config.get("confidence", False), bool))
    except KeyError:
        broken = ["its keys"]
    except (ValueError, TypeError) as error:
        broken = [first_line(error)]
    if isinstance(config, dict) and not is_native(config):
        if line := unread.refusal(config):
            raise UserError(f"{path}: {line}")
        if formats.find_reader(config):
            return config
    if broken:
        whole = isinstance(config, dict) and "model_type" in config
        more = "; to draft with a whole model set drafter=lm_given drafter.path=<it>" if whole else ""
        raise UserError(f"{path}: not a drafter's config ({', '.join(broken)}){more}")
    if config["format"] != FORMAT:
        raise UserError(f"{path}: format {config['format']}, this version reads {FORMAT}")
    drafter_class(config["drafter"])
    return config


def _instead(folder: Path) -> str:
    """What to give in place of a folder without a drafter."""
    if (best := folder / "checkpoints" / "best").exists():
        return f"a run's folder, not a checkpoint's; give {best}"
    return "no config.json there; give a checkpoints/<step> folder"


def config_origin(config: Mapping[str, Any]) -> Origin:
    """The target in a config; unknown fields are "" or None."""
    target = config["target"] if is_native(config) else {"name": _verifier(config)}
    fields = {name: value if isinstance(value := target.get(name), str) else "" for name in ORIGIN_KEYS}
    return Origin(
        fields["name"],
        fields["revision"] or None,
        fields["fingerprint"],
        fields["tokenizer"],
        published=fields["published"],
        licence=fields["licence"],
    )


def _verifier(config: Any) -> Any:
    """Target that a config of speculators names; "" if none."""
    for key in ("speculators_config", "verifier", "name_or_path"):
        config = config.get(key, "") if isinstance(config, dict) else ""
    return config


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether a config is in this toolkit's format."""
    return "format" in config


def read_saved(folder: Path, config: dict[str, Any], target: Target) -> Saved:
    """Read a drafter folder in any known format.

    Args:
        folder: of a drafter.
        config: from `read_config`.
        target: of the drafter; some formats take sizes from it.

    Raises:
        UserError: the files are damaged, or do not match the config.
    """
    foreign = None if is_native(config) else formats.find_reader(config)
    try:
        if foreign is None:
            _validate(folder, config, header(folder / layout.FILES[1]), target)
            weights = load_file(folder / layout.FILES[1]) | lora_files.read_adapters(folder)
            return Saved(config["drafter"], config["settings"], weights, config.get("confidence", False))
        return foreign.read(Layout(config, weight_files.read_tensors(folder)), target)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except DAMAGE_ERRORS as error:
        raise UserError(f"{folder}: damaged checkpoint ({first_line(error)})") from None


def _validate(folder: Path, config: dict[str, Any], shapes: dict[str, Shape], target: Target) -> None:
    """Validate settings and the shapes on file before loading; see `checkpoint.validate`."""
    kind = drafter_class(config["drafter"])
    validate.check_settings(kind, config["settings"])
    validate.check_bounds(config["settings"], target)
    validate.check_base(folder, config["settings"])
    pairs = folder / lora_files.FILES[1]
    if pairs.exists():
        shapes = shapes | {lora_files.drafter_name(name): shape for name, shape in header(pairs).items()}
    validate.check_shapes(kind, config["settings"], config.get("confidence", False), shapes)


def first_line(error: Exception) -> str:
    """First line of an error message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
