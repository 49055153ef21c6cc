"""Whole numbers and token ids that callers give, in whatever type they have them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from decode.errors import UserError


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """The integer as Python's own, so that 3, np.int64(3) and torch.tensor(3) are one seed.

    Args:
        value: of any type that counts as an integer to Python; True and False do not.
        name: for the message.
        least: smallest value allowed; None: any.

    Raises:
        UserError: something else, or a smaller number.
    """
    try:
        if isinstance(value, bool | np.bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name}={value!r}: give an integer") from None
    if least is not None and number < least:
        raise UserError(f"{name}={number}: give an integer of at least {least}")
    return number


def token_ids(tokens: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    """Token ids as Python's integers: those of a tensor are never equal to any in a set or a dict.

    Raises:
        UserError: ids that are no integers, or no sequence of any.
    """
    ids: Any = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else tokens
    try:
        if any(isinstance(token, bool | np.bool) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        raise UserError(f"token ids: give a list of integers, not {str(ids)[:40]}") from None
