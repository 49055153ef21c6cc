"""The one place where weights are read that were not saved as safetensors: other programs' alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.errors import UserError
from drafters.export.layout import FILES

PICKLED = "pytorch_model.bin"  # what many public drafters have in place of safetensors


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Tensors of another program's folder; of a pickled file nothing but tensors is ever made.

    Raises:
        UserError: a pickled file that holds anything else.
    """
    if (folder / FILES[1]).exists() or not (folder / PICKLED).exists():
        return load_file(folder / FILES[1])
    try:
        found = torch.load(  # noqa: TID251
            folder / PICKLED, map_location="cpu", weights_only=True, mmap=True
        )
    except (pickle.UnpicklingError, EOFError, ValueError) as error:
        what = type(error).__name__
        raise UserError(f"{PICKLED} holds more than weights, or is damaged ({what})") from None
    if not (isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values())):
        raise UserError(f"{PICKLED} holds more than named tensors")
    return found
