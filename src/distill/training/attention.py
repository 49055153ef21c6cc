"""Attention of drafters in training on a card."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distill.losses.attempt import Attempt
from drafters.layers.unroll_attention import Attend, Visibility, attend_unrolled
from drafters.layers.unroll_flex import attend_flex


def compiled_attention() -> Attend:
    """`attend_flex` compiled; `attend_unrolled` where it cannot be compiled, which one line says."""
    attempt = Attempt("attention")

    def attend(
        q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visibility: Visibility, /
    ) -> Tensor:
        given = q, keys, values, visibility
        return attempt(lambda: attend_flex(*given), lambda: attend_unrolled(*given))

    return attend
