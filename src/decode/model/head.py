"""The output head of a language model: logits of hidden states, and side inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Side(NamedTuple):
    """A low-rank part of the logits, from its own few columns of the hidden state."""

    weight: Tensor  # (V_s, r)
    ids: Tensor | None = None  # (V_s,) the head's own ids of its rows; None: all, in order

    def add(self, logits: Tensor, low: Tensor) -> Tensor:
        """(..., V') logits and (..., r) -> their sum."""
        return self.scatter(logits, nn.functional.linear(low, self.weight))

    def scatter(self, logits: Tensor, own: Tensor) -> Tensor:
        """(..., V') logits and (..., V_s) -> their sum."""
        if self.ids is None:
            return logits + own
        return logits.expand(*own.shape[:-1], -1).index_add(-1, self.ids, own.to(logits.dtype))


@dataclass(frozen=True, slots=True)
class Head:
    """A linear map to logits with what families put behind it.

    Target and drafter heads are one class, so Gemma's soft cap or Cohere's scale are right in
    both. A head trains where its `weight` (or `bias`, or `side.weight`) requires a gradient.

    Attributes:
        weight: (V, D); (V', D) of a reduced draft vocabulary.
        bias: (V,).
        scale: z -> scale z.
        softcap: z -> c tanh(z / c), after `scale`.
        d2t: (V',) the target's id of every draft id, each once; None: the target's vocabulary.
        side: a second part, which reads the columns of the hidden state behind the first D.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    d2t: Tensor | None = None
    side: Side | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., D + r) -> (..., V) logits; (..., V') over its own ids where there is a `d2t`."""
        states, low = self.parts(hidden)
        z = self.product(states)
        return self.shape(z if self.side is None else self.side.add(z, low))

    def product(self, states: Tensor) -> Tensor:
        """(..., D) -> (..., V) of the linear map alone."""
        return nn.functional.linear(states, self.weight, self.bias)

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(..., D + r) -> (..., D) that `weight` reads and (..., r) that `side` does."""
        size = self.weight.shape[1]
        return hidden[..., :size], hidden[..., size:]

    def shape(self, z: Tensor) -> Tensor:
        """What is behind the linear map."""
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Derivative of `shape` from its values; None where it is 1."""
        if self.softcap is None:
            return None if self.scale == 1.0 else self.scale
        return (1 - (logits / self.softcap) ** 2) * self.scale

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of the head's own."""
        return ids if self.d2t is None else self.d2t[ids]
