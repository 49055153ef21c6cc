"""A model's own cache, for plain decoding of models whose state only goes forward."""

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

# Of the cache in transformers' outputs and arguments, the newest first. From 5.24 on the others are aliases.
NAMES = ("cache", "past_key_values", "cache_params")


@cache
def cache_name(base: type) -> str:
    """The name under which a class's forward pass takes its cache.

    Args:
        base: class of a decoder without its head.

    Raises:
        UserError: it takes none.
    """
    taken = inspect.signature(base.forward).parameters
    for name in NAMES:
        if name in taken:
            return name
    raise UserError(f"target: the forward pass of {base.__name__} takes no cache; not supported")


class OwnCache:
    """The cache that transformers makes for a model: recurrent states, compressed keys, or any other.

    Nothing can be taken back, and all rows have read equally many tokens.

    Args:
        base: the decoder of a model, without its head.
        weight: of the head; see `fast_linears`.
    """

    def __init__(self, base: Any, weight: Tensor) -> None:
        notice_changes()
        self._base, self._weight = base, weight
        self._name = cache_name(type(base))
        self._held: Any = None  # the cache
        self._read = 0  # tokens of each row
        # Where given none, some classes take a layer's length for the text's, and recurrent ones have none.
        self._placed = "position_ids" in inspect.signature(base.forward).parameters

    def read(self, tokens: Tensor) -> Tensor:
        """Run (B, n) tokens after those that were read; n is 1 but in the first call.

        Returns:
            (B, n, D) input of the head.
        """
        more: dict[str, Any] = {} if self._held is None else {self._name: self._held}
        if self._placed:
            places = torch.arange(self._read, self._read + tokens.shape[1], device=tokens.device)
            more["position_ids"] = places.expand(tokens.shape)
        self._read += tokens.shape[1]
        with fast_linears(self._weight):
            out = self._base(input_ids=tokens, use_cache=True, **more)
        # Once, though an output may hold it under several names: it is changed in place.
        self._held = next((out[name] for name in NAMES if out.get(name) is not None), None)
        if self._held is None:
            raise UserError(f"target: {type(self._base).__name__} returns no cache; not supported")
        return out.last_hidden_state

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._held.reorder_cache(torch.tensor(list(rows), device=self._weight.device))
