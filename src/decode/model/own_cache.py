"""A model's own cache, for plain decoding of models whose state only goes forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.kernels.packed_linear import fast_linears

NAMES = ("past_key_values", "cache_params")  # of the cache in transformers' outputs and arguments


class OwnCache:
    """The cache that transformers makes for a model: recurrent states, compressed keys, or any other.

    Nothing can be taken back, and all rows have read equally many tokens.

    Args:
        base: the decoder of a model, without its head.
        weight: of the head; see `fast_linears`.
    """

    def __init__(self, base: Any, weight: Tensor) -> None:
        self._base, self._weight = base, weight
        self._held: dict[str, Any] = {}
        self._read = 0  # tokens of each row
        # Where given none, some classes take a layer's length for the text's, and recurrent ones have none.
        self._placed = "position_ids" in inspect.signature(base.forward).parameters

    def read(self, tokens: Tensor) -> Tensor:
        """Run (B, n) tokens after those that were read; n is 1 but in the first call.

        Returns:
            (B, n, D) input of the head.
        """
        more: dict[str, Any] = dict(self._held)
        if self._placed:
            places = torch.arange(self._read, self._read + tokens.shape[1], device=tokens.device)
            more["position_ids"] = places.expand(tokens.shape)
        self._read += tokens.shape[1]
        with fast_linears(self._weight):
            out = self._base(input_ids=tokens, use_cache=True, **more)
        self._held = {name: out[name] for name in NAMES if out.get(name) is not None}
        assert self._held, "the model returns no cache"
        return out.last_hidden_state

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        index = torch.tensor(list(rows), device=self._weight.device)
        for cache in self._held.values():
            cache.reorder_cache(index)
