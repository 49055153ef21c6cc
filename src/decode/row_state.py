"""States with one entry per row of a batch: keep some rows, or append another state's."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.transfer import RowInts


def select_rows(state: Any, rows: RowInts) -> Any:
    """Keep these rows of a state, in this order.

    Args:
        state: a tensor, an array or `RowInts` with rows first; a list with one entry per row; an object with
            `select`; or a dataclass of these. None, numbers, texts and empty lists are unchanged. All but the
            first three are changed in place.
        rows: rows to keep.

    Raises:
        TypeError: another type.
    """
    if isinstance(state, Tensor):
        return state[rows.on(state.device)]
    if isinstance(state, RowInts):
        return state.select(rows)
    if isinstance(state, np.ndarray):
        return state[list(rows)]
    if isinstance(state, list):
        if state:
            state[:] = [state[row] for row in rows]
    elif hasattr(state, "select"):
        state.select(rows)
    elif is_dataclass(state):
        for name in _names(state):
            setattr(state, name, select_rows(getattr(state, name), rows))
    elif not _has_no_rows(state):
        raise TypeError(f"{type(state).__name__} has no rows to select")
    return state


def append_rows(state: Any, other: Any) -> Any:
    """Append another state's rows; the other state must not be used afterwards.

    Args:
        state: as in `select_rows`, with `append` instead of `select`.
        other: of the same type.

    Raises:
        TypeError: another type, or states of different types.
    """
    if type(state) is not type(other):
        raise TypeError(f"{type(other).__name__} has no rows for {type(state).__name__}")
    if isinstance(state, Tensor):
        return torch.cat([state, other])
    if isinstance(state, RowInts):
        return state.joined(other)
    if isinstance(state, np.ndarray):
        return np.concatenate([state, other])
    if isinstance(state, list):
        state += other
    elif hasattr(state, "append"):
        state.append(other)
    elif is_dataclass(state):
        for name in _names(state):
            setattr(state, name, append_rows(getattr(state, name), getattr(other, name)))
    elif not _has_no_rows(state):
        raise TypeError(f"{type(state).__name__} has no rows to append")
    return state


def _names(state: Any) -> list[str]:
    return [field.name for field in fields(state)]


def _has_no_rows(state: Any) -> bool:
    return state is None or isinstance(state, (bool, int, float, str))
