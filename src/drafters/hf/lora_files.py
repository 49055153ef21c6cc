"""LoRA adapters in PEFT's file format, and the base model they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.errors import UserError
from decode.model.identity.fingerprint import check_current, module_fingerprint
from decode.model.load import is_masked, load_model
from decode.model.target import Target
from drafters.hf.build import DOWN, UP, cut_target

FILES = ("adapter_config.json", "adapter_model.safetensors")  # peft's names
OPTION = "settings.base.path"  # of a checkpoint's config.json


class LoraBase(NamedTuple):
    """The base model of adapters; a checkpoint refers to it and does not contain it.

    Attributes:
        path: absolute folder or hub id; None: layers of the target.
        revision: commit of a hub id.
        layers: number of layers taken from the target.
        fingerprint: of its weights, see `decode.model.identity.fingerprint`.
    """

    path: str | None = None
    revision: str | None = None
    layers: int | None = None
    fingerprint: str = ""

    def load(self, target: Target, masked: bool = False) -> PreTrainedModel:
        """Load the model in its own dtype.

        Args:
            target: the source of layers if there is no path.
            masked: as in `decode.model.load.load_config`.

        Raises:
            UserError: it is missing, its weights have changed, or an older version saved the adapters.
        """
        if self.path is None:  # the target's own fingerprint shows whether its weights changed
            return cut_target(target, self.layers or 0)
        check_current(self.fingerprint, f"adapters of {OPTION}={self.path}")
        try:
            model = load_model(self.path, revision=self.revision, what=OPTION, masked=masked)
        except UserError as error:
            raise UserError(f"these adapters need the model that they were trained on: {error}") from None
        if module_fingerprint(model) != self.fingerprint:
            raise UserError(
                f"these adapters were trained on other weights than {OPTION}={self.path} has now; "
                "set it to the original model, or train again"
            )
        return model


def locate_base(model: PreTrainedModel, path: str, revision: str | None = None) -> LoraBase:
    """Location of a loaded model for later loading: an absolute folder, or a hub id with its commit."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return LoraBase(str(folder.resolve()))
    return LoraBase(path or None, getattr(model.config, "_commit_hash", None) or revision)


# -- files -----------------------------------------------------------------------------------------


def split_adapters(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split tensors into adapters, by PEFT's names on file, and all others."""
    pairs = {_file_name(n): w for n, w in tensors.items() if n.endswith((DOWN, UP))}
    return pairs, {n: w for n, w in tensors.items() if not n.endswith((DOWN, UP))}


def write_adapters(
    folder: Path, pairs: Mapping[str, Tensor], lora: Mapping[str, Any], model: PreTrainedModel, base: LoraBase
) -> None:
    """Write a folder for `peft.PeftModel.from_pretrained(base, folder)`.

    Args:
        folder: an existing folder.
        pairs: adapters by PEFT's names on file.
        lora: r, alpha and targets.
        model: the base model, with or without adapters.
        base: its location.
    """
    save_file(dict(pairs), folder / FILES[1])
    config = {
        "peft_type": "LORA",
        "task_type": None if is_masked(model.config) else "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "revision": base.revision,
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0,
        "target_modules": list(lora["targets"]),
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in model.modules()),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / FILES[0]).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Adapters in a folder, by their names in a drafter; empty without a file."""
    path = folder / FILES[1]
    return {drafter_name(name): w for name, w in load_file(path).items()} if path.exists() else {}


def missing_adapters(tensors: Iterable[str], targets: Iterable[str], stem: str) -> list[str]:
    """Names of adapters of these target modules, with prefix `stem`, that are missing from the tensors."""
    expected = {f"{stem}{target}{part}" for target in targets for part in (DOWN, UP)}
    return sorted(expected - set(tensors))


def _file_name(name: str) -> str:
    return "base_model." + name.replace(".default.weight", ".weight")


def drafter_name(name: str) -> str:
    """Name of an adapter in a drafter, from its name on file."""
    stem, _, end = name.removeprefix("base_model.").rpartition(".")
    return f"{stem}.default.{end}"
