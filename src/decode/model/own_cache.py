"""A model's own cache, for plain decoding of models that cannot roll back their state."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from decode.kernels.packed_linear import fast_linears
from decode.kernels.weight_state import notice_changes

# Names of the cache in transformers' outputs and arguments, newest first. Since 5.24 the others are aliases.
NAMES = ("cache", "past_key_values", "cache_params")


@cache
def cache_name(base: type) -> str:
    """Name of the cache argument of a class's forward pass.

    Args:
        base: decoder class, without the head.

    Raises:
        UserError: it has no such argument.
    """
    taken = inspect.signature(base.forward).parameters
    for name in NAMES:
        if name in taken:
            return name
    raise UserError(f"target: the forward pass of {base.__name__} takes no cache; not supported")


class OwnCache:
    """The cache that transformers creates for a model: recurrent states, compressed keys, or any other.

    It cannot be rolled back, and all rows have the same length.

    Args:
        base: decoder of a model, without its head.
        weight: weight of the head; see `fast_linears`.
    """

    def __init__(self, base: Any, weight: Tensor) -> None:
        notice_changes()
        self._base, self._weight = base, weight
        self._name = cache_name(type(base))
        self._cache: Any = None
        self._read = 0  # tokens read per row
        # Without positions, some classes use the length of one layer's cache, and recurrent layers have none.
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters

    def read(self, tokens: Tensor) -> Tensor:
        """Run (B, n) tokens after the tokens read so far; n is 1 after the first call.

        Returns:
            (B, n, D) input of the head.
        """
        more: dict[str, Any] = {} if self._cache is None else {self._name: self._cache}
        if self._takes_positions:
            places = torch.arange(self._read, self._read + tokens.shape[1], device=tokens.device)
            more["position_ids"] = places.expand(tokens.shape)
        self._read += tokens.shape[1]
        with fast_linears(self._weight):
            out = self._base(input_ids=tokens, use_cache=True, **more)
        # Keep one reference: an output may hold the cache under several names, and it is changed in place.
        self._cache = next((out[name] for name in NAMES if out.get(name) is not None), None)
        if self._cache is None:
            raise UserError(f"target: {type(self._base).__name__} returns no cache; not supported")
        return out.last_hidden_state

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._cache.reorder_cache(torch.tensor(list(rows), device=self._weight.device))
