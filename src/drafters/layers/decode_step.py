"""One decoding pass of a drafter's layers over a few new slots of its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from decode.kernels.packed_linear import linear_add
from decode.kernels.weight_state import may_copy, weight_state
from decode.model.attention import attend, fast_dtype
from decode.model.target import Target
from drafters.layers.decoder_layer import DecoderLayer, Rotary
from drafters.layers.text_store import TextStore

TABLE_BYTES = 2**26  # limit for a table of token shares; 4,096 tokens of 768 entries in 16 bits take 6 MB


class TokenShares(NamedTuple):
    """Linear map of (token, feature), with the token's share looked up in a table."""

    table: Tensor  # (V, P)
    weight: nn.Parameter  # (P, D) of the feature

    def __call__(self, tokens: Tensor, feature: Tensor) -> Tensor:
        """(B, n) tokens and (B, n, D) features -> (B, n, P)."""
        return linear_add(self.table[tokens], feature, self.weight)


class SharesCache:
    """Cache of a drafter's token shares, computed while it decodes and again after a weight changed."""

    def __init__(self) -> None:
        self._cached: tuple[tuple[object, ...], TokenShares] | None = None

    def of(
        self,
        target: Target,
        weights: Sequence[Tensor],
        size: int,
        make: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> TokenShares | None:
        """The shares; None in training, outside inference mode, or if the table is large or elsewhere.

        Args:
            target: shares its embedding.
            weights: the drafter's weights that the shares depend on.
            size: P.
            make: (V, D) embeddings of all tokens -> table and weight.
        """
        embed = cast("Any", target.embed)
        sources = [embed.weight, *weights]
        count, dtype, device = len(embed.weight), weights[0].dtype, embed.weight.device
        large = count * size * dtype.itemsize > TABLE_BYTES
        # An offloaded target's embedding is on another device, or on none.
        if large or device != weights[0].device or not all(map(may_copy, sources)):
            return None
        key = tuple((w.device, w.dtype, *weight_state(w)) for w in sources)
        if self._cached is None or self._cached[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # not as inference tensors
                embedded: Tensor = embed(torch.arange(count, device=device))
                table, weight = make(embedded.to(dtype))
                self._cached = key, TokenShares(table, nn.Parameter(weight.contiguous(), requires_grad=False))
        return self._cached[1]


def run_after(
    store: TextStore,
    stack: Sequence[DecoderLayer],
    rotary: Rotary,
    x: Tensor,
    block: Tensor | int,
    offsets: Tensor | int,
    qkv: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Run decoder layers over (B, n, D) new slots after the settled ones; returns (B, n, D).

    Args:
        store: keys and values; the new ones are written to it and not settled.
        stack: the layers.
        rotary: positions.
        x: residual of the first layer.
        block: (B, n, m) or (1, n, m) bool, the visible ones of the m newest slots for each new slot: m - n
            scratch slots of earlier calls, then these n; or m, if n is 1 and all are visible.
        offsets: number of positions between the settled slots and each new one, broadcast to (B, n).
        qkv: (B, n, P) of the first layer; None: its product with the normalised x.
        first: index of the first layer in the store.
    """
    new, newest = (1, block) if isinstance(block, int) else block.shape[1:]
    store.begin(new, newest - new)
    dtype = fast_dtype(x)
    positions = store.read.on(x.device)[:, None] + offsets
    angles = rotary.table(store.longest, x, dtype)[positions]
    mask = store.mask(block, offsets, x.device)
    for i, layer in enumerate(stack, first):
        projected: Tensor = layer.qkv_proj(layer.input_layernorm(x)) if qkv is None else qkv
        q, k, v = (t.transpose(1, 2) for t in layer.split(projected.to(dtype), angles))
        k, v = store.write(i, k, v)
        attended = attend(q, k, v, mask).transpose(1, 2).flatten(2)
        x, qkv = layer.finish(x, attended.to(x.dtype)), None
    return x
