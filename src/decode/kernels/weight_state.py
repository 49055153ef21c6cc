"""Whether a copy of a weight may stand for it in decoding, and whether the weight has changed since."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_frozen(weight: Tensor) -> bool:
    """Whether a weight needs no gradient and shows changes."""
    # Other kinds of tensors are views made anew in every call, or sharded, or hide their changes.
    return type(weight) is nn.Parameter and not weight.requires_grad and not weight.is_inference()


def may_copy(weight: Tensor) -> bool:
    """Whether decoding may keep a copy of this weight."""
    return is_frozen(weight) and torch.is_inference_mode_enabled()


def weight_state(weight: Tensor) -> tuple[int, int]:
    """Changes whenever the tensor's memory is replaced or written to."""
    # private API: torch has no public way to ask whether a tensor was changed in place. Inference tensors
    # have no count of changes.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
