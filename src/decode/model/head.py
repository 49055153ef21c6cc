"""Output head of a language model: hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decode.kernels.int8_linear import round_rows, rounded
from decode.kernels.packed_linear import linear
from decode.kernels.weight_state import weight_state


class Side(NamedTuple):
    """A low-rank term added to the logits; its input is r columns of the hidden state."""

    weight: Tensor  # (V_s, r)
    ids: Tensor | None = None  # (V_s,) head rows to add to; None: all, in order

    def add(self, logits: Tensor, low: Tensor) -> Tensor:
        """Add the term: (..., V') logits and (..., r) input -> (..., V') logits."""
        return self.scatter(logits, nn.functional.linear(low, self.weight))

    def scatter(self, logits: Tensor, values: Tensor) -> Tensor:
        """Add (..., V_s) values to the (..., V') logits at `ids`."""
        if self.ids is None:
            return logits + values
        return logits.expand(*values.shape[:-1], -1).index_add(-1, self.ids, values.to(logits.dtype))


@dataclass(frozen=True, slots=True)
class Head:
    """A linear map to logits, with optional scale and soft cap.

    Targets and drafters use the same class, so that Gemma's soft cap and Cohere's scale apply to both.
    A head is trainable if its `weight` (or `bias`, or `side.weight`) requires a gradient.

    Attributes:
        weight: (V, D); (V', D) for a reduced draft vocabulary.
        bias: (V,).
        scale: factor of the logits.
        softcap: c of z -> c tanh(z / c), applied after `scale`.
        d2t: (V',) target id of every draft id, without repetition; None: the target's vocabulary.
        side: low-rank term; its input is the columns of the hidden state after the first D.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    d2t: Tensor | None = None
    side: Side | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., D + r) -> (..., V) logits; (..., V') over draft ids if there is a `d2t`."""
        states, low = self.parts(hidden)
        z = self.product(states)
        return self.shape(z if self.side is None else self.side.add(z, low))

    def product(self, states: Tensor) -> Tensor:
        """(..., D) -> (..., V) output of the linear map, before scale and soft cap."""
        return linear(states, self.weight, self.bias)

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split (..., D + r) into the (..., D) input of `weight` and the (..., r) input of `side`."""
        size = self.weight.shape[1]
        return hidden[..., :size], hidden[..., size:]

    def shape(self, z: Tensor) -> Tensor:
        """Apply scale and soft cap."""
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Derivative of `shape` as a function of its output; None if it is 1."""
        if self.softcap is None:
            return None if self.scale == 1.0 else self.scale
        return (1 - (logits / self.softcap) ** 2) * self.scale

    def target_ids(self, ids: Tensor) -> Tensor:
        """Map ids of the head to target ids."""
        return ids if self.d2t is None else self.d2t[ids]


class HeadRows:
    """Rows of frozen heads that a drafter reads; copied again only if the heads or the rows change."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[tuple[int, ...], nn.Parameter]] = {}

    def of(self, head: Head, d2t: Tensor | None, int8: bool = False) -> Head:
        """A head over the (V',) target ids in `d2t`, or over all; `int8`: with quantised weights."""
        weight = head.weight
        if d2t is None and (not int8 or rounded(weight) is not None):
            return head
        key = (int8, *weight_state(weight), *(() if d2t is None else weight_state(d2t)))
        copy = self._copies.get(id(weight))
        if copy is None or copy[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # also used outside inference mode
                rows = nn.Parameter(weight.clone() if d2t is None else weight[d2t], requires_grad=False)
                if int8:
                    round_rows(rows)
            copy = self._copies[id(weight)] = key, rows
        if d2t is None:
            return replace(head, weight=copy[1])
        return replace(head, weight=copy[1], bias=None if head.bias is None else head.bias[d2t], d2t=d2t)
