"""Adapters on file, in PEFT's own form, and the model that they belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode.errors import UserError
from decode.model.load import is_masked, load_model
from decode.model.target import Target
from drafters.families.hf_build import DOWN, UP, cut_target

FILES = ("adapter_config.json", "adapter_model.safetensors")  # peft's names
OPTION = "settings.base.path"  # of a checkpoint's config.json


class LoraBase(NamedTuple):
    """The model that adapters were trained beside; a checkpoint names it and does not hold it.

    Attributes:
        path: folder, absolute, or hub id; None: cut from the target.
        revision: commit of a hub id.
        layers: of the target's, that the cut keeps.
        fingerprint: see `fingerprint`.
    """

    path: str | None = None
    revision: str | None = None
    layers: int | None = None
    fingerprint: str = ""

    def load(self, target: Target, masked: bool = False) -> PreTrainedModel:
        """The model, in its own dtype.

        Args:
            target: to cut it from, if it was.
            masked: as in `decode.model.load.load_config`.

        Raises:
            UserError: it is not there any more, or is another model by now.
        """
        if self.path is None:
            model = cut_target(target, self.layers or 0)
        else:
            try:
                model = load_model(self.path, revision=self.revision, what=OPTION, masked=masked)
            except UserError as error:
                raise UserError(f"these adapters need the model that they were trained on: {error}") from None
        if fingerprint(model) != self.fingerprint:
            raise UserError(
                f"these adapters were trained on other weights than {OPTION}={self.path or 'null'} has now; "
                "write there where the original is, or train anew"
            )
        return model


def locate_base(model: PreTrainedModel, path: str, revision: str | None = None) -> LoraBase:
    """Where a loaded model is, whoever asks and whenever: an absolute folder, or a hub id's commit."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return LoraBase(str(folder.resolve()))
    return LoraBase(path or None, getattr(model.config, "_commit_hash", None) or revision)


def fingerprint(model: PreTrainedModel) -> str:
    """Tells a model's weights from another's, whatever dtype they are in: a sample of every one."""
    return sample_hash(model.named_parameters())


def sample_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of a few hundred values of each."""
    digest = hashlib.sha256()
    for name, weight in sorted(tensors, key=lambda pair: pair[0]):
        flat = weight.detach().flatten()
        sample = flat[:: flat.numel() // 512 | 1].to("cpu", torch.bfloat16)  # odd, so columns change
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


# -- files -----------------------------------------------------------------------------------------


def split_adapters(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Adapters by PEFT's names on file, and everything else by its own."""
    pairs = {_on_file(n): w for n, w in tensors.items() if n.endswith((DOWN, UP))}
    return pairs, {n: w for n, w in tensors.items() if not n.endswith((DOWN, UP))}


def write_adapters(
    folder: Path, pairs: Mapping[str, Tensor], lora: Mapping[str, Any], model: PreTrainedModel, base: LoraBase
) -> None:
    """Write what `peft.PeftModel.from_pretrained(base, folder)` opens.

    Args:
        folder: exists.
        pairs: by PEFT's names on file.
        lora: r, alpha and targets.
        model: which they change, adapted or not.
        base: where that is.
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
    """Adapters in a folder, by the names that they have in a drafter; none where there is no file."""
    path = folder / FILES[1]
    return {drafter_name(name): w for name, w in load_file(path).items()} if path.exists() else {}


def missing_adapters(tensors: Iterable[str], targets: Iterable[str], stem: str) -> list[str]:
    """Names of adapters of these maps, below `stem`, that are not among the tensors."""
    expected = {f"{stem}{target}{part}" for target in targets for part in (DOWN, UP)}
    return sorted(expected - set(tensors))


def _on_file(name: str) -> str:
    return "base_model." + name.replace(".default.weight", ".weight")


def drafter_name(name: str) -> str:
    """An adapter's name on file -> its name in a drafter."""
    stem, _, end = name.removeprefix("base_model.").rpartition(".")
    return f"{stem}.default.{end}"
