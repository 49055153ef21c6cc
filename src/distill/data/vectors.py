"""Storage formats of hidden states: bf16, or int8 with a scale per group of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

GROUP = 32  # numbers that share a scale, to limit the effect of a large one
LARGEST = 127


class VectorFormat(Protocol):
    """Stores (n, ..., D) vectors as tensors of n rows each.

    Attributes:
        name: name in options.
        suffixes: suffixes of the tensors' names.
    """

    name: str
    suffixes: tuple[str, ...]

    def size(self, hidden: int) -> int:
        """Bytes of a vector of `hidden` numbers."""
        ...

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """The tensors to store, on the CPU."""
        ...

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Restore the vectors."""
        ...


class Bfloat16:
    """Rounded to bf16; lossless for bf16 targets."""

    name, suffixes = "bfloat16", ("",)

    def size(self, hidden: int) -> int:
        """Two bytes a number."""
        return 2 * hidden

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """One tensor of the same shape."""
        return (vectors.to("cpu", torch.bfloat16),)

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See `VectorFormat`."""
        return stored[0].to(dtype)


class Int8:
    """Each group of 32 numbers is rounded to 255 steps between minus and plus its largest magnitude.

    The error is at most half a step, 1/254 of that magnitude (plus the scale's rounding to bf16). Groups are
    smaller if 32 does not divide the hidden size.
    """

    name, suffixes = "int8", ("", "_scales")

    def size(self, hidden: int) -> int:
        """A byte a number, and two for each group."""
        return hidden + 2 * hidden // gcd(hidden, GROUP)

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """(n, ..., D) int8 and (n, ..., G) bf16 scales."""
        groups = vectors.to("cpu", torch.float32).unflatten(-1, (-1, gcd(vectors.shape[-1], GROUP)))
        scales = (groups.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
        # Divide by the stored scale; a group of zeros has none.
        steps = groups / scales.float().clamp_min(torch.finfo(torch.float32).tiny)
        return steps.round().clamp(-LARGEST, LARGEST).to(torch.int8).flatten(-2), scales[..., 0]

    def decode(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See `VectorFormat`."""
        steps, scales = stored
        groups = steps.float().unflatten(-1, (scales.shape[-1], -1))
        return (groups * scales.float()[..., None]).flatten(-2).to(dtype)


FORMATS: dict[str, VectorFormat] = {one.name: one for one in (Bfloat16(), Int8())}
