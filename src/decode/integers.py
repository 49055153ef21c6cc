"""Checks of numbers; conversion of integers and token ids of any type to Python's."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from decode.errors import UserError


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Convert to a Python int, so that 3, np.int64(3) and torch.tensor(3) are the same seed.

    Args:
        value: any type that Python accepts as an integer, except bool.
        name: for the message.
        least: smallest value allowed; None: any.

    Raises:
        UserError: not an integer, or too small.
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


def finite_number(value: Any, name: str) -> None:
    """Check that a value is a finite number.

    Raises:
        UserError: it is not; `name` is for the message.
    """
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{name}={value!r}: give a number")


def token_ids(tokens: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    """Convert token ids to Python ints, because tensor elements never compare equal in a set or a dict.

    Raises:
        UserError: not a sequence of integers.
    """
    ids: Any = tokens.tolist() if isinstance(tokens, Tensor | np.ndarray) else tokens
    try:
        if any(isinstance(token, bool | np.bool) for token in ids):
            raise TypeError
        return [operator.index(token) for token in ids]
    except TypeError:
        raise UserError(f"token ids: give a list of integers, not {str(ids)[:40]}") from None
